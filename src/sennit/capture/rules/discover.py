"""Rules found by execution, for operators that no table knows.

The operator runs on the whole, then on two pieces of some of its reads; what the results of the pieces are to the whole
(equal to it, its halves along a dim, its parts in a sum or a maximum) is a row of a `Listed` rule. Tried are, for each
even extent that some dim has, all ways to split reads on dims of that extent: dims of different sizes are never one
letter. A way must hold for two draws of random data, and both for blocks and for every other element, so that a row
holds for any stride.

Some operators crash the process on arguments that make no sense, so the search runs in one of its own, on shapes of at
most a million elements, and gives up after a time. An operator that crashes, is too large, or takes too long has no
rule: it is replicated.

`discovered_rule` is the source to pass on (`propagate(plan, sources=(discovered_rule,))`); `search` is what the other
process runs.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import msgspec
import numpy as np
import torch

from sennit.capture.rules.rule import Listed, Row, Types
from sennit.capture.rules.shape_check import call
from sennit.ir.dtype import DType, TensorType
from sennit.ir.dtype_numpy import numpy_dtype
from sennit.ir.graph import Graph, Input, Op, Output, OutputKind, Role, Value
from sennit.ir.layout import Reduction
from sennit.ir.layout_numpy import Array

__all__ = ["discovered_rule", "search"]

_LOG = logging.getLogger(__name__)
_LARGEST = 1 << 20
_SECONDS = 60.0
_WAYS = 256


def discovered_rule(op: Op, types: Types) -> Listed | None:
    """The rows that execution finds, or None."""
    elements = sum(types[name].elements for name in op.reads) + sum(value.type.elements for value in op.results)
    if not op.kind.startswith("aten.") or not op.reads or elements > _LARGEST:
        return None
    command = [sys.executable, "-m", "sennit.capture.rules.discover"]
    try:
        done = subprocess.run(
            command, input=str(_alone(op, types)), capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        _LOG.info("no rule was found for %s in %s s", op.kind, _SECONDS)
        return None
    if done.returncode:
        _LOG.info("%s ended the search with status %d: %s", op.kind, done.returncode, done.stderr.strip()[-200:])
        return None
    rows = tuple(
        _row(parts)
        for parts in msgspec.json.decode(done.stdout, type=list[tuple[list[int | str | None], list[int | str | None]]])
    )
    return Listed(rows, "execution") if rows else None


def _alone(op: Op, types: Types) -> Graph:
    """The operator as a graph of its own, in float64."""
    names = dict.fromkeys(op.reads)
    inputs = tuple(Input(Role.INPUT, Value(name, types[name]), name) for name in names)
    outputs = tuple(Output(OutputKind.RESULT, value.name, value.name) for value in op.results)
    return Graph("one operator", inputs, (op,), outputs)


def _row(parts: tuple[list[int | str | None], list[int | str | None]]) -> Row:
    def entry(item: int | str | None) -> int | Reduction | None:
        return Reduction(item) if isinstance(item, str) else item

    reads, results = parts
    return Row(tuple(map(entry, reads)), tuple(map(entry, results)))


# ---- the search ------------------------------------------------------------------------------------------------------


def search(op: Op, types: Types) -> list[Row]:
    """Every row that holds."""
    found: list[Row] = []
    for reads in _candidates([types[name] for name in op.reads]):
        results = _agreed(op, types, reads)
        if results is not None:
            found.append(Row(reads, results))
    return found


def _candidates(reads: list[TensorType]) -> Iterator[tuple[int | None, ...]]:
    tried = 0
    for extent in sorted({size for item in reads for size in item.shape if size > 1 and size % 2 == 0}):
        choices = [(None, *(dim for dim, size in enumerate(item.shape) if size == extent)) for item in reads]
        for chosen in product(*choices):
            if any(dim is not None for dim in chosen):
                tried += 1
                if tried > _WAYS:
                    return
                yield chosen


def _agreed(op: Op, types: Types, reads: tuple[int | None, ...]) -> tuple[int | Reduction | None, ...] | None:
    """What the results are, the same in every trial; None where a trial fails."""
    agreed: tuple[int | Reduction | None, ...] | None = None
    for seed, cyclic in product((0, 1), (False, True)):
        rng = np.random.default_rng(seed)
        values = [_random(types[name], rng) for name in op.reads]
        try:
            whole = _run(op, values)
            halves = [
                _run(op, [_half(v, dim, at, cyclic) for v, dim in zip(values, reads, strict=True)]) for at in (0, 1)
            ]
        except Exception:  # torch raises many kinds; each one means that the operator cannot run on these pieces
            return None
        entries = [_entry(w, one, other, cyclic) for w, one, other in zip(whole, halves[0], halves[1], strict=True)]
        if any(entry == "none" for entry in entries):
            return None
        now = tuple(None if entry == "equal" else entry for entry in entries)
        if agreed is not None and now != agreed:
            return None
        agreed = now  # type: ignore[assignment]
    return agreed


def _random(item: TensorType, rng: np.random.Generator) -> Array:
    match item.dtype:
        case DType.BOOL:
            return np.asarray(rng.random(item.shape) < 0.5)
        case dtype if dtype.is_float:
            return np.asarray(rng.standard_normal(item.shape))
        case dtype:
            return np.asarray(rng.integers(0, 2, item.shape), numpy_dtype(dtype))


def _run(op: Op, values: list[Array]) -> list[Array]:
    tensors = iter([torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape)) for value in values])
    with torch.no_grad():
        return [np.asarray(part) for part in call(op.kind, op.args, op.kwargs, tensors)]


def _half(value: Array, dim: int | None, at: int, cyclic: bool) -> Array:
    if dim is None:
        return value
    size = value.shape[dim]
    indices = np.arange(at, size, 2) if cyclic else np.arange(at * size // 2, (at + 1) * size // 2)
    return np.take(value, indices, axis=dim)


def _entry(whole: Array, first: Array, second: Array, cyclic: bool) -> int | Reduction | str:
    """What two parts are to the whole."""
    if first.shape == second.shape == whole.shape:
        if _close(first, whole) and _close(second, whole):
            return "equal"
        if whole.dtype.kind != "f":
            return "none"
        for reduction, combined in (
            (Reduction.SUM, first + second),
            (Reduction.MAX, np.maximum(first, second)),
            (Reduction.MIN, np.minimum(first, second)),
        ):
            if _close(combined, whole):
                return reduction
        return "none"
    if first.shape != second.shape or first.ndim != whole.ndim:
        return "none"
    differ = [dim for dim in range(whole.ndim) if first.shape[dim] != whole.shape[dim]]
    if len(differ) != 1 or 2 * first.shape[differ[0]] != whole.shape[differ[0]]:
        return "none"
    (dim,) = differ
    together = np.stack([first, second], axis=dim + 1 if cyclic else dim).reshape(whole.shape)
    return dim if _close(together, whole) else "none"


def _close(one: Array, other: Array) -> bool:
    return bool(np.allclose(one, other, rtol=1e-9, atol=1e-9, equal_nan=True))


def _main() -> None:
    graph = Graph.parse(sys.stdin.read())
    (op,) = graph.ops
    rows = search(op, graph.types())

    def plain(entries: tuple[int | Reduction | None, ...]) -> list[int | str | None]:
        return [item.value if isinstance(item, Reduction) else item for item in entries]

    sys.stdout.write(msgspec.json.encode([(plain(row.reads), plain(row.results)) for row in rows]).decode())


if __name__ == "__main__":
    _main()
