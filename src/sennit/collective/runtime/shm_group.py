"""`ShmGroup`: collectives of numpy arrays between the ranks of one host.

Each picks a `Code` by its size from the group's table and runs it. Arrays are contiguous; outputs are written in place;
input and output may be the same array. numpy has no bf16: pass it as uint16 with `dtype=DType.BF16`.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence, Set

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.code import INPUT, OUTPUT, Code
from sennit.collective.runtime.liveness import Identity
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_machine import Machine
from sennit.collective.runtime.shm_messages import Buffer, ShmMessages
from sennit.collective.runtime.shm_plan import Plan, SharedCache
from sennit.collective.runtime.shm_segment import Segment
from sennit.collective.runtime.shm_shortcut import Rest, facts_of, shortcut_of
from sennit.collective.runtime.shm_table import default_table
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName
from sennit.ir.dtype import DType

__all__ = ["ShmGroup"]

Array = NDArray[np.generic]


class ShmGroup(ShmMessages):
    """`table` may be replaced by one that was tuned; all ranks must have the same."""

    def __init__(
        self,
        segment: Segment,
        identities: Sequence[Identity],
        machine: Machine,
        timeout: float,
        cores: Sequence[Set[int]],
        may_read: bool = False,
        cache: SharedCache | None = None,
    ) -> None:
        super().__init__(segment, identities, machine, timeout, cores, may_read, cache)
        self.table = default_table(self.size, self.cores, may_read and not self.cache.keeps)
        self._ready: dict[tuple[object, ...], Plan] = {}  # by what was asked for
        rest = _finish_later(weakref.ref(self))
        self._shortcut = shortcut_of(machine, self.address, self._lock, rest)

    def close(self) -> None:
        if self._shortcut is not None and os.getpid() == self._pid:
            self._shortcut.close()
        super().close()

    def forget_plans(self) -> None:
        """For who changes `table` or `direct_from` after the first call; on all ranks."""
        self._plans.clear()
        self._ready.clear()
        if self._shortcut is not None:
            self._shortcut.forget()

    def code(self, collective: CollectiveName, nbytes: int, root: int | None = None) -> Code:
        """The code for a collective whose part (see `code.py`) has so many bytes."""
        return self.table.code(collective, nbytes, root)

    def all_reduce(
        self,
        array: Array,
        reduction: Reduction = Reduction.SUM,
        *,
        out: Array | None = None,
        dtype: DType | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Into `out`, or into `array` itself."""
        out = array if out is None else out
        self._start("all_reduce", array, out, array.size, dtype, reduction, timeout=timeout)
        return out

    def reduce_scatter(
        self,
        array: Array,
        out: Array,
        reduction: Reduction = Reduction.SUM,
        *,
        dtype: DType | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Part r of the sum of all arrays, at rank r."""
        self._start("reduce_scatter", array, out, out.size, dtype, reduction, timeout=timeout)
        return out

    def all_gather(
        self, array: Array, out: Array, *, dtype: DType | None = None, timeout: float | None = None
    ) -> Array:
        self._start("all_gather", array, out, array.size, dtype, None, timeout=timeout)
        return out

    def all_to_all(
        self, array: Array, out: Array, *, dtype: DType | None = None, timeout: float | None = None
    ) -> Array:
        """Part q of `array` to rank q; part q of `out` from rank q."""
        self._start("all_to_all", array, out, array.size // self.size, dtype, None, timeout=timeout)
        return out

    def broadcast(self, array: Array, root: int, *, dtype: DType | None = None, timeout: float | None = None) -> Array:
        """The root's array to all."""
        self._start("broadcast", array, array, array.size, dtype, None, root, timeout)
        return array

    def reduce(
        self,
        array: Array,
        root: int,
        reduction: Reduction = Reduction.SUM,
        *,
        out: Array | None = None,
        dtype: DType | None = None,
        timeout: float | None = None,
    ) -> Array | None:
        """At the root into `out`, or into `array` itself; None elsewhere."""
        target = (array if out is None else out) if self.rank == root else None
        self._start("reduce", array, target, array.size, dtype, reduction, root, timeout)
        return target

    def gather(
        self,
        array: Array,
        root: int,
        out: Array | None = None,
        *,
        dtype: DType | None = None,
        timeout: float | None = None,
    ) -> Array | None:
        self._start("gather", array, out, array.size, dtype, None, root, timeout)
        return out

    def scatter(
        self,
        array: Array | None,
        root: int,
        out: Array,
        *,
        dtype: DType | None = None,
        timeout: float | None = None,
    ) -> Array:
        self._start("scatter", array, out, out.size, dtype, None, root, timeout)
        return out

    def barrier(self, *, timeout: float | None = None) -> None:
        """Nobody leaves before all have come."""
        plan = self._ready.get(("barrier",))
        if plan is None:  # an all-gather of nothing
            code = self.code(CollectiveName.ALL_GATHER, 0)
            plan = self._ready[("barrier",)] = self.plan(code, 0, DType.U8, None, "barrier")
        self.run_plan(plan, 0, 0, timeout)

    # ---- sizes that differ by rank

    def all_to_all_v(self, parts: Sequence[Array], outs: Sequence[Array], *, timeout: float | None = None) -> None:
        """`parts[q]` to rank q; `outs[q]` from rank q."""
        sends, receives = [Buffer.of(part) for part in parts], [Buffer.of(out) for out in outs]
        self.exchange(sends, receives, what="all_to_all_v", timeout=timeout)

    def all_gather_v(self, array: Array, outs: Sequence[Array], *, timeout: float | None = None) -> None:
        """`outs[q]` is the array of rank q, of the size that it has there."""
        receives = [Buffer.of(out) for out in outs]
        self.exchange([Buffer.of(array)] * self.size, receives, what="all_gather_v", timeout=timeout)

    def send_array(self, array: Array, to: int, tag: int = 0, *, timeout: float | None = None) -> None:
        self.send(Buffer.of(array), to, tag, timeout=timeout)

    def receive_array(self, out: Array, source: int, tag: int = 0, *, timeout: float | None = None) -> Array:
        self.receive(Buffer.of(out), source, tag, timeout=timeout)
        return out

    def _start(
        self,
        collective: str,
        array: Array | None,
        out: Array | None,
        elements: int,
        dtype: DType | None,
        reduction: Reduction | None,
        root: int | None = None,
        timeout: float | None = None,
    ) -> None:
        short = self._shortcut
        if short is not None and short.arrays(collective, array, out, dtype, reduction, root, timeout):
            return
        given = array if array is not None else out
        if given is None:
            raise CollectiveError(f"{collective} without an array", fix="pass one")
        key = collective, elements, given.dtype.num if dtype is None else dtype, reduction, root
        plan = self._ready.get(key)
        if plan is None:
            plan = self._ready[key] = self._make_ready(
                CollectiveName(collective), elements, dtype or dtype_of(given), reduction, root
            )
        source = 0 if array is None else self._address_of(array, plan.sizes[INPUT], "input", plan)
        if out is array:
            target = source
        else:
            target = 0 if out is None else self._address_of(out, plan.sizes[OUTPUT], "output", plan)
        self.run_plan(plan, source, target, timeout)
        if short is not None and (facts := facts_of(plan)) is not None:
            short.learn_arrays(facts, collective, array, out, dtype, reduction, root)

    def _make_ready(
        self, collective: CollectiveName, elements: int, dtype: DType, reduction: Reduction | None, root: int | None
    ) -> Plan:
        if len(self._ready) >= 512:
            self._ready.clear()
        code = self.code(collective, elements * dtype.itemsize, root)
        return self.plan(code, elements, dtype, reduction)

    def _address_of(self, array: Array, wanted: int, which: str, plan: Plan) -> int:
        if array.nbytes != wanted:
            raise CollectiveError(
                f"{plan.text}: the {which} of rank {self.rank} has {array.nbytes} bytes", fix=f"pass {wanted} bytes"
            )
        if not array.flags.c_contiguous:
            raise CollectiveError(
                f"{plan.text}: the {which} of rank {self.rank} has strides {array.strides}",
                fix="pass a contiguous array",
            )
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # the quickest of the ways to ask
        except (TypeError, ValueError):  # of memory that may not be written, or is empty
            return array.ctypes.data


def _finish_later(group: weakref.ref[ShmGroup]) -> Rest:
    """The rest of a call of the short way, which must not keep the group alive."""

    def finish(plan: Plan, status: int, timeout: object) -> None:
        alive = group()
        assert alive is not None
        assert timeout is None or isinstance(timeout, (int, float))
        alive._finish(plan, status, timeout)

    return finish


def dtype_of(array: Array) -> DType:
    """The element type of a numpy array."""
    letter = array.dtype.kind
    name = "bool" if letter == "b" else f"{letter}{8 * array.itemsize}"
    try:
        return DType(name)
    except ValueError:
        names = ", ".join(dtype.value for dtype in DType)
        raise CollectiveError(f"an array of {array.dtype}", fix=f"use one of {names}") from None
