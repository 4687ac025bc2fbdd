"""Operators that may write their result over an operand which nothing reads again.

A captured graph never overwrites. Eager torch does: the engine adds gradients that come from several places (a weight
that a recurrent model uses at every position, a residual stream) into the first of them. Written out of place, each sum
is a new tensor of the size of the weight: memory to get, to touch for the first time, to write through the cache.

    s1 = add(g1, g2)                    add_(g1, g2)
    s2 = add(s1, g3)       becomes      add_(g1, g3)

`overwriting` finds, for one pass (forward or backward) as the sequence of its kernels, the operators of which the first
operand may take the result:

- the operator has a form that writes in place, element by element, and the result has the operand's type. It has the
  operand's layout as well: torch lays out a result of several operands as the first one lies;
- an operator of the same pass made the operand, in memory of its own (by its schema, results that may be views of an
  operand say so), or the pass before left it in memory that nothing else uses (`handed_on`);
- nothing that shares this memory (`kernels/shared_memory.py`) is read later, by this operator through another name, or
  kept: for the other pass, for the caller, or as a gradient;
- neither the operator nor any that touched this memory is computed twice.

The kernels that write in place are those that write out of place, so the bits are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op, Ref
from sennit.ir.strategy_check import Kernel
from sennit.kernels.aliases_torch import may_share
from sennit.kernels.shared_memory import SharedMemory, Touch

__all__ = ["IN_PLACE", "handed_on", "overwriting"]

IN_PLACE: Mapping[str, str] = MappingProxyType(
    {f"aten.{name}.Tensor": f"aten.{name}_.Tensor" for name in ("add", "sub", "mul", "div")}
    | {"aten.scatter.value": "aten.scatter_.value"}  # a loss marks labels in zeros as large as its logits
)


def overwriting(
    kernels: Sequence[Kernel],
    kept: Collection[str],
    types: Mapping[str, TensorType],
    whole: Collection[str] = (),
    own: Collection[str] = (),
) -> frozenset[str]:
    """The operators, by name, that may write over their first operand.

    `kept` are values that are read after the pass; `whole` are operators that run inside something else: a compiled
    kernel, blocks of rows; `own` are values that the pass before handed on in memory of their own.
    """
    body = [op for kernel in kernels for op in kernel.body]
    twice = {name for kernel in kernels for name in kernel.repeated}
    memory = _memory(body)
    free = {*own, *_made(body)} - memory.under(
        *kept,
        *_made(op for op in body if op.name in twice or op.name in whole),
        *(name for op in body if op.name in twice for name in op.reads),
    )
    found: set[str] = set()
    for place, op in enumerate(body):
        operand = _operand(op, types)
        if operand is None or op.name in twice or op.name in whole:
            continue
        if memory.under(operand) <= free and memory.is_last_look(operand, place):
            found.add(op.name)
    return frozenset(found)


def handed_on(kernels: Sequence[Kernel], kept: Collection[str], whole: Collection[str] = ()) -> frozenset[str]:
    """Of the values that a pass leaves, those in memory which it got for them, and in which none of the others lies."""
    body = [op for kernel in kernels for op in kernel.body]
    memory, own = _memory(body), set(_made(op for op in body if op.name not in whole))
    count = Counter(piece for name in kept for piece in memory.under(name))
    return frozenset(name for name in kept if all(piece in own and count[piece] == 1 for piece in memory.under(name)))


def _memory(body: Iterable[Op]) -> SharedMemory:
    return SharedMemory(Touch(op.reads, tuple(_made([op])), may_share(op.kind)) for op in body)


def _made(body: Iterable[Op]) -> Iterator[str]:
    return (value.name for op in body for value in op.results)


def _operand(op: Op, types: Mapping[str, TensorType]) -> str | None:
    """The first operand, where an operator could write over it."""
    match op:
        case Op(kind=kind, args=(Ref(name), *_)) if kind in IN_PLACE and types[name] == op.results[0].type:
            return name
        case _:
            return None
