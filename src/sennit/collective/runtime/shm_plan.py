"""From `Code` and a size to the record that the core runs: where flags lie, what must be staged, and how large a tile
may be.

**Staging.** A buffer of a rank is *touched* if the code lets a peer read or write it. A touched buffer must lie in the
segment. What the user passes mostly does not, and is copied through a slot of staging.

**Tiles.** A slot holds the scratch, and the touched buffers, of one tile:

    scratch chunks * stride(T) + T * (parts of the input, if touched + parts of the output, if touched)    <= slot bytes

with stride(T) <= T / chunks + alignment. T is the same on all ranks, whatever the rank itself must stage. The tiles of
a call are of one size.

**The ring.** What at least `_MANY` peers read, inputs of an all_gather or the sums of an all_reduce, does not lie in
the slot but in the next place of a ring of staging (`shm_core.c` says why). With 8 ranks on 16 x86_64 cores
(`benchmarks/collective/shm_variants.py --rings`) an all_gather of 512 KiB took 56 instead of 92 microseconds, one of 4
MiB 586 instead of 766, and an all_reduce of 512 KiB 156 instead of 168; with 4 ranks an all_reduce took 89 instead of
95, and an all_gather as long. What one peer reads stays in a slot, which stays in the caches of two cores.

**Direct.** Where the kernel lets ranks read each other's memory, a call need not stage its inputs: who needs a part of
one reads it where the user has it. That pays where no other rank reads the same part (all_to_all, scatter, a broadcast
by slices, sums): else one copy into staging serves all of them. Below `_DIRECT_FROM` a call into the kernel for each
peer takes longer than a second copy. `LoadedCode.inputs` is the rule, the same on all ranks. Without scratch there is
one tile. Where the arrays of all ranks fill half of the cache that they share, what is read is *bounced*: some of it at
a time into a slot, which stays in the core's own cache, and from there into the output past the cache. The kernel would
write to the output itself, each line of which is fetched from memory first, to be overwritten. An all_to_all of arrays
that are larger than that cache is staged again: with 2 ranks on 2 x86_64 cores one of 64 MiB took 6.6 and 7.2 ms in
place of 7.9 (`shm_variants.py`), and of the programs by hand in `peers.py` staging was the fastest of 64 MiB with 4
ranks on 16 cores.

**A cache that keeps.** All of the above is of cores whose shared cache is a mesh away. Where it is near
(`shm_facts.kept_bytes`), a second copy inside of it costs less than the kernel's look at each page: nothing goes
directly. Nor do lines take long to come from another core: nothing lies in a ring, which would fill the cache (an
all_gather of 4 MiB by 4 ranks took 303 us in place of 364, `--rings 0 6144`). And outputs are written through it as
long as the arrays of all ranks fit. With 2 ranks on 2 such cores an all_to_all of 512 KiB took 12 us in place of 23,
and a broadcast of 4 MiB 73 in place of 176 (`shm_variants.py`). Sums that are written over inputs go through it too
where the tiles under way fit: the input was read a moment before.

**Either.** Large arrays in huge pages are the exception to that: there the kernel has little to look up, and an
all_to_all is one copy, through the cache (16 MiB by 8 ranks on 2 such cores: 3.7 ms in place of 5.4; in pages of 4 KiB
8.1; `shm_variants.py --pages`). Some arrays have such pages and others do not, and a rank knows it of its own alone
(`shm_pages.h`). So each *offers* its input or stages it, and says which in the flag of its gate: all go through the
same tiles. A rank that reads an offered input takes all of its part with the first tile; when that is done it has seen
what everyone did, and if all have offered, all is read, and all ranks know that there is no second tile.

**In the segment.** An input that the user has in memory of the group need not be staged (`is_shared`). What a peer has
read must be taken from its cache again when it is written, in staging or here: so that pays less than a copy costs, and
not at all for small arrays, of which staging stays in the cache and ranks need not wait for each other at the end. An
all_reduce in place writes to what was read a moment before, and an array that is broadcast is copied once for all; of
these, only what the cache does not hold is left where it is, and of all_reduces nothing where that cache is far: 8 ranks
on 16 such cores took 6.6 ms for 16 MiB, and 5.2 staged, written before each call. With inputs that are written before
each call an all_to_all of 4 MiB by 8 ranks on 2 near ones takes 1.6 ms in place of 2.3, by 4 ranks 0.55 in place of
0.64, filling its input included (`shm_variants.py --shared --written`).

**Sums.** A reduction whose operands are inputs of peers reads `piece` bytes of each at a time into a workspace, which
stays in the core's own cache, and adds them up from there. Staged, every line crosses from the cache of one core to
that of another twice: when it is written where a peer has read before, and when the peer reads it. With 8 ranks on 16
x86_64 cores a reduce_scatter of 16 MiB took 1.7 to 1.8 ms in place of 2.5, and 2.6 in place of 4.5 where two ranks
shared a real core. Below `_SUMMED_FROM` it is staged: one of 512 KiB took 64 us in place of 72, and with inputs that
are written before each call 131 in place of 164 to 170 (`shm_variants.py --sums --written`). An
all_reduce by slices may go so too, its sums in scratch, in tiles of `_SUMS` bytes of them, and is staged: in place it
took 4.5 ms in place of 3.9 at 16 MiB, most likely since what a rank overwrites a peer has just read.
"""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.code import FIRST_SCRATCH, INPUT, OUTPUT, Code, Op
from sennit.collective.runtime.code_direct import DirectFacts
from sennit.collective.runtime.code_gates import touched_places, with_direct_gates
from sennit.collective.runtime.code_lines import with_lines
from sennit.collective.runtime.code_reads import kept_chunk, readers
from sennit.collective.runtime.shm_abi import (
    DTYPES,
    LINE,
    NOWHERE,
    REDUCTIONS,
    SLOTS,
    CallRecord,
    Inputs,
    Reduction,
    Ringed,
)
from sennit.collective.runtime.shm_segment import Capacity, describe_call
from sennit.collective.runtime.shm_strips import ROUSE_FROM, strip_ranges
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.dtype import DType

__all__ = ["LoadedCode", "Plan", "SharedCache", "make_plan"]

_LARGE = 1 << 21  # bytes of an output: it passes the caches of a core;
_LARGE_PARTS = 1 << 20  # of one that is put together from parts of several ranks
# What so many peers read lies in the ring of staging, from so many bytes of a tile on.
_MANY, _RING_FROM = 3, 1 << 14
# Bytes of a slot that a tile takes. Tiles with a part for each rank are larger, if the slot is: a fifth faster for an
# all_to_all with 8, and for a reduce_scatter of 512 KiB 15% (71 and 59 us; 16 MiB: 4%).
_SLOT_USED = 3 << 17
# Where ranks take turns on a core all tiles are so large: each wait gives the core away. 8 ranks on 2 cores took 4 to
# 10% less than with tiles as those of ranks with a core each, and 4 ranks up to 13% (a broadcast of 16 MiB). Of calls
# with several tiles, where the shared cache is near, tiles that are half as large: all that are under way stay in it.
# With 8 ranks on fast cores 5 to 20% less (data/turns_2_cores.txt); on slow ones up to 5% more, with 4 ranks up to 9%,
# and 17% for an all_to_all of 4 MiB (data/tiles_2_cores.txt).
_SLOT_OF_TURNS, _SLOT_OF_NEAR_TURNS = 1 << 20, 1 << 19
_SLOT_OF = {CollectiveName.ALL_TO_ALL: 1 << 20, CollectiveName.REDUCE_SCATTER: 1 << 20}
# Bytes of an array in the segment from which on peers read it there; of one that is broadcast.
_SHARED_FROM, _SHARED_ONE_FROM = 1 << 19, 1 << 21
_HUGE_FROM = 1 << 20  # bytes of an array of which it is worth asking the kernel whether it lies in huge pages
_BOUNCE, _PAGE = 128 << 10, 4096  # bytes at a time, from where they begin in a page on
# Of sums of what is read in other processes: bytes of each at a time, at most; of all together, which stay in the
# core's cache also where two ranks share it (a virtual machine may run two cores as one); the least with which that
# pays; bytes of sums in a tile, where peers read them.
_PIECE, _PIECES, _LEAST_PIECE, _SUMS = 128 << 10, 512 << 10, 32 << 10, 128 << 10
# Sums of so many ranks and more with a core each: ranks of one core share its cache, where staging stays too; two ranks
# gained 15% on one machine and lost half on another.
_SUMMED_RANKS = 3
# Parts that each rank stages in another order, begun with that of the next rank: else all ranks write at once what the
# same one has read the call before, and take its lines from its cache. With 8 ranks on 16 x86_64 cores a reduce_scatter
# of 64 KiB took 8.6 and 11.9 us in place of 10.6 and 12.8 in two runs (benchmarks/collective/core_loop.py), and larger
# ones as long; an all_to_all of 64 KiB, whose parts are read one after another, took 14.6 in place of 12.9.
_IN_TURNS = (CollectiveName.REDUCE_SCATTER,)
# bytes of what is read at a time; measured on 16 x86_64 cores with 4 and 8 ranks
# (benchmarks/collective/shm_variants.py), as the next
_DIRECT_FROM = {
    CollectiveName.ALL_TO_ALL: 32 << 10,
    CollectiveName.SCATTER: 32 << 10,
    CollectiveName.BROADCAST: 32 << 10,  # by slices
}
# Of sums, bytes of a rank's input. A smaller one that was just written is in its core's own cache, to be staged from
# there; in the memory of its process its lines would come one by one from that cache.
_SUMMED_FROM = 2 << 20
# The same where strips share the work: each asks the kernel as often as the uncut call would. One of 4 MiB with 8 ranks
# on 16 cores took 600 us in place of 471, and with inputs that are written before each call 790 in place of 1080.
_SUMMED_IN_STRIPS_FROM = 8 << 20


@dataclass(frozen=True, slots=True)
class SharedCache:
    """What the cores share."""

    bytes: int = 32 << 20  # the default is for systems that do not say
    # what inputs and outputs of all ranks may fill so that outputs are best written through it; 0 where it is far
    keeps: int = 0

    def keeps_of(self, one_array: bool, turns: bool) -> int:
        """Of ranks that take turns on a core and have one array each it keeps as many as fit."""
        return self.bytes if self.keeps and one_array and turns else self.keeps

    def is_passed(self, arrays: int, under_way: int) -> bool:
        """Whether outputs that are the inputs too are best written past it: all of them have so many bytes, and the
        tiles under way. Where it is near, an input that was read for a tile is still there when the sums of that tile
        are written over it, if the tiles under way fit, as they lie in staging and in the arrays.
        """
        if self.keeps:
            return arrays > self.bytes and 2 * under_way > self.keeps
        return arrays > self.bytes // 2


_A_CACHE = SharedCache()


@dataclass(frozen=True, slots=True, eq=False)
class LoadedCode:
    """Code as one rank of a group sees it."""

    code: Code
    rank: int
    flag_base: int
    flag_count: int  # of the rank that has the most
    touched: tuple[bool, bool]  # input and output of this rank, by peers
    touched_anywhere: tuple[bool, bool]
    used: tuple[bool, bool]  # by this rank itself
    only_read: bool
    kept: int | None  # the one chunk of the input that no peer reads
    blocks: NDArray[np.int32]
    scratch: NDArray[np.int64]
    direct: DirectFacts

    @classmethod
    def load(cls, code: Code, rank: int, flag_base: int) -> LoadedCode:
        direct = DirectFacts(code)
        code = with_lines(with_direct_gates(code))
        by_peers, by_owner = set[tuple[int, int]](), set[tuple[int, int]]()
        only_read = True
        for owner in range(code.ranks):
            for block in range(code.rank_block_count(owner)):
                for step in code.block(owner, block):
                    if not step.op.moves_data:
                        continue
                    only_read &= step.op not in (Op.PUT, Op.MULTICAST)
                    for place_rank, buffer in touched_places(code, owner, step):
                        (by_owner if place_rank == owner else by_peers).add((place_rank, buffer))
        anywhere = tuple(any((r, b) in by_peers for r in range(code.ranks)) for b in (INPUT, OUTPUT))
        first = int(code.rank_blocks[rank])
        return cls(
            code,
            rank,
            flag_base,
            int(code.flags.max(initial=0)),
            ((rank, INPUT) in by_peers, (rank, OUTPUT) in by_peers),
            (anywhere[0], anywhere[1]),
            ((rank, INPUT) in by_owner, (rank, OUTPUT) in by_owner),
            only_read,
            kept_chunk(code, rank),
            np.ascontiguousarray(code.blocks[first : int(code.rank_blocks[rank + 1])]),
            np.cumsum([0, *code.scratch]).astype(np.int64),
            direct,
        )

    @property
    def in_place(self) -> bool:
        return self.code.collective.in_place

    @property
    def overlaid(self) -> int | None:
        """Where peers read inputs: the part of this rank's input at which its output may begin, if it lies over it, so
        that no peer reads what was overwritten; None where it may not. An output that has the input in it begins so
        many parts before it.
        """
        collective = self.code.collective
        if not isinstance(collective, CollectiveSpec) or not self.direct.in_place:
            return None
        inside = collective.output_chunks(self.rank) <= collective.input_chunks(self.rank)
        return (1 if inside else -1) * collective.alias_offset(self.rank) // self.code.chunks

    def inputs(
        self,
        part_bytes: int,
        cache: SharedCache = _A_CACHE,
        least: int | None = None,
        slot_bytes: int | None = None,
        cores: int | None = None,
        strips: int = 1,
    ) -> Inputs:
        """Where peers should read the inputs.

        `least` stands in for the bytes of a part from which on that pays. `cores`: that the ranks may run on; as many
        as they want, if it is not given.
        """
        collective, code = self.code.collective, self.code
        if not isinstance(collective, CollectiveSpec) or self.in_place:
            return Inputs.STAGED
        if least is not None:
            pays_from = least
        elif collective.name is CollectiveName.REDUCE_SCATTER:
            pays_from = (_SUMMED_FROM if strips == 1 else _SUMMED_IN_STRIPS_FROM) // code.ranks
        else:
            pays_from = _DIRECT_FROM.get(collective.name, part_bytes + 1) * code.chunks
        if part_bytes < pays_from or not self.direct.may:  # the cheap question first
            return Inputs.STAGED
        piece = self.piece(Capacity().slot if slot_bytes is None else slot_bytes)
        if least is not None:
            return Inputs.DIRECT if piece is None or piece > 0 else Inputs.STAGED
        if not self.direct.read_once:
            return Inputs.STAGED
        exchanged = collective.name is CollectiveName.ALL_TO_ALL
        if cache.keeps:
            whole = exchanged and code.chunks == 1 and not code.scratch  # each rank reads whole parts, from each
            return Inputs.EITHER if whole and code.ranks * part_bytes >= _HUGE_FROM else Inputs.STAGED
        if piece is not None:
            apart = code.ranks >= _SUMMED_RANKS and (cores is None or code.ranks <= cores)
            direct = apart and piece >= _LEAST_PIECE and self.overlaid is not None
        else:
            direct = not exchanged or 2 * code.ranks**2 * part_bytes <= cache.bytes
        return Inputs.DIRECT if direct else Inputs.STAGED

    def is_shared(self, part_bytes: int, cache: SharedCache, least: int | None = None) -> bool:
        """Whether peers should read an input that lies in the segment where it is: where that pays.

        `least` stands in for the bytes of an array from which on it does.
        """
        if self.in_place or not self.touched[INPUT]:
            return False
        if least is None:
            least = _SHARED_ONE_FROM if self.is_one_array else _SHARED_FROM
            inputs = sum(self.code.parts(rank, INPUT) for rank in range(self.code.ranks))
            if self.code.scratch and (not cache.keeps or part_bytes * inputs <= cache.bytes):
                return False
        return part_bytes * max(self.code.parts(self.rank, buffer) for buffer in (INPUT, OUTPUT)) >= least

    def piece(self, slot_bytes: int) -> int | None:
        """Bytes of each peer at a time, whole pages, in reductions of what peers have in their own memory.

        None where there are no such reductions.
        """
        operands = self.direct.operands
        return min(_PIECE, min(slot_bytes, _PIECES) // operands // _PAGE * _PAGE) if operands else None

    @property
    def workspace(self) -> int:
        """Bytes for the pieces, each begun where it begins in its page."""
        return self.direct.operands * (_PIECE + _PAGE)

    def takes_turns(self, cores: int | None) -> bool:
        """Whether there are more ranks than cores for them."""
        return cores is not None and cores < self.code.ranks

    @property
    def is_one_array(self) -> bool:
        """Of a rank: its input is its output, or there is one of them. What is broadcast is so."""
        collective = self.code.collective
        spread = isinstance(collective, CollectiveSpec) and collective.name is CollectiveName.BROADCAST
        return self.in_place or spread

    @property
    def array_parts(self) -> int:
        """Of the arrays of all ranks."""
        code = self.code
        widths = [[code.parts(rank, buffer) for buffer in (INPUT, OUTPUT)] for rank in range(code.ranks)]
        return sum(max(pair) if self.is_one_array else sum(pair) for pair in widths)

    @property
    def widest(self) -> int:
        """Parts of the input or the output of any rank, at most."""
        return max(self.code.parts(rank, buffer) for rank in range(self.code.ranks) for buffer in (INPUT, OUTPUT))

    def used_at_all(self, buffer: int) -> bool:
        return self.used[buffer] or self.touched[buffer]

    def tile(
        self,
        elements: int,
        itemsize: int,
        slot_bytes: int,
        direct: bool = False,
        cores: int | None = None,
        near: bool = False,
    ) -> int:
        """Elements of a part at a time: all of them, if the first of the sizes that are wanted is enough, and else by
        the last. `cores`: that the ranks may run on, if these are fewer. `near`: the cache that they share is.
        """
        code = self.code
        parts = sum(self._staged_widths(direct))
        scratch = sum(code.scratch)
        weight = scratch + parts * code.chunks  # chunks of the slot for one chunk of a part
        named = code.collective.name if isinstance(code.collective, CollectiveSpec) else None
        wanted = [_SLOT_USED if named is None else _SLOT_OF.get(named, _SLOT_USED)]
        if self.takes_turns(cores):
            wanted = [_SLOT_OF_TURNS, _SLOT_OF_NEAR_TURNS] if near else [_SLOT_OF_TURNS]
        if direct and self.direct.operands:
            wanted = [(_SUMS + 2 * LINE) * scratch + 4 * LINE]
        if not weight:
            return elements  # nothing is staged
        grain = LINE // itemsize * code.chunks
        for used in wanted:
            enough = (weight + scratch + 4) * LINE <= min(used, slot_bytes)
            room = (min(used, slot_bytes) if enough else slot_bytes) - (scratch + 4) * LINE
            most = room // (weight * LINE) * grain
            if most >= elements:
                return elements
        if most < grain:
            raise CollectiveError(
                f"code {code.name!r} needs {weight} chunks of {LINE} bytes at a time, and a slot has {slot_bytes} bytes",
                where=f"a group of {code.ranks} ranks",
                fix="use fewer chunks, or a group with larger slots",
            )
        tiles = -(-elements // most)
        return -(-elements // tiles // grain) * grain

    def ringed(
        self, tile: int, itemsize: int, direct: bool = False, least: int | None = None, near: bool = False
    ) -> tuple[Ringed, int]:
        """What of a tile lies in the ring, and its bytes there, of the rank that has most of it.

        `least` stands in for the bytes from which on that pays, which is never where the cache is near.
        """
        code, alignment = self.code, LINE // itemsize
        stride = max(1, -(-tile // (alignment * code.chunks))) * alignment
        if code.scratch:
            peers, what = readers(code, FIRST_SCRATCH), Ringed.SCRATCH
            place = _lines(sum(code.scratch) * stride * itemsize)
        else:
            peers, what = 0 if direct else readers(code, INPUT), Ringed.INPUT
            place = sum(_lines(width * tile * itemsize) for width in self._staged_widths(direct))
        many = peers >= _MANY and place >= _RING_FROM and not self.in_place and not near
        pays = many if least is None else place >= least
        return (what, place) if pays and place else (Ringed.NOTHING, 0)

    def _staged_widths(self, direct: bool) -> list[int]:
        """Parts of the buffers that some rank stages."""
        code = self.code
        touched = [b for b in (INPUT, OUTPUT) if self.touched_anywhere[b] and not (direct and b == INPUT)]
        widths = [max(code.parts(r, b) for r in range(code.ranks)) for b in (INPUT, OUTPUT)]
        if self.in_place:
            return [max(widths)] if touched else []  # one memory
        return [widths[b] for b in touched]


def _lines(nbytes: int) -> int:
    return -(-nbytes // LINE) * LINE


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """One call, ready but for its addresses. The arrays are kept because the record points into them."""

    loaded: LoadedCode
    record: CallRecord
    address: int  # of the record
    strips: tuple[CallRecord, ...]  # the first is the record
    identity: int
    words: bytes
    sizes: tuple[int, int]  # bytes of input and output
    part_bytes: int
    touched: tuple[bool, bool]  # as the record says
    staged: int | None  # what is staged, as bits, of private memory that does not overlap; None: see `_aim`
    one_array: bool  # that is so too where input and output are one array
    kept: tuple[object, ...]

    @property
    def text(self) -> str:
        return self.words.decode()


def make_plan(
    loaded: LoadedCode,
    elements: int,
    dtype: DType,
    reduction: Reduction | None,
    slot_bytes: int,
    title: str | None = None,
    *,
    inputs: Inputs = Inputs.STAGED,
    cache: SharedCache = _A_CACHE,
    cores: int | None = None,
    ring_from: int | None = None,
    shared_from: int | None = None,
    strips: int = 1,
) -> Plan:
    """`title` is what messages call it: the name of the collective, unless it is given.

    `inputs`: the same on all ranks, as `strips`. `cores`: as `tile` has them.
    """
    code, rank = loaded.code, loaded.rank
    if reduction in (Reduction.BAND, Reduction.BOR, Reduction.BXOR) and dtype.is_float:
        raise CollectiveError(f"{reduction.value} of {dtype.value}", fix="bitwise reductions are for integers and bool")
    if reduction is Reduction.AVG and dtype is DType.BOOL:
        raise CollectiveError("the average of bool", fix="use sum, max or min")
    ranges = strip_ranges(elements, strips, LINE // dtype.itemsize)
    at = np.zeros((len(ranges), SLOTS, max(1, len(loaded.blocks))), dtype=np.int32)
    record = CallRecord()
    record.code, record.operands = code.instructions.ctypes.data, code.operands.ctypes.data
    record.blocks = loaded.blocks.ctypes.data_as(type(record.blocks))
    record.scratch = loaded.scratch.ctypes.data_as(type(record.scratch))
    record.at = at[0].ctypes.data_as(type(record.at))
    record.flag_base, record.block_count, record.scratch_count = loaded.flag_base, len(loaded.blocks), len(code.scratch)
    record.chunks, record.alignment = code.chunks, LINE // dtype.itemsize
    for buffer in (INPUT, OUTPUT):
        record.parts[buffer] = code.parts(rank, buffer)
        record.touched[buffer] = any(loaded.touched) if loaded.in_place else loaded.touched[buffer]
    record.only_read = loaded.only_read and not loaded.in_place
    record.kept = -1 if loaded.kept is None else loaded.kept
    record.alias = code.collective.alias_offset(rank) // code.chunks if loaded.in_place else -1
    record.dtype, record.itemsize = DTYPES.index(dtype), dtype.itemsize
    average = reduction is Reduction.AVG
    record.reduction = 0 if reduction is None or average else REDUCTIONS.index(reduction)
    record.divide = code.ranks if average else 1
    record.direct, direct = inputs, inputs is Inputs.DIRECT
    record.elements = elements
    near = cache.keeps > 0
    longest = max(stop - first for first, stop in ranges)
    record.tile = loaded.tile(longest, dtype.itemsize, slot_bytes, direct, cores, near)
    record.in_turns = isinstance(code.collective, CollectiveSpec) and code.collective.name in _IN_TURNS
    record.ringed, record.place = loaded.ringed(record.tile, dtype.itemsize, direct, ring_from, near)
    if title is None:
        spec = code.collective if isinstance(code.collective, CollectiveSpec) else None
        name, root = (code.name, None) if spec is None else (spec.name.value, spec.root)
        title = describe_call(name, elements, dtype.value, None if reduction is None else reduction.value, root)
    words = title.encode()[:112]
    digest = hashlib.blake2b(code.fingerprint.encode() + words, digest_size=8).digest()
    record.call = identity = int.from_bytes(digest, "little")
    part = elements * dtype.itemsize
    sizes = code.parts(rank, INPUT) * part, code.parts(rank, OUTPUT) * part
    note = np.frombuffer(words.ljust(112, b"\0"), dtype=np.uint8)
    record.words = note.ctypes.data
    kept = part * loaded.array_parts <= cache.keeps_of(loaded.is_one_array, loaded.takes_turns(cores))
    of_a_core = sizes[OUTPUT] // strips
    record.large = not kept and of_a_core >= (_LARGE_PARTS if code.parts(rank, OUTPUT) > 1 else _LARGE)
    under_way = SLOTS * strips * int(record.tile) * dtype.itemsize * code.parts(rank, OUTPUT)
    record.vast = cache.is_passed(sizes[OUTPUT] * code.ranks, under_way * code.ranks)
    if direct and not cache.keeps and not code.scratch and sum(sizes) * code.ranks > cache.bytes // 2:
        record.bounced = min(_BOUNCE, slot_bytes - _PAGE)
    if direct:
        record.piece = loaded.piece(slot_bytes) or 0
    record.shared = not direct and loaded.is_shared(part, cache, shared_from)
    record.over = NOWHERE if not record.shared or (over := loaded.overlaid) is None else over
    if record.shared or inputs is not Inputs.STAGED:
        record.early = loaded.direct.read_by_the_end
    others = _other_strips(record, at[1:])
    for strip, (first, stop) in zip((record, *others), ranges, strict=True):
        strip.first, strip.stop = first, stop
    record.strips, record.others = strips, ctypes.addressof(others)
    record.rouses = loaded.widest * part >= ROUSE_FROM
    touched = bool(record.touched[INPUT]), bool(record.touched[OUTPUT])
    plain = loaded.used[OUTPUT] and not touched[OUTPUT] and (touched[INPUT] or not loaded.used[INPUT])
    staged = int(touched[INPUT] and not direct) if plain and not loaded.in_place else None
    one_array = not direct or loaded.overlaid == 0
    return Plan(
        loaded,
        record,
        ctypes.addressof(record),
        (record, *others),
        identity,
        words,
        sizes,
        part,
        touched,
        staged,
        one_array,
        (at, note, others),
    )


def _other_strips(record: CallRecord, at: NDArray[np.int32]) -> ctypes.Array[CallRecord]:
    """The record of a call, for each strip after the first."""
    others = (CallRecord * len(at))(*[record] * len(at))
    for strip, own in zip(others, at, strict=True):
        strip.at = own.ctypes.data_as(type(strip.at))
    return others
