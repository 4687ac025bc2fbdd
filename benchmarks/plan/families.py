"""Every family under data, tensor and pipeline plans on 2 and 4 ranks (gloo or NCCL), against the unsplit model in
eager torch.

    python benchmarks/plan/families.py                       # all of them
    python benchmarks/plan/families.py --families gpt2 t5 --ranks 2 --plans pipeline
    python benchmarks/plan/families.py --backend nccl        # on the GPUs of this machine, several ranks on one if need be

Three optimizer steps (SGD with momentum and clipping) in float64, dropout on. Printed for each: the largest relative
difference of losses, norms, gradients and parameters; operators of the graph; seconds of capture, planning and
verification on one rank (the ranks share this machine's cores), and of the three steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import time

import torch

from sennit.cluster.ranks_torch import GlooRanks, NcclRanks
from sennit.errors import SennitError
from sennit.testing.families_torch import families
from sennit.testing.family_parity_torch import family_reference, family_run

PRELOAD = ("sennit.testing.family_parity_torch", "torch.export", "torch._dynamo", "torch._functorch.aot_autograd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(families()))
    parser.add_argument("--plans", nargs="+", default=["data", "tensor", "pipeline"])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--json", help="write the rows here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, float64, {options.backend}")
    print(f"{'family':12s} {'plan':9s} {'ranks':>5s} {'difference':>11s} {'ops':>5s} {'capture':>8s} {'plan':>6s} {'verify':>7s} {'3 steps':>8s}")  # fmt: skip
    rows = []
    kind, device = (NcclRanks, "cuda") if options.backend == "nccl" else (GlooRanks, "cpu")
    for name in options.families:
        reference = family_reference(name, device)
        for count in options.ranks:
            with kind(count, timeout=600.0, preload=PRELOAD) as ranks:
                for how in options.plans:
                    row = {
                        "family": name,
                        "how": how,
                        "ranks": count,
                        "backend": options.backend,
                        **one(ranks, name, how, reference),
                    }
                    rows.append(row)
                    print(line(row), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)
    bad = [row for row in rows if row["difference"] is None or row["difference"] > 1e-12]
    print(f"{len(rows) - len(bad)} of {len(rows)} within 1e-12")


def one(ranks: GlooRanks, name: str, how: str, reference) -> dict:
    start = time.perf_counter()
    try:
        answers = ranks.call(family_run, name, how)
    except SennitError as error:
        said = [text for text in str(error).splitlines() if "Error: " in text]
        return {"difference": None, "error": said[0] if said else str(error)[:200]}
    first = answers[0]
    return {
        "difference": max(answer.record.difference(reference) for answer in answers),
        "operators": first.operators,
        **{stage: round(seconds, 2) for stage, seconds in first.compile_seconds.items()},
        "steps": round(first.step_seconds, 2),
        "all": round(time.perf_counter() - start, 2),
    }


def line(row: dict) -> str:
    head = f"{row['family']:12s} {row['how']:9s} {row['ranks']:5d} "
    if row["difference"] is None:
        return head + row["error"]
    return head + (
        f"{row['difference']:11.1e} {row['operators']:5d} {row['capture']:8.2f} {row['plan']:6.2f} "
        f"{row['verify']:7.2f} {row['steps']:8.2f}"
    )


if __name__ == "__main__":
    main()
