"""Trains the estimator of fused groups on measured ones, and compares it with simpler ones on groups that none of them
saw.

    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --compare [--jobs 6]                     # errors on each model, held out in turn
    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --compare --split operators              # errors on random groups of models that were seen, as the paper has it
    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --out estimator_h200.pt                  # the weights that ship, from all of the data
    python benchmarks/fuse/train_estimator.py groups.jsonl.gz --noise                                    # how far two labels of one group are apart

Groups are split by model: all sizes and element types of the model that is held out are unseen; models of
`workloads.FRESH` are never trained on, and judged apart. The error of a prediction p of a time t is |p - t| / t. Beside
the graph network stand

    roofline            times the best constant factor on the groups that may be seen
    by stages           `fuse/kernel_cost.py`, times its best factor
    by parts            `fuse/compiled_cost.py`, times its best factor
    boosted trees       scikit-learn's, where it is installed: the group's features, sums and maxima over its nodes; they predict what the network predicts
    trees and network   three forests and a network, whose logarithms count alike: what ships. Its deviation is the network's, the trees' of the errors that trees make on unseen models, and the disagreement of both

`--operators FILE` has the times of lone operators (`label_groups.py --operators`): a model's operators are then known
before its groups are, as they are after `sennit profile`, and as the paper has it. What is trained sees every group
twice, with its operators measured and without; the errors are shown for both.

Groups whose middle half of timings spreads over more than a tenth of the median are left out, and counted. `--again
FILE` replaces labels by newer ones of the same groups.
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
from estimator_data import Row, noise, read
from estimator_report import KNOWN, line, show_by_parts, show_by_size, show_several_without_products, show_surest
from workloads import FRESH

from sennit.fuse.boosted_trees import BoostedTrees, Forests, flat
from sennit.fuse.estimator_torch import NETWORKS_SHARE, Batch, GraphNetwork, collate, save_networks

UNSEEN = "fresh models"
FORESTS = 3  # of other seeds, of which the mean is taken
LEAST_ERROR = 0.003  # what two labels differ by anyway


# ---- the network -----------------------------------------------------------------------------------------------------


def batchings(rows: list[Row], device: str, count: int, size: int = 96) -> list[list[tuple[Batch, torch.Tensor]]]:
    """Several ways to cut the rows into batches."""
    found = []
    for seed in range(count):
        order = np.random.default_rng(seed).permutation(len(rows))
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
    torch.set_num_threads(1)
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
    return network.cpu().eval()


def predict(networks: list[GraphNetwork], rows: list[Row], device: str) -> tuple[Any, Any]:
    means, spreads = [], []
    networks = [network.to(device) for network in networks]
    with torch.no_grad():
        for start in range(0, len(rows), 256):
            batch = collate([row.group for row in rows[start : start + 256]]).to(device)
            found = [network(batch) for network in networks]
            mean = torch.stack([item[0] for item in found])
            noise = torch.stack([item[1].exp() for item in found]).mean(0) + mean.var(0, unbiased=False)
            means.append(mean.mean(0).cpu())
            spreads.append(noise.sqrt().cpu())
    return torch.cat(means).numpy(), torch.cat(spreads).numpy()


# ---- the comparison --------------------------------------------------------------------------------------------------


def trees(
    seen: list[Row], wanted: Any = None, loss: str = "absolute_error", count: int = 300, seed: int = 0
) -> BoostedTrees:
    """Trained by scikit-learn, as arrays; for what is `wanted`, the targets by default."""
    from sklearn.ensemble import HistGradientBoostingRegressor

    model = HistGradientBoostingRegressor(
        max_iter=count,
        learning_rate=0.08 if count > 200 else 0.12,
        loss=loss,
        random_state=seed,
        max_features=0.3,
        min_samples_leaf=10,
        l2_regularization=1.0,
    ).fit(flat([row.group for row in seen]), np.array([row.target for row in seen]) if wanted is None else wanted)
    found = [stage[0].nodes for stage in model._predictors]
    roots = np.cumsum([0, *(len(nodes) for nodes in found[:-1])])
    nodes = np.concatenate(found)
    start = np.repeat(roots, [len(part) for part in found])
    is_leaf = nodes["is_leaf"].astype(bool)
    return BoostedTrees(
        float(np.asarray(model._baseline_prediction).ravel()[0]),
        roots.astype(np.int64),
        np.where(is_leaf, -1, nodes["feature_idx"]).astype(np.int64),
        nodes["num_threshold"].astype(np.float64),
        start + nodes["left"].astype(np.int64),
        start + nodes["right"].astype(np.int64),
        np.where(is_leaf, nodes["value"], 0.0).astype(np.float64),
    )


def forests(seen: list[Row]) -> Forests:
    """Trees for groups whose operators were measured, and for the others."""
    measured = [row for row in seen if row.group.measured]
    guessed = [row for row in seen if not row.group.measured]
    both = (measured or guessed, guessed or measured)
    mean = [BoostedTrees.mean([trees(part, seed=seed) for seed in range(FORESTS)]) for part in both]
    return Forests(*mean, *map(spread_trees, both))


def spread_trees(seen: list[Row], parts: int = 3) -> BoostedTrees:
    """Of the errors that trees make on models that they have not seen: each third of the models by trees of the others."""
    models = sorted({row.model for row in seen})
    errors = np.zeros(len(seen))
    for part in range(parts):
        out = set(models[part::parts])
        held = [place for place, row in enumerate(seen) if row.model in out]
        rest = [row for row in seen if row.model not in out]
        if held and rest:
            found = trees(rest, count=120).predict(flat([seen[place].group for place in held]))
            errors[held] = np.abs(found - np.array([seen[place].target for place in held]))
    return trees(seen, np.log(errors + LEAST_ERROR), "squared_error", 120)


@dataclass(frozen=True)
class Fold:
    """What is held out, by name; `held` are places in the rows."""

    name: str
    held: frozenset[int]


def folds(rows: list[Row], split: str, names: list[str] | None) -> list[Fold]:
    if split == "models":
        models = names or sorted({row.model for row in rows} - FRESH)
        found = [Fold(name, frozenset(n for n, row in enumerate(rows) if row.model == name)) for name in models]
        fresh = frozenset(n for n, row in enumerate(rows) if row.model in FRESH)
        return [*found, Fold(UNSEEN, fresh)] if fresh and not names else found
    texts = sorted({row.text for row in rows if row.model not in FRESH})
    np.random.default_rng(0).shuffle(texts)
    tenths = [set(texts[part::10]) for part in range(3)]
    return [
        Fold(f"random tenth {part}", frozenset(n for n, row in enumerate(rows) if row.text in tenth))
        for part, tenth in enumerate(tenths)
    ]


def compare(job: tuple[list[Row], Fold, Any, str]) -> dict[str, Any]:
    """Relative errors of each estimator on groups that none has seen."""
    rows, fold, arguments, device = job
    torch.set_num_threads(1)
    start = time.perf_counter()
    seen = [row for place, row in enumerate(rows) if place not in fold.held and row.model not in FRESH]
    held = [row for place, row in enumerate(rows) if place in fold.held]
    wanted = np.array([row.target for row in held])

    def with_factor(of: Any) -> Any:
        """In terms of the target: a base times the median factor of what was seen."""
        factor = np.median([math.log(row.seconds / of(row.group)) for row in seen])
        return np.array([math.log(of(row.group) / row.group.compiled) for row in held]) + factor

    predicted = {
        "roofline": with_factor(lambda group: group.roofline),
        "by stages": with_factor(lambda group: group.staged),
        "by parts": with_factor(lambda group: group.compiled),
    }
    doubt = np.zeros(len(held))
    if importlib.util.find_spec("sklearn") is not None:
        forest, groups = forests(seen), [row.group for row in held]
        predicted["boosted trees"], doubt = forest.predict(groups), forest.spread(groups)
    spread = np.zeros(len(held))
    if arguments.networks:
        networks = [train(seen, seed, arguments.epochs, device) for seed in range(arguments.networks)]
        predicted["graph network"], spread = predict(networks, held, device)
    deviation = spread
    if "boosted trees" in predicted and "graph network" in predicted:
        apart = predicted["graph network"] - predicted["boosted trees"]
        deviation = np.sqrt(spread * doubt + (0.5 * apart) ** 2)  # as `LearnedCost` has it
        predicted["trees and network"] = predicted["boosted trees"] + NETWORKS_SHARE * apart
    errors: dict[bool, dict[str, Any]] = {}
    for known in sorted({row.known for row in held}):
        mine = np.array([row.known is known for row in held])
        errors[known] = {name: np.abs(np.exp(values - wanted) - 1)[mine] for name, values in predicted.items()}
    lines = [
        {"model": row.model, "known": row.known, "several": row.several, "seconds": row.seconds, "group": row.text}
        | {name: float(row.group.compiled * math.exp(values[n])) for name, values in predicted.items()}
        | {"deviation": float(deviation[n]), "doubt": float(doubt[n]), "spread": float(spread[n])}
        for n, row in enumerate(held)
    ]
    return {"name": fold.name, "errors": errors, "seconds": time.perf_counter() - start, "lines": lines}


def comparisons(rows: list[Row], arguments: Any, device: str) -> None:
    work = [(rows, fold, arguments, device) for fold in folds(rows, arguments.split, arguments.held)]
    pooled: dict[tuple[bool, str], list[Any]] = {}
    lines: list[dict[str, Any]] = []
    fresh: list[dict[str, Any]] = []

    def show(item: dict[str, Any]) -> None:
        print(f"held out: {item['name']} ({item['seconds']:.0f} s)")
        is_fresh = item["name"] == UNSEEN
        (fresh if is_fresh else lines).extend(item["lines"])
        for known, errors in item["errors"].items():
            print(f" {KNOWN[known]}, {len(errors['roofline'])} groups")
            for name, error in errors.items():
                print(line(name, error), flush=True)
                if not is_fresh:
                    pooled.setdefault((known, name), []).append(error)

    if arguments.jobs > 1:
        with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
            for item in pool.imap_unordered(compare, work):
                show(item)
    else:
        for job in work:
            show(compare(job))
    print(f"all, each predicted by what never saw it; split by {arguments.split}")
    for known in sorted({known for known, _ in pooled}):
        print(f" {KNOWN[known]}")
        for (of, name), parts in pooled.items():
            if of is known:
                print(line(name, np.concatenate(parts)))
    for name in ("trees and network", "boosted trees"):
        if lines and name in lines[0]:
            show_by_size(lines, name)
            show_by_parts(lines, name)
            show_by_parts(lines, "by parts")
            break
    if lines and "trees and network" in lines[0]:
        show_surest(lines)
    for of, those in (("held out", lines), (UNSEEN, fresh)):
        if those:
            show_several_without_products(those, of)
    if arguments.split == "models":
        print("  the target is a median of 4 % and a p90 of 8 % on models that were not seen")
    else:
        print("  the paper: 90 % within 14 %, on operators of models that were seen")
    if arguments.predictions is not None:
        with gzip.open(arguments.predictions, "wt") as out:
            out.writelines(json.dumps(item) + "\n" for item in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--again", type=Path, nargs="*", default=[], help="newer labels of some of the groups")
    parser.add_argument("--operators", type=Path, help="times of lone operators")
    parser.add_argument("--noise", action="store_true", help="how far two labels of one group are apart")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--split", choices=("models", "operators"), default="models")
    parser.add_argument("--held", nargs="*", help="models to hold out, one at a time; all by default")
    parser.add_argument("--out", type=Path, help="where to write weights that are trained on everything")
    parser.add_argument("--predictions", type=Path, help="where to write what each predicted")
    parser.add_argument("--networks", type=int, default=1, help="0 leaves the network out of the comparison")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--jobs", type=int, default=1, help="groups of rows that are held out at the same time")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="to train on")
    parser.add_argument("--cluster", default="h200x8", help="the device that the groups were timed on")
    parser.add_argument("--limit", type=int, help="about so many groups only")
    arguments = parser.parse_args()
    if arguments.noise:
        noise(arguments.data)
    if arguments.out is None and not arguments.compare:
        return
    device = arguments.device
    start = time.perf_counter()
    jobs = max(1, arguments.jobs)
    rows = read([arguments.data, *arguments.again], arguments.operators, arguments.cluster, arguments.limit, jobs)
    print(f"read in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.out is not None:
        start = time.perf_counter()
        seen = [row for row in rows if row.model not in FRESH]
        work = [(seen, seed, arguments.epochs, device) for seed in range(arguments.networks)]
        with multiprocessing.get_context("spawn").Pool(min(arguments.jobs, arguments.networks)) as pool:
            networks = pool.starmap(train, work)
        forest = forests(seen) if importlib.util.find_spec("sklearn") is not None else None
        save_networks(networks, arguments.out, forest)
        size = arguments.out.stat().st_size
        print(f"{arguments.out}: {size / 1e6:.2f} MB, trained in {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.compare:
        comparisons(rows, arguments, device)


if __name__ == "__main__":
    main()
