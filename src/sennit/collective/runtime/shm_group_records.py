"""What the core reads of one rank's end of a group (`GroupRecord`), filled in: for the group, and for each further strip of
its large calls, once one was cut (`shm_strips.py`).
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

from sennit.collective.runtime.shm_abi import SLOTS, GroupRecord, PlaceRecord
from sennit.collective.runtime.shm_cores import Waiting
from sennit.collective.runtime.shm_machine import CompiledMachine, Machine
from sennit.collective.runtime.shm_pages import PageMap, huge_pages
from sennit.collective.runtime.shm_plan import Plan
from sennit.collective.runtime.shm_segment import BROKEN, Segment
from sennit.collective.runtime.shm_strips import Strips
from sennit.collective.runtime.shm_workspace import Workspace

__all__ = ["GroupRecords"]

_PATIENCE = 20_000_000  # nanoseconds: how often a waiting rank looks around
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, which the mmap module does not name


class GroupRecords:
    """`first` is of the group itself. What records point into is kept as long as this."""

    __slots__ = ("__weakref__", "_filled", "_kept", "_owned", "_pages", "_strips", "_workspaces", "first")

    def __init__(self, segment: Segment, pids: Sequence[int], waiting: Waiting) -> None:
        self._owned = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._owned[0] = 1
        with suppress(OSError):  # an old kernel: then only calls that wait find out
            self._owned.madvise(_WIPE_ON_FORK)
        self._pages = PageMap()
        weakref.finalize(self, self._pages.close)
        self._workspaces = [Workspace() for _ in range(segment.layout.strips)]
        self._filled = set[int]()  # strips whose ring of staging has its pages
        self._kept: list[object] = []
        self._strips: Strips | None = None
        self.first = self._placed(self._made(segment, pids, waiting), segment, 0)

    @property
    def groups(self) -> tuple[GroupRecord, ...]:
        """By strip."""
        return (self.first, *(() if self._strips is None else self._strips.groups))

    def prepare(self, plan: Plan, segment: Segment, machine: Machine) -> None:
        """Have what the strips of a call need. All ranks prepare the same plans in the same order."""
        if len(plan.strips) > 1 and self._strips is None:
            assert isinstance(machine, CompiledMachine)
            further = [self._further(segment, strip) for strip in range(1, segment.layout.strips)]
            self._strips = Strips(machine.library, further)
            self.first.others = self._strips.address
        for strip, group in enumerate(self.groups[: len(plan.strips)]):
            if plan.record.ringed and strip not in self._filled:
                segment.fill_ring(strip)
                self._filled.add(strip)
            if plan.record.piece:
                group.workspace = self._workspaces[strip].at_least(plan.loaded.workspace)

    def dismiss_helpers(self) -> None:
        """End the threads that help: the caller runs all strips from then on."""
        if self._strips is not None:
            self._strips.close()

    def close(self) -> None:
        """No call may be under way, nor come after."""
        self._pages.close()
        self.dismiss_helpers()

    def _made(self, segment: Segment, pids: Sequence[int], waiting: Waiting) -> GroupRecord:
        layout, base = segment.layout, segment.address
        processes = (ctypes.c_int32 * layout.ranks)(*pids)
        self._kept.append(processes)
        record = GroupRecord()
        record.base, record.rings = base, base + layout.rings
        record.pids = processes
        record.notes, record.calls_begun = segment.own_notes, segment.own_calls_begun
        record.owned, record.broken = ctypes.addressof(ctypes.c_char.from_buffer(self._owned)), base + BROKEN
        record.bytes = layout.size
        record.flags_per_rank, record.staging_step = layout.capacity.flags, layout.staging_step
        record.slot_bytes, record.ring_bytes = layout.capacity.slot, layout.capacity.ring
        record.rank, record.ranks = segment.rank, layout.ranks
        record.pagemap, record.huge = self._pages.descriptor, huge_pages()
        record.spin = record.spin_limit = waiting.spins
        record.yields, record.patience, record.linger = waiting.yields, _PATIENCE, waiting.linger
        return record

    def _further(self, segment: Segment, strip: int) -> GroupRecord:
        record = GroupRecord.from_buffer_copy(self.first)
        record.epoch = record.calls = record.history = record.left = record.others = 0
        record.exits, record.workspace = type(record.exits)(), None
        return self._placed(record, segment, strip)

    def _placed(self, record: GroupRecord, segment: Segment, strip: int) -> GroupRecord:
        """With what a strip shares with the strips of the same number, and with no other."""
        layout, base = segment.layout, segment.address
        peers, left_by = (PlaceRecord * (SLOTS * 2 * layout.ranks))(), (ctypes.c_uint64 * layout.ranks)()
        self._kept += [peers, left_by]
        record.doorbells, record.flags = base + layout.doorbells(strip), base + layout.flags(strip)
        record.staging, record.staging_at = base + layout.staging(strip), SLOTS * layout.capacity.slot
        record.peers, record.left_by = peers, left_by
        return record
