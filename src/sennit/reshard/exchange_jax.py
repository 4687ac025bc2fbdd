"""An exchange on the CPU devices of one process: each device takes its piece out of the memory of the others
(`pull.py`).

XLA runs such devices as threads over one memory, and its collectives on them are copies: into the buffers of a
collective, through it, and out of its buffers. An exchange is one copy. `pull_core.c` makes it, called by XLA on each
device, between two collectives of a few bytes that tell all devices of a group where the pieces are and that all have
been taken. So it is part of the compiled program like any other step: under `jit` and `grad`, in loops and branches,
and ordered among other collectives by XLA.

The call that asks for an address has a side effect, as XLA understands it: else it would be moved out of a loop, and
name another buffer than the one that is read.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sennit.reshard.pull import encode
from sennit.reshard.redistribution import Step

try:
    import jax
except ImportError as missing:
    raise ImportError('sennit.reshard.exchange_jax needs JAX: pip install "sennit[jax]"') from missing

untyped: Any = jax  # much of it has no types
lax, ffi, Array = untyped.lax, untyped.ffi, untyped.ShapeDtypeStruct

__all__ = ["MOST_DEVICES", "exchange", "may_exchange", "register"]

_logger = logging.getLogger(__name__)

MOST_DEVICES = 64  # of `pull_core.c`
TARGETS = ("sennit_where", "sennit_take", "sennit_keep")


def register() -> bool:
    """Tells XLA of the core; False where the install had no compiler, or where this XLA has another interface.

    The same again changes nothing.
    """
    found = sorted(Path(__file__).parent.glob("_pull_core*.so"))
    if not found:
        return False
    library = ctypes.CDLL(str(found[0]))
    try:
        for name in TARGETS:
            ffi.register_ffi_target(name, ffi.pycapsule(getattr(library, name)), platform="cpu")
    except jax.errors.JaxRuntimeError as refused:
        _logger.warning("XLA does not take the core that exchanges pieces, so collectives serve: %s", refused)
        return False
    return True


def may_exchange(devices: Sequence[Any], dtype: Any) -> bool:
    """Whether these are CPU devices of this process, few enough, and an element is whole bytes."""
    own = jax.process_index()
    return (
        len(devices) <= MOST_DEVICES
        and all(device.platform == "cpu" and device.process_index == own for device in devices)
        and _has_whole_bytes(dtype)
    )


def _has_whole_bytes(dtype: Any) -> bool:
    numpy = untyped.numpy
    if numpy.issubdtype(dtype, np.integer):
        return bool(numpy.iinfo(dtype).bits % 8 == 0)
    if numpy.issubdtype(dtype, np.inexact):
        return bool(numpy.finfo(dtype).bits % 8 == 0)
    return bool(dtype == np.bool_)  # not keys of a random generator


def exchange(step: Step, groups: list[list[int]], names: tuple[str, ...], value: Any) -> Any:
    """The piece after `step` from the piece before it, for the inside of a `shard_map`.

    `groups` are those of the step's axes.
    """
    table = encode(step.source, step.result, groups, value.dtype.itemsize)
    piece = Array(step.result.local_shape(), value.dtype)
    few = groups if len(groups) > 1 else None  # JAX wants None for the one group of all
    address = ffi.ffi_call("sennit_where", Array((2,), np.uint32), has_side_effect=True)(value)
    every = lax.all_gather(address, names, axis_index_groups=few)
    taken, token = ffi.ffi_call("sennit_take", (piece, Array((1,), np.uint32)))(
        value, every, lax.axis_index(names), table=table
    )
    done = lax.all_gather(token, names, axis_index_groups=few)
    return ffi.ffi_call("sennit_keep", piece, input_output_aliases={0: 0})(taken, done, value)
