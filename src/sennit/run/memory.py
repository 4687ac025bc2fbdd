"""A rank's memory by kind: what the program says, and what is there.

**Predicted.** The steps of the rank's lane are played in their order; a buffer is there from the step that makes it to
the last one that needs it (`sim/lane.py` says what is of which kind and what is a view), and one whose memory a result
takes (`run/reuse.py`) until there. Shown are the bytes at the moment when the sum over all kinds is largest, and the
most of each kind at any moment. What is scattered stays, with its copy, until it is read or two more scatters have
begun (`run/distributed.py`); gradients in a bucket until theirs is done. The state of an optimizer is that of one step
on tensors without values.

**Measured.** Parameters, gradients and optimizer state are counted where they lie. What a step makes on its way
(activations, gradients, staging) is counted by `StorageMeter` while it runs: the bytes of live storages, on any device.
Torch does not say which is which, so they are compared as one sum. Memory of the communication library is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from sennit.ir.operators import is_view
from sennit.ir.program import Collective, CollectiveKind, Compute, Program, reads
from sennit.ir.timeline import MemoryKind
from sennit.kernels.buckets import buckets
from sennit.reshard.private_torch import local_of
from sennit.run.distributed import SCATTERING
from sennit.run.order import Ordered, ordered
from sennit.run.reuse import reused
from sennit.sim.lane import LaneCode, compile_lane

__all__ = ["MemoryReport", "StorageMeter", "memory_report", "predicted_memory"]

STEP_KINDS = (MemoryKind.GRADIENTS, MemoryKind.ACTIVATIONS, MemoryKind.STAGING)


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes of one rank by kind. None: not known (no optimizer given), or not measured."""

    rank: int
    at_peak: Mapping[MemoryKind, int | None]
    at_most: Mapping[MemoryKind, int | None]
    measured: Mapping[MemoryKind, int | None]
    predicted_step: int
    measured_step: int | None

    @property
    def predicted_peak(self) -> int:
        return sum(size or 0 for size in self.at_peak.values())

    def __str__(self) -> str:
        rows = [(f"rank {self.rank}", "at the peak", "at most", "measured")]
        for kind in MemoryKind:
            at_peak, at_most, measured = (
                _bytes(table.get(kind)) for table in (self.at_peak, self.at_most, self.measured)
            )
            rows.append((kind.value, at_peak, at_most, measured))
        rows.append(("made by a step, at its peak", _bytes(self.predicted_step), "", _bytes(self.measured_step)))
        rows.append(("peak of all", _bytes(self.predicted_peak), "", ""))
        return "\n".join("".join([f"{row[0]:<28}", *(f"{cell:>13}" for cell in row[1:])]) for row in rows)


def memory_report(
    program: Program,
    rank: int,
    tensors: Mapping[str, DTensor],
    optimizer: torch.optim.Optimizer | None,
    measured_step: int | None = None,
) -> MemoryReport:
    peak, most = predicted_memory(program, rank)
    parameters = sum(local_of(tensor).nbytes for tensor in tensors.values())
    # beside what the program reads: parameters that it does not, and the optimizer
    standing = {
        MemoryKind.PARAMETERS: parameters,
        MemoryKind.OPTIMIZER: None if optimizer is None else _optimizer_step(optimizer),
    }
    gradients = [local_of(tensor.grad).nbytes for tensor in tensors.values() if isinstance(tensor.grad, DTensor)]
    measured: dict[MemoryKind, int | None] = {
        MemoryKind.PARAMETERS: parameters,
        MemoryKind.GRADIENTS: sum(gradients),
        MemoryKind.OPTIMIZER: None if optimizer is None else _state_bytes(optimizer),
    }
    step = sum(peak[kind] for kind in STEP_KINDS)
    return MemoryReport(rank, {**peak, **standing}, {**most, **standing}, measured, step, measured_step)


def predicted_memory(program: Program, rank: int) -> tuple[dict[MemoryKind, int], dict[MemoryKind, int]]:
    """Bytes by kind at the moment of the peak, and the most of each kind at any moment, the steps played in order."""
    order = ordered(program.lane_of(rank))
    lane = order.lane
    code = compile_lane(lane, blocking=True)
    changes: list[dict[MemoryKind, int]] = [dict.fromkeys(MemoryKind, 0) for _ in range(len(code.jobs) + 2)]
    made = {storage.buffer: storage.made for storage in code.storages}
    heirs = {
        name: made[result] for result, found in reused(lane).taken.items() for name in (found.memory, found.operand)
    }
    scattered = _scattered(order, code)
    for storage in code.storages:
        size, last = code.buffers[storage.buffer].bytes(rank), len(changes) - 1
        changes[0 if storage.made is None else storage.made + 1][storage.kind] += size
        end = min(max(*storage.ends, scattered.get(storage.buffer, 0)) + 2, last) if storage.ends else None
        heir = heirs.get(storage.buffer)
        if end is not None:
            changes[end if heir is None else min(end, heir + 1)][storage.kind] -= size
    for number, job in enumerate(code.jobs):
        if job.staging is not None:
            size = code.buffers[job.staging].bytes(rank)
            changes[number + 1][MemoryKind.STAGING] += size
            changes[min(scattered.get(job.staging, number) + 2, len(changes) - 1)][MemoryKind.STAGING] -= size
    live = dict.fromkeys(MemoryKind, 0)
    peak, most = dict(live), dict(live)
    for change in changes:
        live = {kind: live[kind] + change[kind] for kind in MemoryKind}
        most = {kind: max(most[kind], live[kind]) for kind in MemoryKind}
        if sum(live.values()) > sum(peak.values()):
            peak = live
    return peak, most


def _scattered(order: Ordered, code: LaneCode) -> dict[str, int]:
    """By the source of each reduce-scatter the last job that it is there for."""
    found = buckets(order.lane, order.late)
    read: dict[str, int] = {}  # by whom first, through views
    seen: dict[str, str] = {}  # what a view looks at
    for step in order.lane.steps:
        if isinstance(step, Compute) and is_view(step.kind):
            seen.update((buffer.name, seen.get(reads(step)[0], reads(step)[0])) for buffer in step.results)
    members: dict[str | int, list[Collective]] = {}  # by call: that of a bucket, or of one alone
    begins: dict[str | int, int] = {}
    for number, job in enumerate(code.jobs):
        for name in job.reads:
            read.setdefault(seen.get(name, name), number)
        if isinstance(job.step, Collective) and job.step.kind is CollectiveKind.REDUCE_SCATTER:
            name = job.step.result.name
            call: str | int = found[name].number if name in found else name
            members.setdefault(call, []).append(job.step)
            begins[call] = number
    starts = sorted(begins.values())
    ends = dict(zip(starts, [*starts[SCATTERING:], *[len(code.jobs)] * SCATTERING], strict=False))
    return {
        # it is waited for, and gone, before the job that reads it, or the third scatter, begins
        one.source: min(ends[begins[call]], *(read.get(other.result.name, len(code.jobs)) for other in members[call]))
        - 1
        for call in members
        for one in members[call]
    }


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    return sum(
        (local_of(value) if isinstance(value, DTensor) else value).nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    )


def _optimizer_step(optimizer: torch.optim.Optimizer) -> int | None:
    """The state that a step would leave: one on tensors of the same pieces without values."""
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = []
        for parameter in group["params"]:
            local = local_of(parameter) if isinstance(parameter, DTensor) else parameter
            parameters.append(nn.Parameter(torch.empty_like(local, device="meta")))
            parameters[-1].grad = torch.empty_like(parameters[-1])
        groups.append({**group, "params": parameters})
    try:
        twin = type(optimizer)(groups)  # type: ignore[call-arg]
    except TypeError:
        return None  # an optimizer that takes more than groups
    twin.step()
    return _state_bytes(twin)


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that operators make while this is active, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self.known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {id(tensor.untyped_storage()) for tensor in pytree.tree_leaves((args, kwargs)) if _is_plain(tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if _is_plain(tensor) and id(tensor.untyped_storage()) not in given:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self.known:
            return

        def gone(_: object) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


def _is_plain(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter)


def _bytes(size: int | None) -> str:
    if size is None:
        return "-"
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
