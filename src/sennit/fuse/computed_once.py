"""Operators of a group without those that compute once more what another does, as a compiler drops them.

A loss compares its targets with the index that is ignored three times over, once for each of its parts. Fused into one
group it is one comparison, and what reads the three reads one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sennit.fuse.operator_class import draws
from sennit.ir.graph import Op, Ref

__all__ = ["computed_once"]


def computed_once(body: Sequence[Op]) -> tuple[tuple[Op, ...], dict[str, str]]:
    """The operators that are left, and by value that is not made any more the one that is the same."""
    seen: dict[object, Op] = {}
    same: dict[str, str] = {}
    kept = []
    for op in body:
        mine = _renamed(op, same) if any(name in same for name in op.reads) else op
        first = seen.setdefault((mine.kind, mine.args, mine.kwargs), mine)
        if first is mine or not _is_pure(mine):
            kept.append(mine)
        else:
            same.update((value.name, one.name) for value, one in zip(mine.results, first.results, strict=True))
    return tuple(kept), same


def _is_pure(op: Op) -> bool:
    """Of torch's own operators, those of values that draw nothing."""
    return bool(op.reads) and op.kind.startswith("aten.") and not draws(op)


def _renamed(op: Op, same: Mapping[str, str]) -> Op:
    def new(arg: Any) -> Any:
        match arg:
            case Ref(name):
                return Ref(same.get(name, name))
            case tuple():
                return tuple(new(part) for part in arg)
            case _:
                return arg

    return replace(op, args=new(op.args), kwargs=new(op.kwargs))
