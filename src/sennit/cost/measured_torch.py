"""The operators of a program timed on the machine at hand: what CPU ranks take, measured and not by a roofline.

    times = MeasuredOperators.of(program)
    simulate_fully(program, cluster, operators=times)

Each distinct compute step (operator, local types, constants) is called some times on one thread, with random numbers,
and the least time counts: other work on the machine only adds. Arguments lie plainly in memory, also where the program
reads a transposed view. Integers are zeros, which are valid wherever they are places in another array. Views are free.
Steps that torch does not know by their kind (sennit's own local forms), or that fail on such arguments, have no time
here: the cluster's roofline decides.

Torch is imported here, so this file is imported by name and not by `sennit.cost`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sennit.cluster import Basis
from sennit.cost.value import Cost
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Ref
from sennit.ir.memory_order import MemoryOrder
from sennit.ir.operators import is_view
from sennit.ir.program import Compute, Program, reads

__all__ = ["MeasuredOperators"]

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MeasuredOperators:
    """Seconds by step, as `_key` tells steps apart."""

    seconds: Mapping[Key, float]

    @classmethod
    def of(
        cls, program: Program, *, repeats: int = 5, most: float = 0.05, say: Callable[[str], None] | None = None
    ) -> MeasuredOperators:
        """Time all operators of a program; an operator gets up to `repeats` calls and about `most` seconds."""
        wanted: dict[Key, tuple[Compute, dict[str, TensorType]]] = {}
        for lane in program.lanes:
            buffers = lane.buffers()
            device = lane.devices[0]
            types = {name: TensorType(item.local_shape(device), item.dtype) for name, item in buffers.items()}
            for step in lane.steps:
                if isinstance(step, Compute) and step.results and not is_view(step.kind):
                    wanted.setdefault(_key(step, types), (step, types))
        if say is not None:
            say(f"timing {len(wanted)} operators on this machine")
        # in a thread of its own: OpenMP keeps the number of threads for each
        with ThreadPoolExecutor(1) as pool:
            return cls(pool.submit(_timed, wanted, repeats, most).result())

    def cost(
        self, step: Compute, types: Mapping[str, TensorType], orders: Mapping[str, MemoryOrder] | None = None
    ) -> Cost | None:
        """None of what was not measured."""
        found = self.seconds.get(_key(step, types))
        if found is None:
            return None
        return Cost(found, Basis.MEASURED, f"{step.kind} on its own shapes", "operators timed on this machine")


def _key(step: Compute, types: Mapping[str, TensorType]) -> Key:
    local = tuple(types[name] for name in reads(step))
    constants = tuple(_constant(arg) for arg in step.args)
    return step.kind, local, constants, tuple(step.kwargs)


def _constant(arg: Arg) -> object:
    """An argument with its buffers made equal."""
    match arg:
        case Ref():
            return Ref("")
        case tuple():
            return tuple(_constant(item) for item in arg)
        case _:
            return arg


def _timed(
    wanted: Mapping[Key, tuple[Compute, Mapping[str, TensorType]]], repeats: int, most: float
) -> dict[Key, float]:
    torch.set_num_threads(1)
    found: dict[Key, float] = {}
    with torch.no_grad():
        for key, (step, types) in wanted.items():
            call = _call(step, types)
            if call is not None:
                found[key] = _least(call, repeats, most)
    return found


def _call(step: Compute, types: Mapping[str, TensorType]) -> Callable[[], object] | None:
    """The operator with arguments of its own; None where torch has no such operator or refuses them."""
    function = _function(step.kind)
    if function is None:
        return None
    values = {name: _value(types[name]) for name in reads(step)}

    def given(arg: Arg) -> Any:
        match arg:
            case Ref(name=name):
                return values[name]
            case DType():
                return getattr(torch, arg.torch_name)
            case tuple():
                return [given(item) for item in arg]
            case _:
                return arg

    args, kwargs = [given(arg) for arg in step.args], {key: given(arg) for key, arg in step.kwargs}

    def call() -> object:
        return function(*args, **kwargs)

    try:
        call()
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None  # the roofline decides: see the module's text
    return call


def _function(kind: str) -> Callable[..., Any] | None:
    parts = kind.split(".")
    if len(parts) != 3 or parts[0] != "aten":
        return None
    found: Any = torch.ops.aten
    for part in parts[1:]:
        found = getattr(found, part, None)
        if found is None:
            return None
    return found  # type: ignore[no-any-return]


def _value(kind: TensorType) -> Tensor:
    dtype: torch.dtype = getattr(torch, kind.dtype.torch_name)
    return torch.rand(kind.shape).to(dtype) if kind.dtype.is_float else torch.zeros(kind.shape, dtype=dtype)


def _least(call: Callable[[], object], repeats: int, most: float) -> float:
    best, spent = float("inf"), 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        best, spent = min(best, taken), spent + taken
        if spent > most:
            break
    return best
