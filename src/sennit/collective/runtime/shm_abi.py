"""The records that `shm_core.c` reads, field for field, and the library itself.

The core is built when sennit is installed, if a C compiler is there. It is a plain shared library that knows nothing of
Python: ctypes calls it, so other threads run meanwhile.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from enum import Enum, IntEnum
from pathlib import Path

from sennit.ir.dtype import DType

__all__ = [
    "DTYPES",
    "FLAG_BYTES",
    "HISTORY",
    "LINE",
    "NOWHERE",
    "REDUCTIONS",
    "RING_HEAD",
    "SLOTS",
    "CallRecord",
    "GroupRecord",
    "Inputs",
    "PlaceRecord",
    "Reduction",
    "Ringed",
    "Status",
    "StripRecord",
    "StripsRecord",
    "TileRecord",
    "TransferRecord",
    "WatchRecord",
    "load_core",
]

LINE = 64  # bytes of a cache line
HISTORY = 0x9E3779B97F4A7C15  # by which the number of all calls so far is multiplied at each
NOWHERE = -(1 << 31)  # of parts
SLOTS = 4  # tiles of a group that may be under way
FLAG_BYTES = 2 * LINE  # processors fetch lines in pairs
RING_HEAD = 2 * LINE  # the two counters before the bytes of a ring


class Reduction(Enum):
    """AVG is the sum, divided by the number of ranks at the end.

    Of bools, SUM and MAX mean "or", PROD and MIN "and".
    """

    SUM = "sum"
    PROD = "prod"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"
    AVG = "avg"

    __hash__ = object.__hash__  # members are singletons, and every call looks one up


# the numbers of the core
DTYPES = (
    DType.F64,
    DType.F32,
    DType.BF16,
    DType.F16,
    DType.I64,
    DType.I32,
    DType.I16,
    DType.I8,
    DType.U8,
    DType.BOOL,
)
REDUCTIONS = (
    Reduction.SUM,
    Reduction.PROD,
    Reduction.MIN,
    Reduction.MAX,
    Reduction.BAND,
    Reduction.BOR,
    Reduction.BXOR,
)


class Ringed(IntEnum):
    """What of a tile lies in the ring of staging; the rest lies in a slot."""

    NOTHING = 0
    SCRATCH = 1
    INPUT = 2


class Inputs(IntEnum):
    """Where peers read inputs: in staging, in the memory of their owner, or where each owner says, by the pages that
    its input lies in.
    """

    STAGED = 0
    DIRECT = 1
    EITHER = 2


class Status(IntEnum):
    DONE = 0
    WAITING = 1
    OTHER_CALL = 2
    UNEXPECTED = 3
    UNUSABLE = 4
    UNREADABLE = 5


class PlaceRecord(Structure):
    _fields_ = [("offset", c_int64), ("step", c_int64)]


class ExitRecord(Structure):
    _fields_ = [("next", c_void_p), ("end", c_void_p), ("epoch", c_uint64), ("flag_base", c_int64)]


class GroupRecord(Structure):
    _fields_ = [
        ("base", c_void_p),
        ("doorbells", c_void_p),
        ("flags", c_void_p),
        ("staging", c_void_p),
        ("rings", c_void_p),
        ("peers", POINTER(PlaceRecord)),
        ("pids", POINTER(c_int32)),
        ("workspace", c_void_p),
        ("notes", c_void_p),
        ("calls_begun", c_void_p),
        ("owned", c_void_p),
        ("broken", c_void_p),
        ("bytes", c_int64),
        ("flags_per_rank", c_int64),
        ("staging_step", c_int64),
        ("slot_bytes", c_int64),
        ("ring_bytes", c_int64),
        ("staging_at", c_int64),
        ("rank", c_int32),
        ("ranks", c_int32),
        ("pagemap", c_int32),
        ("huge", c_int32),
        ("spin_limit", c_int32),
        ("yields", c_int32),
        ("patience", c_int64),
        ("linger", c_int64),
        ("epoch", c_uint64),
        ("calls", c_uint64),
        ("history", c_uint64),
        ("spin", c_int32),
        ("waiting_for", c_int32),
        ("left", c_uint64),
        ("left_by", POINTER(c_uint64)),
        ("exits", ExitRecord * SLOTS),
        ("core", c_int32),
        ("others", c_void_p),
    ]


class TileRecord(Structure):
    _fields_ = [
        ("first", c_int64),
        ("size", c_int64),
        ("stride", c_int64),
        ("epoch", c_uint64),
        ("mine", PlaceRecord * 2),
        ("scratch", c_void_p),
        ("reduced", c_int64),
    ]


class TrialsRecord(Structure):
    _fields_ = [
        ("took", c_int64 * 2),
        ("made", c_int32),
        ("due", c_int32),
        ("gap", c_int32),
        ("way", c_int32),
    ]


class CallRecord(Structure):
    _fields_ = [
        ("code", c_void_p),
        ("operands", c_void_p),
        ("blocks", POINTER(c_int32)),
        ("scratch", POINTER(c_int64)),
        ("at", POINTER(c_int32)),
        ("flag_base", c_int64),
        ("block_count", c_int32),
        ("scratch_count", c_int32),
        ("chunks", c_int32),
        ("alignment", c_int32),
        ("parts", c_int32 * 2),
        ("touched", c_int32 * 2),
        ("only_read", c_int32),
        ("kept", c_int32),
        ("alias", c_int32),
        ("shared", c_int32),
        ("over", c_int32),
        ("dtype", c_int32),
        ("reduction", c_int32),
        ("itemsize", c_int32),
        ("divide", c_int32),
        ("large", c_int32),
        ("vast", c_int32),
        ("direct", c_int32),
        ("apart", c_int32),
        ("bounced", c_int32),
        ("early", c_int32),
        ("piece", c_int32),
        ("elements", c_int64),
        ("tile", c_int64),
        ("place", c_int64),
        ("ringed", c_int32),
        ("in_turns", c_int32),
        ("source", c_void_p),
        ("target", c_void_p),
        ("staged", c_int32 * 2),
        ("call", c_uint64),
        ("words", c_void_p),
        ("first", c_int64),
        ("stop", c_int64),
        ("entered", c_int64),
        ("begun", c_int64),
        ("left", c_int64),
        ("tiles", TileRecord * SLOTS),
        ("strips", c_int32),
        ("rouses", c_int32),
        ("others", c_void_p),
        ("trials", TrialsRecord),
    ]


class StripRecord(Structure):
    _fields_ = [
        ("state", c_uint32),
        ("bell", c_uint32),
        ("sleepers", c_uint32),
        ("ends", c_uint32),
        ("group", c_void_p),
        ("call", c_void_p),
        ("status", c_int32),
        ("started", c_int32),
        ("thread", c_uint64),
        ("rest", c_char * (2 * LINE - 48)),
    ]


class StripsRecord(Structure):
    _fields_ = [("strips", POINTER(StripRecord)), ("ended", c_int64)]


class TransferRecord(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bytes", c_int64),
        ("done", c_int64),
        ("tag", c_uint64),
        ("found_tag", c_uint64),
        ("found_bytes", c_int64),
        ("peer", c_int32),
        ("sends", c_int32),
        ("stage", c_int32),
        ("rest", c_int32),
    ]


class WatchRecord(Structure):
    _fields_ = [("counter", c_void_p), ("least", c_uint64)]


def load_core() -> ctypes.CDLL | None:
    """The compiled core, or None where the install had no compiler."""
    found = sorted(Path(__file__).parent.glob("_shm_core*.so"))
    if not found:
        return None
    library = ctypes.CDLL(str(found[0]))
    library.sennit_run.argtypes = [c_void_p, c_void_p]
    library.sennit_start.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p, c_int32]
    library.sennit_start_briefly.argtypes = library.sennit_start.argtypes
    library.sennit_help.argtypes = [c_void_p, c_int32]
    library.sennit_help.restype = None
    library.sennit_dismiss.argtypes = [c_void_p, c_int32]
    library.sennit_dismiss.restype = None
    library.sennit_huge.argtypes = [c_int32, c_void_p, c_int64]
    library.sennit_peek.argtypes = [c_int32, c_void_p, c_void_p, c_int64]
    library.sennit_exchange.argtypes = [c_void_p, c_int32, c_void_p, c_int32]
    library.sennit_reduce.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_int64]
    library.sennit_reduce.restype = None
    library.sennit_post.argtypes = [c_void_p, c_uint64, c_void_p]
    library.sennit_post.restype = None
    library.sennit_look.argtypes = [c_void_p]
    library.sennit_look.restype = c_uint64
    library.sennit_await.argtypes = [c_void_p, c_void_p, c_int32]
    return library
