"""Collectives between processes on GPUs, by the kernel that serves virtual ranks: what differs is where the addresses
come from.

Each rank has one *arena* of device memory, laid out alike on all: flags, input, output, scratch. `PeerMemory` says
where the arenas of all ranks lie in this process's address space, and there are two ways to come by it:

- `ipc_memory`: N processes on one GPU, through CUDA's interprocess handles. Their kernels take turns, so a call is cut
  into phases with a barrier
  between them (`gpu_phases.py`); nothing waits inside a kernel.
- `symmetric_memory`: a GPU each, through torch's symmetric memory. One launch a rank, with gates, and flags in system
  scope. **Not run on
  GPUs yet**: that needs a machine with several. `GpuRank` itself is tested with ranks at once on a host that stands in for them.

    arena = arena_of(code, n, dtype)
    peer = GpuRank(code, rank, n, dtype, arena, ipc_memory(arena, rank, exchange, device), exchange)
    peer.input.copy_(x); peer.run(); y = peer.output

`exchange` gathers a few bytes of every rank, in the order of the ranks. It is also the barrier on the host between
phases, unless a faster one is given (`ShmGroup.barrier`).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sennit.collective.runtime.code import INPUT, OUTPUT, Code
from sennit.collective.runtime.gpu_call import STATUS, Shape, explain_status
from sennit.collective.runtime.gpu_code import Walk, walk_of
from sennit.collective.runtime.gpu_phases import phases_of
from sennit.collective.runtime.gpu_torch import DeviceWalk, GpuKernels
from sennit.errors import RunError
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction

__all__ = ["Arena", "GpuRank", "PeerMemory", "arena_of", "ipc_memory", "symmetric_memory"]

Exchange = Callable[[bytes], list[bytes]]
_LINE = 256  # bytes: what allocations of CUDA are aligned to


@dataclass(frozen=True, slots=True)
class Arena:
    """Offsets in bytes, the same for all ranks. `most`: the largest team that there are flags for."""

    input: int
    output: int
    scratch: tuple[int, ...]
    bytes: int
    most: int


def arena_of(code: Code, elements: int, dtype: DType, *, most: int = 32) -> Arena:
    if code.collective.in_place:
        raise RunError(f"{code.collective} is in place", fix="build it out of place: the arena has its own output")
    ranks = range(code.ranks)
    stride = Shape.of(walk_of(code, [0]), elements, dtype, most).geometry.stride
    sizes = [
        8 * most * max(1, *(int(count) for count in code.flags)),
        *(max(code.parts(rank, buffer) for rank in ranks) * elements * dtype.itemsize for buffer in (INPUT, OUTPUT)),
        *(chunks * stride * dtype.itemsize for chunks in code.scratch),
    ]
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + -(-max(size, 1) // _LINE) * _LINE)
    return Arena(edges[1], edges[2], tuple(edges[3:-1]), edges[-1], most)


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """`local` is this rank's arena; `addresses` those of all, as this process sees them.

    `kept` holds what must stay open.
    """

    local: torch.Tensor
    addresses: tuple[int, ...]
    at_once: bool  # the ranks' kernels run at the same time
    kept: tuple[Any, ...] = ()


def ipc_memory(arena: Arena, rank: int, exchange: Exchange, device: torch.device) -> PeerMemory:
    from torch.multiprocessing.reductions import reduce_tensor

    local = torch.zeros(arena.bytes, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    handles = exchange(pickle.dumps(reduce_tensor(local)))  # type: ignore[no-untyped-call]
    opened: list[torch.Tensor] = []
    for other, handle in enumerate(handles):
        if other == rank:
            opened.append(local)
        else:
            rebuild, arguments = pickle.loads(handle)
            opened.append(rebuild(*arguments))
    exchange(b"opened")  # nobody frees before all have opened
    return PeerMemory(local, tuple(t.data_ptr() for t in opened), at_once=False, kept=tuple(opened))


def symmetric_memory(arena: Arena, rank: int, group: dist.ProcessGroup, device: torch.device) -> PeerMemory:
    """`group` has one GPU a rank."""
    import torch.distributed._symmetric_memory as symmetric

    local = symmetric.empty(arena.bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group)
    local.zero_()
    torch.cuda.synchronize(device)
    handle.barrier()  # flags are zero everywhere before a peer may raise one
    return PeerMemory(local, tuple(handle.buffer_ptrs), at_once=True, kept=(handle,))


class GpuRank:
    """One rank of `code`, for arrays of `elements` a part. `input` and `output` lie in its arena."""

    def __init__(
        self,
        code: Code,
        rank: int,
        elements: int,
        dtype: DType,
        arena: Arena,
        memory: PeerMemory,
        exchange: Exchange,
        *,
        reduction: Reduction = Reduction.SUM,
        patience: float = 10.0,
        kernels: GpuKernels | None = None,
        barrier: Callable[[], object] | None = None,
    ) -> None:
        device = memory.local.device
        if memory.at_once and code.ranks > 1 and not any(len(list(code.block(r, 0))) for r in range(code.ranks)):
            raise RunError(
                f"code {code.name!r} has no gates: a rank could write to one that is still in the call before",
                fix="lower it with gpu_program(program, gates=True)",
            )
        self.code, self.rank, self.exchange, self.patience = code, rank, exchange, patience
        self.memory, self.device = memory, device
        self.barrier = barrier if barrier is not None else lambda: exchange(b"here")
        self.kernels = kernels if kernels is not None else GpuKernels(device, system_scope=True)
        self.kernel = self.kernels.get(dtype, reduction)
        walks: list[Walk] = (
            [walk_of(code, [rank])] if memory.at_once else [by_rank[rank] for by_rank in phases_of(code)]
        )
        self.walks = [DeviceWalk.of(walk, device) for walk in walks]
        room = min(walk.largest_team(self.kernel) for walk in self.walks)
        self.shape = Shape.of(walks[0], elements, dtype, min(room, arena.most))
        bases = np.array(memory.addresses, dtype=np.int64)
        buffers = bases[:, None] + np.array([arena.input, arena.output, *arena.scratch], dtype=np.int64)
        self.status = torch.tensor(STATUS, dtype=torch.int64, device=device)
        kind: torch.dtype = getattr(torch, dtype.torch_name)
        self.input, self.output = (
            memory.local[first : first + code.parts(rank, buffer) * elements * dtype.itemsize].view(kind)
            for first, buffer in ((arena.input, INPUT), (arena.output, OUTPUT))
        )
        self.launches = [
            walk.prepare(self.kernel, self.shape, dtype, buffers, bases, self.status, patience) for walk in self.walks
        ]
        self.events: list[torch.cuda.Event] = []
        self.others: list[list[torch.cuda.Event]] = []
        if not memory.at_once:
            self._share_events(len(walks))

    def run(self) -> None:
        """All ranks call it.

        Returns when this rank's work is on its stream; what it needs of others is waited for there.
        """
        if self.memory.at_once:
            self._launch(0)
            return
        for phase in range(len(self.walks)):
            self._meet(phase)
            self._launch(phase)
        self._meet(len(self.walks))

    def check(self) -> None:
        error = explain_status(self.walks[0].walk, self.status.tolist(), self.patience)
        if error is not None:
            raise error

    def _launch(self, phase: int) -> None:
        if self.launches[phase].blocks:  # a rank may have nothing to do in a phase
            self.launches[phase].start(self.kernels.stream())

    def _meet(self, phase: int) -> None:
        """What is on this stream from here on follows what is on every rank's before: an event each, and a barrier on
        the host, so that no rank waits for an event that is not recorded yet.
        """
        stream = torch.cuda.current_stream(self.device)
        self.events[phase].record(stream)
        self.barrier()
        for events in self.others:
            stream.wait_event(events[phase])

    def _share_events(self, phases: int) -> None:
        self.events = [torch.cuda.Event(interprocess=True) for _ in range(phases + 1)]  # type: ignore[no-untyped-call]
        for event in self.events:
            event.record(torch.cuda.current_stream(self.device))  # makes the event: it has no handle before
        handles = self.exchange(pickle.dumps([event.ipc_handle() for event in self.events]))  # type: ignore[no-untyped-call]
        for rank, told in enumerate(handles):
            if rank != self.rank:
                opened = pickle.loads(told)
                self.others.append([torch.cuda.Event.from_ipc_handle(self.device, h) for h in opened])  # type: ignore[no-untyped-call]
