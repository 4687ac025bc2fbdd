"""The names of torch.distributed that are not public, or not the same in all versions, and that the backend uses: all
here.

Torch 2.11 to 2.15 take a Python backend as a subclass of `dist.ProcessGroup`, which then stands for the whole group.
The documentation of later ones describes `dist.BackendBase` in its place: a backend that a group holds for a type of
device. What the backend overrides is the same; a torch that has only the new class needs `GroupBase` changed, here, and
what `group_torch.py` returns.

| name | used for |
|---|---|
| `GroupBase` | what a Python backend derives from |
| `WorkBase` | what its methods return |
| `is_asynchronous`, `time_limit`, `reduction_of` | reading the options that c10d passes along |
| `options_examples` | where in memory such options keep what they are asked for: `shm_options.h` |
| `gather_single`, `scatter_single` | collectives that have another name from 2.13 on, where the old one warns at each call |
| `store_host` | where the rendezvous is |
| `untraced` | torch.compile would trace the methods of a group and a work, and fail at what it finds there |
| `stay_unrecorded` | torch 2.15 records the calls of every group, and fails on one that has no backend in C++ |
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from random import Random
from types import FunctionType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
    Store,
    TCPStore,
)
from torch._C._distributed_c10d import Work as WorkBase
from torch._C._dynamo import eval_frame

__all__ = [
    "AVERAGE",
    "SUM",
    "GroupBase",
    "Store",
    "WorkBase",
    "gather_single",
    "is_asynchronous",
    "options_examples",
    "reduction_of",
    "scatter_single",
    "stay_unrecorded",
    "store_host",
    "time_limit",
    "untraced",
]

_Class = TypeVar("_Class", bound=type)

GroupBase: Any = dist.ProcessGroup
AVERAGE: Any = dist.ReduceOp.AVG
SUM: Any = dist.ReduceOp.SUM
_REDUCTIONS = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}


def is_asynchronous(options: Any) -> bool:
    """Whether the caller goes on before the call is done. C++ callers always may: they wait for the work."""
    return bool(getattr(options, "asyncOp", True))


def time_limit(options: Any, default: float) -> float:
    """Seconds; c10d passes a negative time, or none, for the default of the group."""
    given: timedelta | None = getattr(options, "timeout", None)
    return default if given is None or given <= timedelta(0) else given.total_seconds()


def reduction_of(options: Any) -> tuple[str, float | Tensor | None]:
    """The name of the reduction in lower case, and the factor of PREMUL_SUM.

    Options carry a `ReduceOp`; some callers pass one itself, or none, as in `group.allreduce(tensor)`: a sum.
    """
    reduce_op = SUM if options is None else getattr(options, "reduceOp", options)
    name = _REDUCTIONS.get(getattr(reduce_op, "op", reduce_op), "no reduction")
    return name, reduce_op.__getstate__()[1] if name == "premul_sum" else None  # `factor` is an attribute from 2.13 on


_EXAMPLES = 28  # of a type, at least; `shm_options.h` takes 64


def options_examples() -> Iterator[tuple[tuple[Any, int, int | None, int | None], ...]]:
    """For each type of options: 32 or so with every reduction, and roots of all sizes, as (options, asyncOp, reduceOp,
    rootRank). In random order: memory that nobody writes to may hold what examples of before held, in their order.
    """
    draw = Random()
    kinds = [getattr(dist.ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")]
    roots = [0, 1, 2, 255, 256, 65537, 1 << 31]
    for make in (AllreduceOptions, ReduceScatterOptions, AllgatherOptions, AllToAllOptions, BroadcastOptions):
        empty = make()
        reductions = kinds if hasattr(empty, "reduceOp") else [None]
        ranks = roots if hasattr(empty, "rootRank") else [None]
        made = []
        cases = list(product((False, True), reductions, ranks))
        cases *= -(-_EXAMPLES // len(cases))
        draw.shuffle(cases)
        for asynchronous, reduction, root in cases:
            options: Any = make()
            options.asyncOp = asynchronous
            if reduction is not None:
                options.reduceOp = reduction
            if root is not None:
                options.rootRank = root
            made.append((options, int(asynchronous), None if reduction is None else int(reduction), root))
        yield tuple(made)


def gather_single(output: Tensor, input: Tensor, group: Any) -> None:
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(output, input, group=group)


def scatter_single(output: Tensor, input: Tensor, group: Any) -> None:
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(output, input, group=group)


def untraced(kind: _Class) -> _Class:
    """A class whose own methods torch.compile runs as they are, with all that they call.

    They are Python, and are called by C++ in the middle of a compiled program (the forward pass of DDP) as well as by
    Python. `torch.compiler.disable` would wrap each of them, and load the compiler.
    """
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return kind  # another torch: programs that are not compiled need none of this
    action = eval_frame._FrameAction.SKIP
    for method in vars(kind).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, eval_frame._FrameExecStrategy(action, action))
            method._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would be inlined
    return kind


def store_host(store: Store) -> str | None:
    """The host of the TCP store under any number of prefixes, or None where it is another kind of store."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return inner.host if isinstance(inner, TCPStore) else None


def stay_unrecorded(name: str) -> None:
    """Tell torch's flight recorder that the groups of a backend are none of its business.

    Releases before 2.15 have no such list.
    """
    apart: set[str] | None = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if apart is not None:
        apart.add(name)
