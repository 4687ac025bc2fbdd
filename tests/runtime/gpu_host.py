"""The GPU kernel on a host that stands in for a GPU: thread blocks are threads, device memory is the host's."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import sennit.collective.runtime.gpu_call as gpu_call
from sennit.collective.runtime.code import INPUT, OUTPUT, Geometry
from sennit.collective.runtime.gpu_call import STATUS, Shape, explain_status
from sennit.collective.runtime.gpu_code import Walk
from sennit.ir.collective import CollectiveSpec
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction
from sennit.ir.layout_numpy import Array

HERE = Path(__file__).parent


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """For what is built: one for all test files of a session."""
    folder = factory.getbasetemp() / "gpu_host"
    folder.mkdir(exist_ok=True)
    return folder


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path, dtype: DType, reduction: Reduction) -> ctypes.CDLL:
    found = compiler()
    assert found is not None
    library = folder / f"gpu_host_{dtype.value}_{reduction.value}.so"
    if not library.exists():
        options = gpu_call.defines(dtype, reduction, threads=1, resident=1, system_scope=False)
        flags = ["-std=c++17", "-O1", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", "-pthread"]
        paths = [f"-I{HERE}", f"-I{Path(gpu_call.__file__).parent}"]
        macros = ["-DSENNIT_HOST", *(f"-D{name}={value}" for name, value in options.items())]
        command = [found, *flags, *paths, *macros, str(HERE / "gpu_host.cpp"), "-o", str(library)]
        subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(library))


class HostGroup:
    """All ranks of a walk; flags live from call to call, as on a device."""

    def __init__(self, library: ctypes.CDLL, walk: Walk, *, most: int = 4, patience: float = 20.0) -> None:
        self.library, self.walk, self.most, self.patience = library, walk, most, patience
        self.status = np.array(STATUS, dtype=np.uint64)
        self.flags = [np.zeros(max(1, int(count) * most), dtype=np.uint64) for count in walk.code.flags]

    def run(self, inputs: list[Array], elements: int, dtype: DType, team: int) -> list[Array]:
        """The outputs. Memory that nobody wrote holds the byte 255."""
        shape = Shape.of(self.walk, elements, dtype, self.most, team)
        held = place(self.walk, inputs, elements, shape.geometry)
        buffers = np.array([[array.ctypes.data for array in ranked] for ranked in held], dtype=np.int64)
        flags = np.array([array.ctypes.data for array in self.flags], dtype=np.int64)
        linked = self.walk.link(shape.geometry, dtype.itemsize, buffers, flags, self.most)
        tables = (self.walk.workers, self.walk.pages, *linked)
        call = shape.call(self.walk, [table.ctypes.data for table in tables], self.status.ctypes.data, self.patience)
        self.library.run_grid(ctypes.byref(call), self.walk.blocks(team))
        error = explain_status(self.walk, self.status.tolist(), self.patience)
        if error is not None:
            raise error
        return [ranked[OUTPUT] for ranked in held]


def place(walk: Walk, inputs: list[Array], elements: int, geometry: Geometry) -> list[list[Array]]:
    """Buffers by rank, in place where the collective is."""
    code, held = walk.code, []
    assert isinstance(code.collective, CollectiveSpec)
    for rank, array in enumerate(inputs):
        sizes = [code.parts(rank, buffer) * elements for buffer in (INPUT, OUTPUT)]
        if code.collective.in_place:
            whole = unwritten(max(sizes), array.dtype)
            small = OUTPUT if sizes[OUTPUT] < sizes[INPUT] else INPUT
            first = geometry.span(1 - small, code.collective.alias_offset(rank))[0]
            pair = [whole, whole]
            pair[small] = whole[first : first + sizes[small]]
        else:
            pair = [unwritten(size, array.dtype) for size in sizes]
        pair[INPUT][...] = array
        held.append(pair + [unwritten(chunks * geometry.stride, array.dtype) for chunks in code.scratch])
    return held


def unwritten(elements: int, dtype: np.dtype[np.generic]) -> Array:
    """Aligned to 16 bytes, as device memory is."""
    room = np.full(elements * dtype.itemsize + 16, 255, dtype=np.uint8)
    first = -room.ctypes.data % 16
    return room[first : first + elements * dtype.itemsize].view(dtype)


@dataclass(frozen=True)
class HostKernel:
    """Has what `gpu_torch.py` uses of a `Kernel`."""

    library: ctypes.CDLL
    room: int

    def resident_blocks(self) -> int:
        return self.room

    def prepare(self, blocks: int, argument: ctypes.Structure) -> HostLaunch:
        return HostLaunch(self.library, blocks, argument)


@dataclass(frozen=True)
class HostLaunch:
    """Has what `gpu_torch.py` uses of a `Launch`."""

    library: ctypes.CDLL
    blocks: int
    argument: ctypes.Structure

    def start(self, stream: int) -> None:
        self.library.run_grid(ctypes.byref(self.argument), self.blocks)


@dataclass
class HostKernels:
    """Has what `gpu_torch.py` uses of `GpuKernels`."""

    folder: Path
    room: int = 32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def get(self, dtype: DType, reduction: Reduction) -> HostKernel:
        return HostKernel(build(self.folder, dtype, reduction), self.room)

    def stream(self) -> int:
        return 0
