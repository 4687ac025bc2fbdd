"""Operators that may write their result over an operand which nothing reads again.

A captured graph never overwrites. Eager torch does: the engine adds gradients that come from several places (a weight that a recurrent model uses at every position, a residual stream) into the first of them. Written out of
place, each sum is a new tensor of the size of the weight: memory to get, to touch for the first time, to write through the cache.

    s1 = add(g1, g2)                    add_(g1, g2)
    s2 = add(s1, g3)       becomes      add_(g1, g3)

`overwriting` finds, for one pass (forward or backward) as the sequence of its kernels, the operators of which the first operand may take the result:

- the operator has a form that writes in place, element by element, and the result has the operand's type. It has the operand's layout as well: torch lays out a result of several operands as the first one lies;
- an operator of the same pass made the operand, in memory of its own (by its schema, results that may be views of an operand say so), or the pass before left it in memory that nothing else uses (`handed_on`);
- nothing that shares this memory is read later, by this operator through another name, or kept: for the other pass, for the caller, or as a gradient;
- neither the operator nor any that touched this memory is computed twice.

The kernels that write in place are those that write out of place, so the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from sennit.fuse.draws_torch import DRAWS
from sennit.fuse.kernel_torch import target_of
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op, Ref
from sennit.ir.strategy_check import Kernel

__all__ = ["IN_PLACE", "handed_on", "overwriting"]

IN_PLACE: Mapping[str, str] = MappingProxyType(
    {f"aten.{name}.Tensor": f"aten.{name}_.Tensor" for name in ("add", "sub", "mul", "div")}
    | {"aten.scatter.value": "aten.scatter_.value"}  # a loss marks labels in zeros as large as its logits
)


_OUTSIDE = -1  # memory that is not of this pass


def overwriting(
    kernels: Sequence[Kernel],
    kept: Collection[str],
    types: Mapping[str, TensorType],
    whole: Collection[str] = (),
    own: Collection[str] = (),
) -> frozenset[str]:
    """The operators, by name, that may write over their first operand. `kept` are values that are read after the pass; `whole` are operators that run inside something else: a compiled kernel, blocks of rows; `own` are values that the
    pass before handed on in memory of their own."""
    body = [op for kernel in kernels for op in kernel.body]
    twice = {name for kernel in kernels for name in kernel.repeated}
    # value -> the pieces of memory that it may lie in
    memory = {name: frozenset({place}) for place, name in enumerate(sorted(own), start=1)}
    last: dict[int, int] = {}  # piece -> the last operator that reads a value in it
    fixed = {_OUTSIDE}
    pieces = len(memory)
    for place, op in enumerate(body):
        read = _touched(op.reads, memory)
        last.update(dict.fromkeys(read, place))
        is_view = _may_be_view(op)
        for value in op.results:
            pieces += 1
            memory[value.name] = read if is_view else frozenset({pieces})
            if value.name in kept or op.name in twice or op.name in whole:
                fixed |= memory[value.name]
        if op.name in twice:
            fixed |= read
    found: set[str] = set()
    for place, op in enumerate(body):
        operand = _operand(op, types)
        if operand is None or op.name in twice or op.name in whole:
            continue
        taken = _touched([operand], memory)
        others = [name for name in op.reads if name != operand]
        if (
            not taken & fixed
            and not taken & _touched(others, memory)
            and op.reads.count(operand) == 1
            and all(last[piece] == place for piece in taken)
        ):
            found.add(op.name)
    return frozenset(found)


def handed_on(kernels: Sequence[Kernel], kept: Collection[str], whole: Collection[str] = ()) -> frozenset[str]:
    """Of the values that a pass leaves, those in memory which it got for them, and in which none of the others lies."""
    memory: dict[str, frozenset[int]] = {}
    pieces = 0
    for op in (op for kernel in kernels for op in kernel.body):
        read, is_view = _touched(op.reads, memory), _may_be_view(op)
        for value in op.results:
            pieces += 1
            memory[value.name] = frozenset({_OUTSIDE}) if op.name in whole else read if is_view else frozenset({pieces})
    count = Counter(piece for name in kept for piece in memory.get(name, ()))
    return frozenset(
        name
        for name in kept
        if name in memory and all(piece != _OUTSIDE and count[piece] == 1 for piece in memory[name])
    )


def _touched(names: Iterable[str], memory: Mapping[str, frozenset[int]]) -> frozenset[int]:
    return frozenset(piece for name in names for piece in memory.get(name, (_OUTSIDE,)))


def _operand(op: Op, types: Mapping[str, TensorType]) -> str | None:
    """The first operand, where an operator could write over it."""
    match op:
        case Op(kind=kind, args=(Ref(name), *_)) if kind in IN_PLACE and types[name] == op.results[0].type:
            return name
        case _:
            return None


def _may_be_view(op: Op) -> bool:
    if op.kind in DRAWS:
        return False
    target: Any = target_of(op)
    return any(result.alias_info is not None for result in target._schema.returns)
