"""Trains the estimator of fused groups on measured ones, and compares it with simpler ones on models that none of them saw.

    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --compare [--jobs 6]           # errors on each model, held out in turn
    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --out estimator_h200.pt        # the weights that ship, from all of the data

Groups are split by model: all sizes and element types of the model that is held out are unseen. The error of a prediction p of a time t is |p - t| / t. Beside the graph network stand

    roofline         times the best constant factor on the models that may be seen
    by stages        `fuse/kernel_cost.py`, times its best factor
    boosted trees    scikit-learn's, where it is installed: the group's features, sums and maxima over its nodes; they predict what the network predicts

Groups whose middle half of timings spreads over more than a tenth of the median are left out, and counted.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import math
import multiprocessing
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch
from workloads import root_of

from sennit.cluster import load
from sennit.fuse.estimator_torch import Batch, GraphNetwork, collate, save_networks
from sennit.fuse.features import GroupFeatures, features_of
from sennit.fuse.kernel_cost import Staged
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel


@dataclass(frozen=True)
class Row:
    """`target` is log(seconds / seconds by stages), what the network predicts."""

    model: str
    group: GroupFeatures
    seconds: float
    target: float


def read(path: Path, cluster: str, limit: int | None) -> list[Row]:
    device = load(cluster).device
    rows: list[Row] = []
    unsteady = 0
    with gzip.open(path, "rt") as lines:
        for line in lines:
            found = json.loads(line)
            low, high = found["quartiles"]
            if high - low > 0.1 * found["seconds"]:
                unsteady += 1
                continue
            graph = Graph.parse(found["graph"])
            written = frozenset(output.name for output in graph.outputs)
            group = features_of(Kernel(graph.ops), written, Staged.of(graph, device))
            if group.staged > 0 and found["seconds"] > 0:
                target = math.log(found["seconds"] / group.staged)
                rows.append(Row(root_of(found["from"]), group, found["seconds"], target))
            if limit is not None and len(rows) >= limit:
                break
    models = sorted({row.model for row in rows})
    print(f"{len(rows)} groups of {', '.join(models)}; {unsteady} unsteady ones left out", flush=True)
    return rows


# ---- the network -----------------------------------------------------------------------------------------------------------


def batchings(rows: list[Row], device: str, count: int, size: int = 128) -> list[list[tuple[Batch, torch.Tensor]]]:
    """Several ways to cut the rows into batches of groups of like size, so that little is padding."""
    found = []
    for seed in range(count):
        draw = np.random.default_rng(seed)
        lengths = np.array([len(row.group.nodes) for row in rows]) * draw.uniform(0.8, 1.25, len(rows))
        order = np.argsort(lengths)
        found.append(
            [
                (
                    collate([rows[place].group for place in part]).to(device),
                    torch.tensor([rows[place].target for place in part], device=device, dtype=torch.float32),
                )
                for part in (order[start : start + size] for start in range(0, len(order), size))
            ]
        )
    return found


def train(rows: list[Row], seed: int, epochs: int, device: str) -> GraphNetwork:
    torch.manual_seed(seed)
    network = GraphNetwork().to(device)
    ways = batchings(rows, device, 3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(ways[0]))
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        data = ways[epoch % len(ways)]
        for place in torch.randperm(len(data), generator=generator).tolist():
            batch, wanted = data[place]
            mean, spread = network(batch)
            error = wanted - mean
            loss = error.abs().mean()
            if (
                epoch >= epochs // 4
            ):  # the likelihood of a Laplace distribution: its scale says how far off the mean may be
                loss = loss + 0.1 * (error.detach().abs() * (-0.5 * spread).exp() + 0.5 * spread).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return network.eval()


def predict(networks: list[GraphNetwork], rows: list[Row], device: str) -> tuple[Any, Any]:
    means, spreads = [], []
    with torch.no_grad():
        for start in range(0, len(rows), 256):
            batch = collate([row.group for row in rows[start : start + 256]]).to(device)
            found = [network(batch) for network in networks]
            mean = torch.stack([item[0] for item in found])
            noise = torch.stack([item[1].exp() for item in found]).mean(0) + mean.var(0, unbiased=False)
            means.append(mean.mean(0).cpu())
            spreads.append(noise.sqrt().cpu())
    return torch.cat(means).numpy(), torch.cat(spreads).numpy()


# ---- the comparison --------------------------------------------------------------------------------------------------------


def trees(seen: list[Row], held: list[Row]) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    def flat(rows: list[Row]) -> Any:
        return np.stack(
            [np.concatenate([row.group.whole, row.group.nodes.sum(0), row.group.nodes.max(0)]) for row in rows]
        )

    model = HistGradientBoostingRegressor(max_iter=400, learning_rate=0.06, loss="absolute_error", random_state=0)
    return model.fit(flat(seen), np.array([row.target for row in seen])).predict(flat(held))


def compare(job: tuple[list[Row], str, int, int, str]) -> dict[str, Any]:
    """Relative errors of each estimator on the groups of one model that none has seen."""
    rows, model, networks, epochs, device = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    seen, held = [row for row in rows if row.model != model], [row for row in rows if row.model == model]
    wanted = np.array([row.target for row in held])

    def with_factor(of: Any) -> Any:
        """In terms of the target: a base times the median factor of what was seen."""
        factor = np.median([math.log(row.seconds / of(row.group)) for row in seen])
        return np.array([math.log(of(row.group) / row.group.staged) for row in held]) + factor

    predicted = {
        "roofline": with_factor(lambda group: group.roofline),
        "by stages": with_factor(lambda group: group.staged),
    }
    if importlib.util.find_spec("sklearn") is not None:
        predicted["boosted trees"] = trees(seen, held)
    predicted["graph network"], spread = predict(
        [train(seen, s, epochs, device) for s in range(networks)], held, device
    )
    errors = {name: np.abs(np.exp(values - wanted) - 1) for name, values in predicted.items()}
    errors["its surest 80 %"] = errors["graph network"][spread <= np.quantile(spread, 0.8)]
    return {"model": model, "groups": len(held), "errors": errors, "seconds": time.perf_counter() - start}


def line(name: str, error: Any) -> str:
    within = 100 * float((error <= 0.14).mean())
    return f"  {name:16s} median {100 * np.median(error):6.1f} %   p90 {100 * np.quantile(error, 0.9):6.1f} %   within 14 %: {within:5.1f} %"


def comparisons(rows: list[Row], arguments: Any, device: str) -> None:
    models = arguments.held or sorted({row.model for row in rows})
    work = [(rows, model, arguments.networks, arguments.epochs, device) for model in models]
    pooled: dict[str, list[Any]] = {}
    if arguments.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            found = list(pool.imap(compare, work))
    else:
        found = [compare(job) for job in work]
    for item in found:
        print(f"held out: {item['model']}, {item['groups']} groups ({item['seconds']:.0f} s)")
        for name, error in item["errors"].items():
            print(line(name, error), flush=True)
            pooled.setdefault(name, []).append(error)
    print("all models, each predicted by what never saw it")
    for name, parts in pooled.items():
        print(line(name, np.concatenate(parts)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--held", nargs="*", help="models to hold out, one at a time; all by default")
    parser.add_argument("--out", type=Path, help="where to write weights that are trained on everything")
    parser.add_argument("--networks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1, help="models that are held out at the same time")
    parser.add_argument("--cluster", default="h200x8", help="the device that the groups were timed on")
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = time.perf_counter()
    rows = read(arguments.data, arguments.cluster, arguments.limit)
    print(f"read in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.out is not None:
        start = time.perf_counter()
        networks = [train(rows, seed, arguments.epochs, device) for seed in range(arguments.networks)]
        save_networks(networks, arguments.out)
        size = arguments.out.stat().st_size
        print(f"{arguments.out}: {size / 1e6:.2f} MB, trained in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.compare:
        comparisons(rows, arguments, device)


if __name__ == "__main__":
    main()
