"""One call of the GPU interpreter: the argument of the kernel, how many thread blocks share a chunk, and what the
kernel says when it gives up.

Chunks are a whole number of 16-byte vectors long. A member of a team takes every team-th tile of a chunk, a tile being
a vector for each thread; a chunk with fewer tiles than that has a smaller team.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from sennit.collective.runtime.code import STRIDE, Geometry
from sennit.collective.runtime.gpu_code import Walk
from sennit.errors import RunError
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction

__all__ = ["MEMBER_BYTES", "STATUS", "STATUS_WORDS", "Call", "Shape", "defines", "explain_status", "kernel_source"]

VECTOR_BYTES = 16
MEMBER_BYTES = 8192  # a vector for each of 512 threads
STATUS_WORDS = 8
STATUS = (*(0,) * STATUS_WORDS, 1, 0)  # before the first call: no failure, the first epoch, no thread block at its end


class Call(ctypes.Structure):
    """As in gpu_kernel.cu."""

    _fields_ = (
        ("workers", ctypes.c_uint64),
        ("pages", ctypes.c_uint64),
        ("steps", ctypes.c_uint64),
        ("places", ctypes.c_uint64),
        ("status", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("patience", ctypes.c_uint64),
        ("n", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("team", ctypes.c_int32),
        ("wide", ctypes.c_int32),
        ("flagged", ctypes.c_int32),
        ("spare", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a call, in elements; `most` is the largest team that there are flags for."""

    geometry: Geometry
    team: int
    most: int

    @classmethod
    def of(cls, walk: Walk, elements: int, dtype: DType, most: int, team: int | None = None) -> Shape:
        width = VECTOR_BYTES // dtype.itemsize
        geometry = Geometry.of(walk.code, elements, width)
        if team is None:
            team = min(most, max(1, -(-geometry.stride * dtype.itemsize // MEMBER_BYTES)))
        return cls(geometry, team, most)

    def call(self, walk: Walk, tables: Sequence[int], status: int, patience: float) -> Call:
        """`tables` are the addresses of workers, pages, and of the linked steps and places; `status` of a copy of
        `STATUS`.
        """
        geometry = self.geometry
        return Call(
            *tables,
            status,
            status + 8 * STATUS_WORDS,
            int(patience * 1e9),
            geometry.elements,
            geometry.stride,
            self.team,
            walk.wide,
            int(walk.flagged),
        )


def defines(dtype: DType, reduction: Reduction, threads: int, resident: int, *, system_scope: bool) -> dict[str, int]:
    """What the kernel is compiled with."""
    elements = (
        DType.F32, DType.F16, DType.BF16, DType.F64, DType.I32, DType.I64, DType.I16, DType.I8, DType.U8,
    )  # fmt: skip
    reductions = (Reduction.SUM, Reduction.PROD, Reduction.MIN, Reduction.MAX)
    if dtype not in elements:
        raise RunError(
            f"the GPU runtime has no {dtype.value}", fix=f"use one of {', '.join(item.value for item in elements)}"
        )
    return {
        "ELEMENT": elements.index(dtype),
        "REDUCTION": reductions.index(reduction),
        "THREADS": threads,
        "RESIDENT": resident,
        "SYSTEM_SCOPE": int(system_scope),
        "FLAG_STRIDE": STRIDE,
    }


def kernel_source() -> str:
    return (files("sennit.collective.runtime") / "gpu_kernel.cu").read_text(encoding="utf-8")


def explain_status(walk: Walk, status: Sequence[int], patience: float) -> RunError | None:
    """What the kernel wrote, or None where it ended well."""
    if status[0] == 0:
        return None
    _, rank, block, step, flag, wanted, found = status[:7]
    return RunError(
        f"{walk.code.name!r} waited {patience:g} s in vain: flag {flag} of rank {rank} is {found}, {wanted} was wanted",
        where=f"rank {rank}, block {block}, step {step}",
        fix="verify the program; on several GPUs, look whether all ranks made this call",
    )
