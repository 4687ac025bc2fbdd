"""Coefficients of `sennit.reshard.phases_jax.TouchCost` from the rows of `tune_xla.py`.

    PYTHONPATH=src python benchmarks/reshard/fit_xla.py rows8.json rows16.json

Seconds of a candidate = call + start * starts + permute * permutes + sent * bytes sent + made * bytes gathered or
copied + mapped * bytes of temporaries and results that are mapped anew, with bytes per device times devices over 8 (all
devices share one memory). Least absolute relative error by reweighted least squares; a coefficient that comes out
negative is left out. Fitted on every other cycle of sizes, judged on the rest: how far the candidate that the model
chooses is from the best one, and XLA's own over both. XLA's own over the best is what a perfect choice would reach with
these lowerings.
"""

from __future__ import annotations

import json
import sys
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from tune_xla import SIZES
from xla import MIB, geo

from sennit.reshard.phases_jax import MAPPED

NAMES = ("call", "start", "permute", "sent", "made", "mapped")
Row = dict[str, Any]


def features(row: Row, candidate: Row) -> list[float]:
    work, share = candidate["work"], prod(row["mesh"]) / 8
    splits = {axis for dim in row["after"] for axis in dim}
    blocks = prod(size for axis, size in zip("xyzw", row["mesh"], strict=False) if axis in splits)
    result = 4 * prod(row["shape"]) // blocks
    mapped = sum(size for size in (candidate["temporary"], result) if size >= MAPPED)
    made = work["gathered"] + work["copied"]
    return [1.0, work["starts"], work["permutes"], work["sent"] * share, made * share, mapped * share]


def fit(rows: list[Row]) -> np.ndarray:
    pairs = [(features(row, candidate), candidate["seconds"]) for row in rows for candidate in row["candidates"]]
    relative = np.array([np.array(values) / seconds for values, seconds in pairs])
    weights = np.ones(len(pairs))
    kept = [column for column in range(len(NAMES)) if relative[:, column].any()]
    found = np.zeros(len(NAMES))
    for _ in range(30):
        scaled = relative[:, kept] * np.sqrt(weights)[:, None]
        norms = np.linalg.norm(scaled, axis=0)
        solution = np.linalg.lstsq(scaled / norms, np.sqrt(weights), rcond=None)[0]
        if (solution < 0).any():
            kept.pop(int(np.argmin(solution)))
            continue
        found = np.zeros(len(NAMES))
        found[kept] = solution / norms
        weights = 1 / np.maximum(np.abs(relative @ found - 1), 0.03)
    return found


def judge(rows: list[Row], found: np.ndarray) -> str:
    chosen = [
        min(row["candidates"], key=lambda c, row=row: float(np.dot(features(row, c), found)))["seconds"] for row in rows
    ]
    best = [min(candidate["seconds"] for candidate in row["candidates"]) for row in rows]
    own = [row["xla"] for row in rows]
    ratios = [
        geo([a / b for a, b in zip(*columns, strict=True)]) for columns in ((chosen, best), (own, chosen), (own, best))
    ]
    return "chosen over best {:.3f}, XLA over chosen {:.3f}, XLA over best {:.3f}".format(*ratios)


def main() -> None:
    rows: list[Row] = []
    for path in sys.argv[1:]:
        for number, row in enumerate(json.loads(Path(path).read_text())["rows"]):
            rows.append({**row, "judged": number // len(SIZES) % 2 == 1, "size": 4 * prod(row["shape"]) / MIB})
    found = fit([row for row in rows if not row["judged"]])
    print(", ".join(f"{name} {value:.3g} s" for name, value in zip(NAMES, found, strict=True)))
    unit = found[NAMES.index("made")]
    shares = {name: value / unit for name, value in zip(NAMES, found, strict=True)}
    print("TouchCost: " + ", ".join(f"{name} {shares[name]:.3g}" for name in ("start", "permute", "sent", "mapped")))
    for size in sorted(set(SIZES)):
        held_out = [row for row in rows if row["judged"] and abs(row["size"] / size - 1) < 0.1]
        if held_out:
            print(f"{size:5} MiB, {len(held_out)} problems held out: {judge(held_out, found)}")


if __name__ == "__main__":
    main()
