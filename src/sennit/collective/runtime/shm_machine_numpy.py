"""The machine of `shm_core.c` in Python, on the same segment and by the same protocol: slow and right, for hosts
without a compiler.

Names and phases are those of the core; read them side by side. Two things differ: no tile is entered before the one
before it is left; and what flags say of tiles that were left before is not used. Flags are single words, stored and
loaded whole. Python has no memory fence, so taking a lock stands in for one: it orders what comes before against what
comes after. Nobody sleeps on a futex here, so nobody need be woken.
"""

from __future__ import annotations

import ctypes
import threading
import time
from ctypes import Array as CArray
from ctypes import c_uint8, c_uint64

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, STRIDE, Instruction, Op, Operand
from sennit.collective.runtime.reduce_numpy import divide, held_dtype, reduce_all
from sennit.collective.runtime.shm_abi import (
    DTYPES,
    FLAG_BYTES,
    HISTORY,
    LINE,
    NOWHERE,
    REDUCTIONS,
    RING_HEAD,
    SLOTS,
    CallRecord,
    GroupRecord,
    PlaceRecord,
    Ringed,
    Status,
    TileRecord,
    TransferRecord,
)
from sennit.collective.runtime.shm_plan import Plan
from sennit.collective.runtime.shm_segment import CALLS_KEPT, NOTE_BYTES
from sennit.ir.layout_numpy import Array

__all__ = ["NumpyMachine"]

Bytes = NDArray[np.uint8]
_HEADER = 16
_PLACES = 16  # where the places lie in a flag


def _bytes(address: int, count: int) -> Bytes:
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def _line(size: int) -> int:
    return -(-size // LINE) * LINE


class NumpyMachine:
    __slots__ = ("_fence",)

    def __init__(self) -> None:
        self._fence = threading.Lock()

    @property
    def name(self) -> str:
        return "python"

    def start(self, group: GroupRecord, group_address: int, plan: Plan, source: int, target: int, staged: int) -> int:
        if not group_address or not c_uint8.from_address(group.owned).value or c_uint8.from_address(group.broken).value:
            return Status.UNUSABLE
        call = plan.record
        call.source, call.target, call.entered, call.begun, call.left = source, target, 0, 0, 0
        call.staged[INPUT], call.staged[OUTPUT] = staged & 1 and not _is_shared(group, call), staged >> 1
        group.calls += 1
        note = group.notes + group.calls % CALLS_KEPT * NOTE_BYTES
        ctypes.memmove(note + 16, call.words, NOTE_BYTES - 16)
        c_uint64.from_address(note).value, c_uint64.from_address(note + 8).value = group.calls, call.call
        group.history = (group.history ^ call.call) * HISTORY & (1 << 64) - 1
        c_uint64.from_address(group.calls_begun).value = group.calls
        return self.run(group, group_address, plan)

    def run(self, group: GroupRecord, group_address: int, plan: Plan) -> int:
        return _Visit(group, plan.record, self._fence).go_on()

    def exchange(
        self, group: GroupRecord, group_address: int, rings: int, transfers: CArray[TransferRecord], count: int
    ) -> int:
        idle = _Idle(group)
        while True:
            open_ = [transfers[k] for k in range(count) if transfers[k].stage != 2]
            if not open_:
                return Status.DONE
            moved = False
            for transfer in open_:
                result = self._advance(group, rings, transfer)
                if result is None:
                    return Status.UNEXPECTED
                moved |= result
            if moved:
                idle = _Idle(group)
            elif not idle.once():
                return Status.WAITING

    def _advance(self, group: GroupRecord, rings: int, transfer: TransferRecord) -> bool | None:
        """As much of a transfer as the ring allows; None where another message is first in the ring."""
        sends = bool(transfer.sends)
        sender, receiver = (group.rank, transfer.peer) if sends else (transfer.peer, group.rank)
        number = (rings * group.ranks + sender) * group.ranks + receiver
        ring = group.rings + number * (RING_HEAD + group.ring_bytes)
        own, theirs = (c_uint64.from_address(ring + LINE * (not end)) for end in (sends, not sends))
        start = mine = own.value
        room = theirs.value - mine + (group.ring_bytes if sends else 0)
        with self._fence:
            pass
        data = _bytes(ring + RING_HEAD, group.ring_bytes)
        if transfer.stage == 0:
            if room < _HEADER:
                return False
            header = data[mine % group.ring_bytes :][:_HEADER].view(np.uint64)
            if sends:
                header[:] = transfer.tag, transfer.bytes
            elif header.tolist() != [transfer.tag, transfer.bytes]:
                transfer.found_tag, transfer.found_bytes = header.tolist()
                return None
            transfer.stage = 1
            mine, room = mine + _HEADER, room - _HEADER
        some = min(transfer.bytes - transfer.done, room, group.ring_bytes // 4)
        if some > 0:
            user = _bytes(transfer.data + transfer.done, some)
            places = np.arange(mine, mine + some) % group.ring_bytes
            if sends:
                data[places] = user
            else:
                user[:] = data[places]
            transfer.done, mine = transfer.done + some, mine + some
        if transfer.done == transfer.bytes:
            transfer.stage = 2
            mine += -transfer.bytes % _HEADER
        with self._fence:
            pass
        own.value = mine
        return bool(mine != start)


def _is_shared(group: GroupRecord, call: CallRecord) -> bool:
    source, target = call.source or 0, call.target or 0
    part = call.elements * call.itemsize
    here, there = call.parts[INPUT] * part, call.parts[OUTPUT] * part
    if not call.shared or not group.base <= source <= source + here <= group.base + group.bytes:
        return False
    apart = source + here <= target or target + there <= source
    return bool(apart or (call.over != NOWHERE and target - source == call.over * part))


class _Idle:
    """Waiting: a little longer each time, until patience is over."""

    __slots__ = ("_pause", "_until")

    def __init__(self, group: GroupRecord) -> None:
        self._pause, self._until = 0.0, time.monotonic() + group.patience * 1e-9

    def once(self) -> bool:
        time.sleep(self._pause)
        self._pause = min(1e-3, self._pause + 2e-5)
        return bool(time.monotonic() < self._until)


class _Visit:
    """One visit to a call."""

    __slots__ = ("call", "fence", "group")

    def __init__(self, group: GroupRecord, call: CallRecord, fence: threading.Lock) -> None:
        self.group, self.call, self.fence = group, call, fence

    def go_on(self) -> int:
        group, call, idle = self.group, self.call, _Idle(self.group)
        read = call.staged[INPUT] or not call.touched[INPUT] or call.early
        put_off = call.only_read and read and not call.touched[OUTPUT]
        while not call.begun or call.left < call.begun or call.entered < call.elements:
            if call.left == call.begun:
                leaving = group.exits[(group.epoch + 1) % SLOTS]
                while (leaving.next or 0) < (leaving.end or 0):
                    step = self.instruction(leaving.next)
                    if self.flag(step.peer, leaving.flag_base + step.argument, leaving.epoch).value < (
                        leaving.epoch * STRIDE + step.count
                    ):
                        group.waiting_for = step.peer
                        break
                    leaving.next += 32
                else:
                    self.enter_tile()
                    call.begun += 1
                    continue
                if not idle.once():
                    return Status.WAITING
                continue
            moved = False
            for block in range(call.block_count):
                result = self.run_block(block)
                if result is None:
                    return Status.OTHER_CALL
                moved |= result
            if self.all_done(bool(put_off)):
                self.leave_tile()
                call.left += 1
            elif moved:
                idle = _Idle(group)
            elif not idle.once():
                return Status.WAITING
        return Status.DONE

    @property
    def tile(self) -> TileRecord:
        """The one that is under way, or is entered."""
        tile: TileRecord = self.call.tiles[self.call.left % SLOTS]
        return tile

    @property
    def first(self) -> int:
        """Of `at`: where the blocks of that tile begin."""
        return int(self.call.left % SLOTS * self.call.block_count)

    def instruction(self, address: int) -> Instruction:
        row = (ctypes.c_int32 * 8).from_address(address)
        return Instruction(Op(row[0]), *row[1:])

    def step(self, number: int) -> Instruction:
        return self.instruction(self.call.code + 32 * number)

    def flag(self, rank: int, number: int, epoch: int) -> c_uint64:
        group = self.group
        return c_uint64.from_address(
            group.flags + ((rank * group.flags_per_rank + number) * SLOTS + epoch % SLOTS) * FLAG_BYTES
        )

    def run_block(self, block: int) -> bool | None:
        """Whether something was done; None where the peer runs another call."""
        group, call = self.group, self.call
        begin, end = call.at[self.first + block], call.blocks[2 * block + 1]
        while call.at[self.first + block] < end:
            step = self.step(call.at[self.first + block])
            match step.op:
                case Op.WAIT:
                    flag = self.flag(step.peer, call.flag_base + step.argument, self.tile.epoch)
                    if flag.value < self.tile.epoch * STRIDE + step.count:
                        group.waiting_for = step.peer
                        break
                    with self.fence:
                        pass
                    if step.source_buffer == 1:
                        if c_uint64.from_address(ctypes.addressof(flag) + 8).value != group.history:
                            group.waiting_for = step.peer
                            return None
                        places = (PlaceRecord * 2).from_address(ctypes.addressof(flag) + _PLACES)
                        group.peers[2 * step.peer], group.peers[2 * step.peer + 1] = places[INPUT], places[OUTPUT]
                case Op.SIGNAL:
                    flag = self.flag(group.rank, call.flag_base + step.argument, self.tile.epoch)
                    c_uint64.from_address(ctypes.addressof(flag) + 8).value = group.history
                    places = (PlaceRecord * 2).from_address(ctypes.addressof(flag) + _PLACES)
                    places[INPUT], places[OUTPUT] = self.tile.mine[INPUT], self.tile.mine[OUTPUT]
                    with self.fence:
                        pass
                    flag.value = self.tile.epoch * STRIDE + step.count
                case _:
                    self.move_data(step)
            call.at[self.first + block] += 1
        return bool(call.at[self.first + block] > begin)

    def locate(self, place: Operand, count: int) -> Array:
        group, call = self.group, self.call
        rank, buffer, chunk = place
        stride = self.tile.stride * call.itemsize
        if buffer >= FIRST_SCRATCH:
            scratch = self.tile.scratch + (rank - group.rank) * group.staging_step
            address, size = scratch + (call.scratch[buffer - FIRST_SCRATCH] + chunk) * stride, count * stride
        else:
            part, first = divmod(chunk, call.chunks)
            start, stop = (min(edge * stride, self.tile.size * call.itemsize) for edge in (first, first + count))
            where = self.tile.mine[buffer] if rank == group.rank else group.peers[2 * rank + buffer]
            address, size = group.base + where.offset + part * where.step + start, stop - start
        return _bytes(address, size).view(held_dtype(DTYPES[call.dtype]))

    def move_data(self, step: Instruction) -> None:
        call, rank = self.call, self.group.rank
        dtype, reduction = DTYPES[call.dtype], REDUCTIONS[call.reduction]
        many: list[Operand] = []
        if step.op.has_operands:
            rows = (ctypes.c_int32 * (3 * step.peer)).from_address(call.operands + 12 * step.argument)
            many = [Operand(*rows[3 * k : 3 * k + 3]) for k in range(step.peer)]
        source = Operand(rank, step.source_buffer, step.source_chunk)
        target = Operand(rank, step.target_buffer, step.target_chunk)
        match step.op:
            case Op.MULTI_REDUCE | Op.SWITCH_REDUCE:
                adds = step.op is Op.MULTI_REDUCE and not step.overwrites
                sources, targets = [*([target] if adds else []), *many], [target]
            case Op.MULTICAST:
                sources, targets = [source], many
            case Op.PUT:
                sources, targets = [source], [target._replace(rank=step.peer)]
            case Op.REDUCE | Op.READ_REDUCE:
                sources, targets = [target, source._replace(rank=step.peer)], [target]
            case _:
                sources, targets = [source._replace(rank=step.peer)], [target]
        arrays = [self.locate(place, step.count) for place in sources]
        for place in targets:
            goal = self.locate(place, step.count)
            length = min(len(goal), *(len(array) for array in arrays))
            if length:
                goal[:length] = reduce_all(dtype, reduction, [array[:length] for array in arrays])

    def next_place(self) -> int:
        group, place = self.group, self.call.place
        if group.staging_at + place > group.staging_step:
            group.staging_at = SLOTS * group.slot_bytes
        group.staging_at += place
        return int(group.staging_at - place)

    def enter_tile(self) -> None:
        group, call, tile = self.group, self.call, self.tile
        item = call.itemsize
        tile.first, tile.size = call.entered, min(call.elements - call.entered, call.tile)
        grain = call.chunks * call.alignment
        tile.stride = max(1, -(-tile.size // grain)) * call.alignment
        group.epoch += 1
        tile.epoch = group.epoch
        own = group.staging + group.rank * group.staging_step
        free = own + tile.epoch % SLOTS * group.slot_bytes
        ring = own + self.next_place() if call.ringed else free
        tile.scratch = ring if call.ringed == Ringed.SCRATCH else free
        if call.ringed == Ringed.INPUT:
            free = ring
        elif not call.ringed:
            free += _line(call.scratch[call.scratch_count] * tile.stride * item)
        length = tile.size * item
        small = OUTPUT if call.parts[OUTPUT] < call.parts[INPUT] else INPUT
        aliased = call.alias >= 0 and call.staged[INPUT]
        for buffer, user in ((INPUT, call.source or 0), (OUTPUT, call.target or 0)):
            staged = call.staged[buffer]
            tile.mine[buffer].offset = (free if staged else user + tile.first * item) - group.base
            tile.mine[buffer].step = length if staged else call.elements * item
            free += _line(call.parts[buffer] * length) if staged and not (aliased and buffer == small) else 0
        if aliased:
            tile.mine[small] = tile.mine[1 - small]
            tile.mine[small].offset += call.alias * length
        for part in range(call.parts[INPUT] if call.staged[INPUT] and length else 0):
            staging = _bytes(group.base + tile.mine[INPUT].offset + part * length, length)
            staging[:] = _bytes(call.source + (part * call.elements + tile.first) * item, length)
        call.entered += tile.size
        for block in range(call.block_count):
            call.at[self.first + block] = call.blocks[2 * block]

    def leave_tile(self) -> None:
        group, call, tile = self.group, self.call, self.tile
        dtype, length = DTYPES[call.dtype], tile.size * call.itemsize
        for part in range(call.parts[OUTPUT] if call.target and length else 0):
            user = _bytes(call.target + (part * call.elements + tile.first) * call.itemsize, length)
            if call.staged[OUTPUT]:
                user[:] = _bytes(group.base + tile.mine[OUTPUT].offset + part * length, length)
            if call.divide > 1:
                array = user.view(held_dtype(dtype))
                array[:] = divide(dtype, array, call.divide)
        leaving = group.exits[tile.epoch % SLOTS]
        leaving.next, leaving.end = call.code + 32 * call.at[self.first], call.code + 32 * call.blocks[1]
        leaving.epoch, leaving.flag_base = tile.epoch, call.flag_base

    def all_done(self, put_off: bool) -> bool:
        call = self.call
        for block in range(call.block_count):
            at = call.at[self.first + block]
            if at < call.blocks[2 * block + 1] and not (put_off and block == 0 and self.step(at).op is Op.WAIT):
                return False
        return True
