"""Which masks are the causal one, proved by their values: whatever a library writes it with, a mask that depends on no
input is evaluated.

A mask M is added to the scores of L queries and S keys. It is causal where, for all samples and heads b, queries i and
keys j,

    M[b, i, j] = 0 where j ≤ i, and -∞ where j > i                      then softmax(scores + M) is what a kernel with `is_causal` computes

The least number of f32 or bf16 counts as -∞: each query sees key 0, so its other weights are exp(s - 3·10³⁸) = 0 unless
scores reach the end of f32 themselves. That of f16 (-65504) does not: scores in f32 can be as large.

**The proof.** M is `where(allowed, 0, -∞)`, expanded, copied or cast, as torch writes a mask of booleans. `allowed` is
evaluated from its constants by the operators below, on whole numbers and booleans only, so that nothing is rounded, and
compared with j ≤ i at every i and j. What reads an input, a parameter or a collective, and every operator that is not
below, has no value, and neither has what is made of it: such a mask is not causal. Nor is one whose value would differ
from device to device (`sennit.arange` counts from where a piece begins).

**Constant along a dim.** An array is held with size 1 along a dim where all its elements are known to be the same;
`expand` and scalars make such dims. So a mask of a batch is evaluated once. And where an array is constant along a dim,
`index` gives the same element whatever the index says:

    x[i₀, i₁] = x[0, i₁] where x is constant along dim 0                   even if i₀ has no value

That is how a library looks for packed sequences: it numbers the sequences in each row by cumsum(position[t+1] -
position[t] ≠ 1), reads the numbers of query and key at [sample, i] and [sample, j], and compares. With positions that
are `arange`, all are 0. The number of the sample differs from device to device and from one micro-batch to the next,
and does not matter.

**Blocks.** Pointwise operators are evaluated for some rows of queries at a time, so an L x S array is never whole.

**Stages.** A later stage is sent `allowed` by the one that made it. A tensor of the program has one value, so what is
proved of a buffer of it holds for all that have the same micro-batch, if neither is split along queries or keys nor a
part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref
from sennit.ir.layout import Split
from sennit.ir.program import Buffer, Compute, Exchange, Receive, Send, reads
from sennit.kernels.lane_code import LaneCode

__all__ = ["is_causal_mask"]

Array = np.ndarray[Any, Any]

SAME = ("aten._to_copy.default", "aten.alias.default", "aten.clone.default", "aten.expand.default")
FLOATS = (DType.F64, DType.F32, DType.BF16, DType.F16)
NEVER = -3e38  # at most: the least numbers of f32 and bf16 are below
BLOCK = 1 << 20  # elements of a block of rows

POINTWISE: Mapping[str, Callable[..., Array]] = {
    "aten.add.Tensor": np.add,
    "aten.sub.Tensor": np.subtract,
    "aten.le.Tensor": np.less_equal,
    "aten.le.Scalar": np.less_equal,
    "aten.lt.Tensor": np.less,
    "aten.lt.Scalar": np.less,
    "aten.ge.Tensor": np.greater_equal,
    "aten.ge.Scalar": np.greater_equal,
    "aten.gt.Tensor": np.greater,
    "aten.gt.Scalar": np.greater,
    "aten.eq.Tensor": np.equal,
    "aten.eq.Scalar": np.equal,
    "aten.ne.Tensor": np.not_equal,
    "aten.ne.Scalar": np.not_equal,
    "aten.bitwise_and.Tensor": np.bitwise_and,
    "aten.bitwise_or.Tensor": np.bitwise_or,
    "aten.bitwise_not.default": np.invert,
    "aten.logical_and.default": np.logical_and,
    "aten.logical_or.default": np.logical_or,
    "aten.logical_not.default": np.logical_not,
    "aten.alias.default": lambda given: given,
    "aten.clone.default": lambda given: given,
    "aten.expand.default": lambda given, _: given,
}


def is_causal_mask(code: LaneCode, name: str, queries: int, keys: int) -> bool:
    """Whether a mask is 0 where key j ≤ query i, and -∞ elsewhere, for every sample and head."""
    while (step := code.made_by(name, *SAME)) is not None and code.dtype(name) in FLOATS:
        name = reads(step)[0]
    step = code.made_by(name, "aten.where.self")
    match step.args if step is not None else ():
        case Ref(allowed), Ref(zero), Ref(never):
            least = _number(code, never)
            is_mask = _number(code, zero) == 0 and least is not None and least <= NEVER
            return is_mask and _is_lower(code, allowed, queries, keys)
    return False


def _number(code: LaneCode, name: str) -> float | None:
    step = code.made_by(name, "aten.scalar_tensor.default", "aten.full.default")
    value = step.args[-1] if step is not None and code.shape(name) == () else None
    return float(value) if isinstance(value, int | float) else None


def _is_lower(code: LaneCode, name: str, queries: int, keys: int) -> bool:
    """Whether an array of booleans is true just where j ≤ i. What was found is kept with the code: layers share it."""
    asked = (name, queries, keys)
    if asked not in code.lower:
        code.lower[asked] = False  # lanes that send to each other in a ring prove nothing
        code.lower[asked] = _was_sent_lower(code, *asked) or _computes_lower(code, *asked)
    return code.lower[asked]


def _was_sent_lower(code: LaneCode, name: str, queries: int, keys: int) -> bool:
    step = code.lane.steps[code.maker[name]] if name in code.maker else None
    sent = _sent(code, step) if isinstance(step, Receive | Exchange) else None
    if sent is None:
        return False
    other, source = sent
    pair = code.buffers[name], other.buffers[source]
    same = pair[0].tensor == pair[1].tensor and pair[0].times == pair[1].times
    return same and all(_is_whole(item, queries, keys) for item in pair) and _is_lower(other, source, queries, keys)


def _sent(code: LaneCode, step: Receive | Exchange) -> tuple[LaneCode, str] | None:
    """Where what this step brings comes from: a lane, and a buffer of it."""
    result, lanes = step.result, (step.origin,) if isinstance(step, Receive) else step.lanes
    for other in (code.others[lane] for lane in lanes if lane in code.others and result is not None):
        for item in other.lane.steps:
            match item:
                case Send(source=source, to=to) if isinstance(step, Receive) and to == code.lane.name:
                    pass
                case Exchange(label=label, source=str(source)) if isinstance(step, Exchange) and label == step.label:
                    pass
                case _:
                    continue
            found = other.buffers[source]
            if result is not None and (found.tensor, found.times) == (result.tensor, result.times):
                return other, source
    return None


def _is_whole(buffer: Buffer, queries: int, keys: int) -> bool:
    """Whether pieces have all queries and keys, and are pieces: not parts of a sum."""
    layout = buffer.layout
    last = len(layout.shape) - 2
    return layout.shape[-2:] == (queries, keys) and all(
        isinstance(entry, Split) and entry.dim < last for _, entry in layout.entries
    )


def _computes_lower(code: LaneCode, name: str, queries: int, keys: int) -> bool:
    if code.dtype(name) is not DType.BOOL or code.shape(name)[-2:] != (queries, keys):
        return False
    values, rows = _Values(code), max(1, BLOCK // max(1, keys))
    for start in range(0, queries, rows):
        found = values.rows(name, start, min(queries, start + rows))
        if found is None:
            return False
        lower = np.arange(keys)[None, :] <= np.arange(start, min(queries, start + rows))[:, None]
        if not np.all(found == lower):  # broadcast: a dim of size 1 stands for all of it
            return False
    return True


class _Values:
    """The values of buffers of booleans and whole numbers that depend on no input; None for all others."""

    def __init__(self, code: LaneCode) -> None:
        self.code = code
        self.known: dict[str, Array | None] = {}

    def rows(self, name: str, start: int, end: int) -> Array | None:
        """Rows of an array, counted along its last dim but one: pointwise operators by rows of their operands."""
        step = self.code.made_by(name)
        if step is not None and step.kind in POINTWISE and name not in self.known:
            size = self.code.shape(name)[-2:-1]
            given = [self._operand_rows(arg, size, start, end) for arg in step.args]
            return self._pointwise(step, given)
        whole = self.value(name)
        if whole is None or whole.ndim < 2 or whole.shape[-2] == 1:
            return whole
        return whole[..., start:end, :]

    def _operand_rows(self, arg: Arg, size: tuple[int, ...], start: int, end: int) -> object:
        if not isinstance(arg, Ref):
            return arg
        has_rows = self.code.shape(arg.name)[-2:-1] == size and size != (1,)
        return self.rows(arg.name, start, end) if has_rows else self.value(arg.name)

    def value(self, name: str) -> Array | None:
        """The whole array, of size 1 along each dim where it is constant."""
        if name not in self.known:
            step = self.code.made_by(name)
            found = self._computed(step, name) if step is not None else None
            self.known[name] = self._checked(found, name)
        return self.known[name]

    def _checked(self, found: Array | None, name: str) -> Array | None:
        """None where it is not what the program says, or not the same on all devices."""
        shape, buffer = self.code.shape(name), self.code.buffers[name]
        wanted = {DType.BOOL: np.bool_, DType.I64: np.int64}.get(buffer.dtype)
        if found is None or wanted is None or found.dtype != wanted or not buffer.layout.is_even:
            return None
        if found.ndim < len(shape):
            found = found.reshape((1,) * (len(shape) - found.ndim) + found.shape)
        fits = found.ndim == len(shape) and all(a in (1, b) for a, b in zip(found.shape, shape, strict=True))
        return found if fits else None

    def _pointwise(self, step: Compute, given: list[object]) -> Array | None:
        if step.kwargs or any(item is None or isinstance(item, float) for item in given):
            return None  # numbers with fractions, and factors of the second operand (`alpha`), are none of a mask's
        made: Array = np.asarray(POINTWISE[step.kind](*given))
        return made

    def _computed(self, step: Compute, name: str) -> Array | None:
        args, kind = step.args, step.kind
        if kind in POINTWISE:
            return self._pointwise(step, [self.value(arg.name) if isinstance(arg, Ref) else arg for arg in args])
        if any(key != "dtype" for key, _ in step.kwargs):
            return None
        first = self.value(args[0].name) if args and isinstance(args[0], Ref) else None
        match kind, args:
            case "aten.arange.default", (int(end),):
                return np.arange(end, dtype=np.int64)
            case "aten.ones.default", (tuple(shape),):
                return self._filled(name, len(shape), 1)
            case "aten.full.default", (tuple(shape), bool(number) | int(number)):
                return self._filled(name, len(shape), number)
            case "aten.unsqueeze.default", (Ref(), int(dim)) if first is not None:
                return np.expand_dims(first, dim)
            case "aten.slice.Tensor", (Ref(source), int(dim), int(start), int(end)) if first is not None:
                long = self._along(first, source, dim)
                return np.take(long, range(self.code.shape(source)[dim])[start:end], dim)
            case "aten.cumsum.default", (Ref(source), int(dim)) if first is not None:
                return np.cumsum(self._along(first, source, dim), dim, dtype=np.int64)
            case "aten.cat.default", (tuple(parts), int(dim)):
                return self._joined(parts, dim)
            case "aten.index.Tensor", (Ref(), tuple(indices)) if first is not None:
                return self._indexed(first, indices)
        return None

    def _filled(self, name: str, dims: int, number: int) -> Array | None:
        dtype = np.bool_ if self.code.dtype(name) is DType.BOOL else np.int64
        return np.full((1,) * dims, number, dtype)

    def _along(self, array: Array, name: str, dim: int) -> Array:
        """With its full size along a dim."""
        shape = list(array.shape)
        shape[dim] = self.code.shape(name)[dim]
        return np.broadcast_to(array, shape)

    def _joined(self, parts: tuple[Arg, ...], dim: int) -> Array | None:
        arrays: list[Array] = []
        for part in parts:
            known = self.value(part.name) if isinstance(part, Ref) else None
            if known is None or not isinstance(part, Ref):
                return None
            arrays.append(self._along(known, part.name, dim))
        if len({array.ndim for array in arrays}) != 1:
            return None
        dims, along = arrays[0].ndim, dim % arrays[0].ndim
        shape = [max(array.shape[item] for array in arrays) for item in range(dims)]
        wide = [np.broadcast_to(item, (*shape[:along], item.shape[along], *shape[along + 1 :])) for item in arrays]
        return np.concatenate(wide, along)

    def _indexed(self, array: Array, indices: tuple[Arg, ...]) -> Array | None:
        """x[i₀, i₁, ...]; an index along a dim where x is constant need not be known."""
        found: list[Array] = []
        for size, index in zip(array.shape, indices, strict=False):
            if not isinstance(index, Ref) or self.code.dtype(index.name) is not DType.I64:
                return None
            known = self.value(index.name) if size > 1 else np.zeros((1,) * len(self.code.shape(index.name)), np.int64)
            if known is None:
                return None
            found.append(known)
        made: Array = array[tuple(found)]
        return made
