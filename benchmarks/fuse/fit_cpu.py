"""A profile of CPU operators, fitted on times of this machine: what a laptop's kernels cost where nobody measured them
there.

    python benchmarks/fuse/fit_cpu.py --out src/sennit/cost/profiles/cpu-rank.json [--keep measured.pkl]

Training steps of several models at small sizes run operator by operator on one thread (`fuse/measure_torch.py`, CPU
time of the thread). Times over the roofline of the preset `laptop` are fitted by family (`cost/profile.py`). Each model
is predicted by a fit of all others, beside the roofline with its best factor, before the profile of all of them is
written.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import msgspec
import numpy as np
import torch

from sennit.capture import capture_call
from sennit.cli_model import load_model
from sennit.cluster import load
from sennit.cost import Work, works
from sennit.cost.profile import Profile, Reference, fit_family, lower_bound
from sennit.fuse.draws_torch import with_torch_draws
from sennit.fuse.kernel_cost import as_step
from sennit.fuse.measure_torch import measure_step
from sennit.fuse.model import Channel, StepModel
from sennit.fuse.operator_class import moves_nothing
from sennit.fuse.signature import signature

MODELS = (
    "gpt:layers=1,batch=4",
    "gpt:layers=1,batch=1,tokens=64",
    "bert-base:layers=1,batch=2,tokens=64",
    "t5-base:layers=1,batch=1,tokens=64",
    "vit-base:layers=1,batch=1",
    "resnet50:batch=1,layers=2",
    "rnnlm:batch=8,tokens=3,layers=1",
)
LEAST = 6  # points of a family that is fitted by itself


class _Nothing:
    def estimate(self, kernel: object, written: object) -> object:
        raise AssertionError("no time is asked")


def measured(name: str) -> list[tuple[Work, float]]:
    """(work, seconds) of each single operator that is one work."""
    model, sample = load_model(name)
    captured = capture_call(model, sample.args, dict(sample.kwargs))
    graph = with_torch_draws(captured.graph, torch.device("cpu"))
    types = graph.types()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    state.update(captured.signature.flatten(sample.args, dict(sample.kwargs)))
    found = {
        item.signature: item.seconds
        for item in measure_step(graph, state, torch.device("cpu"), rounds=5)
        if not item.strides
    }
    steps = StepModel(graph, _Nothing(), Channel(0.0, 0.0))  # type: ignore[arg-type]
    rows: list[tuple[Work, float]] = []
    seen: set[str] = set()
    for place, op in enumerate(graph.ops):
        key = signature(*steps.question(steps.single[place]), types)
        if key in found and key not in seen and not moves_nothing(op) and op.kind.startswith("aten."):
            seen.add(key)
            parts = works(as_step(op), types, {})
            if len(parts) == 1:
                rows.append((parts[0], found[key]))
    print(f"{name}: {len(graph.ops)} operators, {len(rows)} works", flush=True)
    return rows


def fitted(rows: list[tuple[Work, float]], reference: Reference, where: str) -> Profile:
    families: dict[str, list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    for work, seconds in rows:
        ratio = seconds / lower_bound(work, reference)
        for name in {work.family, work.general} - {None}:
            families[str(name)].append((work.features, ratio))
    kept = []
    for name, points in sorted(families.items()):
        widths = {len(features) for features, _ in points}
        if len(points) >= LEAST and len(widths) == 1:
            kept.append(fit_family(name, [features for features, _ in points], [ratio for _, ratio in points]))
    return Profile("CPU rank", where, reference, tuple(kept))


def errors(profile: Profile | None, rows: list[tuple[Work, float]], reference: Reference, factor: float) -> np.ndarray:
    found = []
    for work, seconds in rows:
        answer = profile.ratio(work) if profile is not None else None
        ratio = answer[0] if answer is not None else factor
        found.append(abs(ratio * lower_bound(work, reference) - seconds) / seconds)
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    reference = Reference.of(load("laptop").device)
    data = {name: measured(name) for name in arguments.models}
    every: dict[str, list[np.ndarray]] = {"roofline, one factor": [], "profile": []}
    for name, rows in data.items():
        others = [row for other, found in data.items() if other.split(":")[0] != name.split(":")[0] for row in found]
        factor = math.exp(float(np.median([math.log(s / lower_bound(w, reference)) for w, s in others])))
        every["roofline, one factor"].append(errors(None, rows, reference, factor))
        every["profile"].append(errors(fitted(others, reference, ""), rows, reference, factor))
    for name, parts in every.items():
        pooled = np.concatenate(parts)
        print(
            f"held-out models, {name:22s} median {100 * np.median(pooled):.0f} %  p90 {100 * np.quantile(pooled, 0.9):.0f} %"
        )
    where = f"one thread of {torch.backends.cpu.get_cpu_capability()} cores, torch {torch.__version__}, benchmarks/fuse/fit_cpu.py"
    profile = fitted([row for rows in data.values() for row in rows], reference, where)
    document = {
        "device": profile.device,
        "where": profile.where,
        "reference": profile.reference,
        "families": profile.families,
    }
    arguments.out.write_bytes(msgspec.json.encode(document))
    print(f"{arguments.out}: {len(profile.families)} families, {arguments.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
