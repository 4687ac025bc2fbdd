"""Trains the estimator of fused groups on measured ones, and compares it with a roofline and with boosted trees on models it never saw.

    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --out estimator.pt [--held llama swin] [--networks 3] [--epochs 60]

Groups are split by model family: with `--held` those families are never trained on, and the errors printed are theirs. The error of a prediction p of a time t is |p - t| / t.
Without `--held` each family is held out in turn with one network, then all are trained on for the weights that are kept. Boosted trees (scikit-learn, where it is installed) get the group's
features and sums and maxima over its nodes. The roofline gets the best constant factor on the families that it may see.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import numpy as np
import torch

from sennit.cluster import load
from sennit.fuse.estimator_torch import GraphNetwork, collate, save_networks
from sennit.fuse.features import GroupFeatures, features_of
from sennit.fuse.kernel_cost import Roofline
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel


def read(path: Path, limit: int | None) -> list[tuple[str, GroupFeatures, float]]:
    """(family without element type, features, log(seconds / roofline))."""
    device = load("h200x8").device
    rows: list[tuple[str, GroupFeatures, float]] = []
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            graph = Graph.parse(row["graph"])
            written = frozenset(output.name for output in graph.outputs)
            group = features_of(Kernel(graph.ops), written, Roofline.of(graph, device))
            if group.roofline > 0 and row["seconds"] > 0:
                rows.append((row["family"].rsplit(" ", 1)[0], group, math.log(row["seconds"] / group.roofline)))
            if limit is not None and len(rows) >= limit:
                break
    return rows


def train(rows: list[tuple[str, GroupFeatures, float]], seed: int, epochs: int, device: str) -> GraphNetwork:
    torch.manual_seed(seed)
    network = GraphNetwork().to(device)
    order = sorted(range(len(rows)), key=lambda place: len(rows[place][1].nodes))
    batches = [order[start : start + 64] for start in range(0, len(order), 64)]  # of like size: little padding
    data = [
        (collate([rows[i][1] for i in batch]).to(device), torch.tensor([rows[i][2] for i in batch], device=device))
        for batch in batches
    ]
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.5e-3, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.5e-3, total_steps=epochs * len(data))
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        for place in torch.randperm(len(data), generator=generator).tolist():
            batch, wanted = data[place]
            mean, spread = network(batch)
            error = wanted - mean
            if epoch < epochs // 4:
                loss = torch.nn.functional.smooth_l1_loss(mean, wanted, beta=0.1)
            else:
                loss = (0.5 * (error**2 * (-spread).exp() + spread) + error.abs()).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return network.eval()


def predict(networks: list[GraphNetwork], rows: list[tuple[str, GroupFeatures, float]], device: str) -> tuple[Any, Any]:
    means, spreads = [], []
    with torch.no_grad():
        for start in range(0, len(rows), 256):
            batch = collate([row[1] for row in rows[start : start + 256]]).to(device)
            found = [network(batch) for network in networks]
            mean = torch.stack([item[0] for item in found])
            noise = torch.stack([item[1].exp() for item in found]).mean(0) + mean.var(0, unbiased=False)
            means.append(mean.mean(0).cpu())
            spreads.append(noise.sqrt().cpu())
    return torch.cat(means).numpy(), torch.cat(spreads).numpy()


def table_row(name: str, predicted: Any, wanted: Any) -> str:
    error = np.abs(np.exp(predicted - wanted) - 1)
    within = float((error <= 0.14).mean())
    return f"{name:24s} median {100 * np.median(error):6.1f} %   p90 {100 * np.quantile(error, 0.9):6.1f} %   within 14 %: {100 * within:5.1f} %"


def trees(seen: list[Any], held: list[Any]) -> Any:
    from sklearn.ensemble import HistGradientBoostingRegressor

    def flat(rows: list[Any]) -> Any:
        return np.stack([np.concatenate([g.whole, g.nodes.sum(0), g.nodes.max(0)]) for _, g, _ in rows])

    model = HistGradientBoostingRegressor(max_iter=400, learning_rate=0.06, loss="absolute_error", random_state=0)
    return model.fit(flat(seen), np.array([row[2] for row in seen])).predict(flat(held))


def compare(rows: list[Any], families: list[str], networks: int, epochs: int, device: str) -> None:
    seen = [row for row in rows if row[0] not in families]
    held = [row for row in rows if row[0] in families]
    if not held or not seen:
        return
    wanted = np.array([row[2] for row in held])
    print(f"held out: {', '.join(families)}: {len(held)} groups; trained on {len(seen)}", flush=True)
    print("  " + table_row("roofline, one factor", np.full(len(held), np.median([row[2] for row in seen])), wanted))
    try:
        print("  " + table_row("boosted trees", trees(seen, held), wanted), flush=True)
    except ImportError:
        print("  boosted trees: scikit-learn is not installed")
    start = time.perf_counter()
    trained = [train(seen, seed, epochs, device) for seed in range(networks)]
    predicted, spread = predict(trained, held, device)
    print(
        "  " + table_row(f"graph network x {networks}", predicted, wanted) + f"   ({time.perf_counter() - start:.0f} s)"
    )
    sure = spread <= np.quantile(spread, 0.8)
    print("  " + table_row("  the surest 80 %", predicted[sure], wanted[sure]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--held", nargs="*")
    parser.add_argument("--networks", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = read(arguments.data, arguments.limit)
    families = sorted({row[0] for row in rows})
    print(f"{len(rows)} groups of {', '.join(families)}", flush=True)
    for held in [arguments.held] if arguments.held else [[family] for family in families]:
        compare(rows, held, arguments.networks if arguments.held else 1, arguments.epochs, device)
    if arguments.out is not None:
        save_networks(
            [train(rows, seed, arguments.epochs, device) for seed in range(arguments.networks)], arguments.out
        )
        print(f"{arguments.out}: {arguments.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
