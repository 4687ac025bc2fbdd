"""Collectives between virtual ranks on one GPU: every rank's buffers lie in its memory, one launch does it for all.

    group = GpuGroup(encode(gpu_program(compile_one_sided(algorithm))))
    group.run(inputs, outputs)             # lists of tensors, one for each rank; returns at once, ordered by the current stream
    group.check()                          # waits, and raises if the kernel gave up

It is how a schedule is tried at a GPU's speed without eight of them, and what several model replicas on one GPU use.
`gpu_peers_torch.py` has the same kernel between processes and between GPUs.

The kernel is compiled on the first call for each pair of element type and reduction, in about a second; `GpuKernels`
keeps them, and may be shared by groups. How many thread blocks make a team is chosen by size, up to what the device
holds at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Table
from sennit.collective.runtime.gpu_call import (
    STATUS,
    Shape,
    defines,
    explain_status,
    kernel_source,
)
from sennit.collective.runtime.gpu_code import Longs, Walk, walk_of
from sennit.collective.runtime.gpu_driver import Kernel, Launch, compile_kernel
from sennit.errors import RunError
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction

__all__ = ["DeviceWalk", "GpuGroup", "GpuKernels", "dtype_of"]


def dtype_of(tensor: torch.Tensor) -> DType:
    name = str(tensor.dtype).removeprefix("torch.")
    for dtype in DType:
        if dtype.torch_name == name:
            return dtype
    raise RunError(f"the GPU runtime has no element type {name}", fix="view the tensor as one that it has, as int32")


@dataclass(slots=True)
class GpuKernels:
    """Compiled kernels of one device.

    `resident` thread blocks of `threads` are to fit on a multiprocessor at once; `extra` are further definitions for
    the compiler, to try things out.
    """

    device: torch.device
    threads: int = 512
    resident: int = 2
    system_scope: bool = False
    extra: tuple[tuple[str, str], ...] = ()
    made: dict[tuple[DType, Reduction], Kernel] = field(default_factory=dict)

    @classmethod
    def here(cls) -> GpuKernels:
        """Of torch's current device."""
        if not torch.cuda.is_available():
            raise RunError("torch sees no CUDA device", fix="run on a machine with a GPU, or use another runtime")
        return cls(torch.device("cuda", torch.cuda.current_device()))

    def get(self, dtype: DType, reduction: Reduction) -> Kernel:
        key = dtype, reduction
        if key not in self.made:
            torch.zeros(1, device=self.device)  # makes the context that NVRTC and the driver need
            options = defines(dtype, reduction, self.threads, self.resident, system_scope=self.system_scope)
            self.made[key] = compile_kernel(kernel_source(), "interpret", {**options, **dict(self.extra)}, self.threads)
        return self.made[key]

    def stream(self) -> int:
        """The current one, as the driver knows it."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)


@dataclass(slots=True)
class DeviceWalk:
    """A walk for a device: its fixed tables lie there, linked ones are kept for the launches that use them."""

    walk: Walk
    device: torch.device
    fixed: tuple[torch.Tensor, ...]
    linked: list[torch.Tensor]

    @classmethod
    def of(cls, walk: Walk, device: torch.device) -> DeviceWalk:
        return cls(walk, device, tuple(_upload(table, device) for table in (walk.workers, walk.pages)), [])

    def prepare(
        self,
        kernel: Kernel,
        shape: Shape,
        dtype: DType,
        buffers: Longs,
        flags: Longs,
        status: torch.Tensor,
        patience: float,
    ) -> Launch:
        """A launch on these buffers and flags; `Walk.link` says what they are."""
        linked = self.walk.link(shape.geometry, dtype.itemsize, buffers, flags, shape.most)
        tables = [_upload(table, self.device) for table in linked]
        self.linked += tables
        addresses = [table.data_ptr() for table in (*self.fixed, *tables)]
        call = shape.call(self.walk, addresses, status.data_ptr(), patience)
        return kernel.prepare(self.walk.blocks(shape.team) if shape.geometry.elements else 0, call)

    def largest_team(self, kernel: Kernel) -> int:
        """The most members a team may have with all thread blocks resident; raises where not even one fits."""
        walk, room = self.walk, kernel.resident_blocks()
        narrow = len(walk.workers) - walk.wide
        if walk.blocks(1) > room:
            raise RunError(
                f"{walk.blocks(1)} thread blocks wait for each other and the device holds {room} at once",
                where=f"code {walk.code.name!r}: {walk.wide} that move data, {narrow} that only signal and wait",
                fix="use fewer channels or instances, or join_blocks: one block a rank",
            )
        return (room - narrow) // max(1, walk.wide)


def _upload(table: Table | Longs, device: torch.device) -> torch.Tensor:
    # one more row: an empty table has no address
    return torch.from_numpy(np.concatenate([table, np.zeros((1, *table.shape[1:]), table.dtype)])).to(device)


class GpuGroup:
    """All ranks of `code` in one launch.

    `team` fixes the size of teams; `patience` is how many seconds a wait may take.
    """

    def __init__(
        self,
        code: Code,
        kernels: GpuKernels | None = None,
        *,
        team: int | None = None,
        patience: float = 10.0,
        join: bool = True,
    ) -> None:
        self.kernels = kernels if kernels is not None else GpuKernels.here()
        self.device = self.kernels.device
        self.code, self.team, self.patience = code, team, patience
        self.walk = DeviceWalk.of(walk_of(code, join=join), self.device)
        self.status = torch.tensor(STATUS, dtype=torch.int64, device=self.device)
        self.most = 0
        self.flags: list[torch.Tensor] = []
        self.scratch: list[list[torch.Tensor]] = [[] for _ in range(code.ranks)]
        self.scratch_bytes = 0
        self.launches: dict[tuple[object, ...], Launch] = {}

    def run(
        self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: Reduction = Reduction.SUM
    ) -> None:
        """`inputs` and `outputs` are contiguous, on the device, one for each rank, of as many equal parts as the
        collective has.
        """
        tensors = (*inputs, *outputs)
        key = (
            reduction,
            len(inputs),
            *(t.data_ptr() for t in tensors),
            *(t.numel() for t in tensors),
            *(t.dtype for t in tensors),
            *(t.is_contiguous() for t in tensors),
        )
        launch = self.launches.get(key)
        if launch is None:
            if len(self.launches) > 256:
                self._forget_launches()
            launch = self.launches[key] = self._prepare(inputs, outputs, reduction)
        if launch.blocks:
            launch.start(self.kernels.stream())

    def _prepare(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], reduction: Reduction) -> Launch:
        """Checked, with all that the kernel needs in place. Kept, since training steps use the same buffers again."""
        dtype, elements = dtype_of(inputs[0]), self._elements(inputs, outputs)
        kernel = self.kernels.get(dtype, reduction)
        self._reserve_flags(kernel)
        if self.team is not None and self.team > self.most:
            raise RunError(
                f"a team of {self.team}; the device holds {self.most} members at once", fix="ask for fewer, or none"
            )
        shape = Shape.of(self.walk.walk, elements, dtype, self.most, self.team)
        self._reserve_scratch(shape.geometry.stride * dtype.itemsize)
        self._check_alias(inputs, outputs, shape)
        rows = [
            [inputs[rank].data_ptr(), outputs[rank].data_ptr(), *(t.data_ptr() for t in scratch)]
            for rank, scratch in enumerate(self.scratch)
        ]
        buffers, flags = np.array(rows, dtype=np.int64), np.array([t.data_ptr() for t in self.flags], dtype=np.int64)
        return self.walk.prepare(kernel, shape, dtype, buffers, flags, self.status, self.patience)

    def check(self) -> None:
        """Wait for all calls; raise if one gave up."""
        error = explain_status(self.walk.walk, self.status.tolist(), self.patience)
        if error is not None:
            raise error

    # ---- what a call needs -------------------------------------------------------------------------------------------

    def _elements(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
        code = self.code
        if len(inputs) != code.ranks or len(outputs) != code.ranks:
            raise RunError(
                f"{len(inputs)} inputs and {len(outputs)} outputs for {code.ranks} ranks", fix="pass one for each rank"
            )
        elements = max((t.numel() // max(1, code.parts(r, INPUT)) for r, t in enumerate(inputs)), default=0)
        for buffer, tensors, name in ((INPUT, inputs, "input"), (OUTPUT, outputs, "output")):
            for rank, tensor in enumerate(tensors):
                wanted = code.parts(rank, buffer) * elements
                if tensor.numel() != wanted or not tensor.is_contiguous() or tensor.device != self.device:
                    raise RunError(
                        f"the {name} of rank {rank} has {tensor.numel()} elements on {tensor.device}"
                        f"{'' if tensor.is_contiguous() else ', not contiguous'}",
                        where=f"code {code.name!r}",
                        fix=f"pass {wanted} contiguous elements on {self.device}",
                    )
                if tensor.dtype != inputs[0].dtype:
                    raise RunError(
                        f"the {name} of rank {rank} is {tensor.dtype}, the input of rank 0 {inputs[0].dtype}",
                        fix="use one element type",
                    )
        return elements

    def _check_alias(self, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], shape: Shape) -> None:
        if not self.code.collective.in_place:
            return
        for rank, pair in enumerate(zip(inputs, outputs, strict=True)):
            small = OUTPUT if pair[OUTPUT].numel() < pair[INPUT].numel() else INPUT
            first = shape.geometry.span(1 - small, self.code.collective.alias_offset(rank))[0]
            apart = pair[small].data_ptr() - pair[1 - small].data_ptr()
            if apart != first * pair[INPUT].element_size():
                raise RunError(
                    f"{self.code.collective} is in place, and the smaller buffer of rank {rank} begins {apart} bytes "
                    f"into the larger",
                    fix=f"let it begin {first * pair[INPUT].element_size()} bytes into it",
                )

    def _reserve_flags(self, kernel: Kernel) -> None:
        """For the largest team.

        A kernel of another type may hold fewer thread blocks, never use more flags than these.
        """
        most = self.walk.largest_team(kernel)
        if self.flags:
            self.most = min(self.most, most)
            return
        self.most = most
        counts = [max(1, int(count)) * most for count in self.code.flags]
        self.flags = [torch.zeros(count, dtype=torch.int64, device=self.device) for count in counts]

    def _reserve_scratch(self, chunk_bytes: int) -> None:
        if chunk_bytes <= self.scratch_bytes or not self.code.scratch:
            return
        self.scratch = [
            [torch.empty(chunks * chunk_bytes, dtype=torch.uint8, device=self.device) for chunks in self.code.scratch]
            for _ in range(self.code.ranks)
        ]
        self.scratch_bytes = chunk_bytes
        self._forget_launches()  # they know the old scratch

    def _forget_launches(self) -> None:
        self.launches.clear()
        self.walk.linked.clear()
