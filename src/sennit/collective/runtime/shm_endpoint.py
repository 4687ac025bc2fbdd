"""One rank's end of a group: the ranks of one host, joined by a shared segment, running compiled collectives.

    create   make or open the segment, learn who the peers are
    run      one `Code` on raw addresses
    allocate memory that peers read in place: no copies
    close

`shm_messages.py` adds messages, and `shm_group.py` collectives of numpy arrays.

**Calls** of one group run one after another, whichever threads they come from; different groups run at the same time.
All ranks must make the same calls in the same order.

**Failures.** A machine returns every few milliseconds while nothing moves. Then this file looks at the segment and at
the peers: a failure that another rank declared, a peer that is awaited and has died or closed, a peer that made another
call, the time that is over. What it finds it declares to all and raises as `RuntimeFailure`; after that the group is of
no use on any rank.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Self

import numpy as np
from numpy.typing import NDArray

from sennit.collective.runtime.code import INPUT, OUTPUT, Code, Instruction, Op
from sennit.collective.runtime.code_direct import pulled_places
from sennit.collective.runtime.failure import Cause, RuntimeFailure
from sennit.collective.runtime.liveness import Identity, Liveness
from sennit.collective.runtime.shm_abi import SLOTS, CallRecord, GroupRecord, Inputs, Reduction, Status
from sennit.collective.runtime.shm_arena import Arena
from sennit.collective.runtime.shm_cores import Waiting
from sennit.collective.runtime.shm_facts import Facts, Secret, everyone, sees, threads_of
from sennit.collective.runtime.shm_group_records import GroupRecords
from sennit.collective.runtime.shm_machine import Machine, choose_machine
from sennit.collective.runtime.shm_plan import LoadedCode, Plan, SharedCache, make_plan
from sennit.collective.runtime.shm_segment import BROKEN, CALLS_KEPT, Capacity, Exchange, Layout, Segment, open_segment
from sennit.collective.runtime.shm_shortcut import new_turn
from sennit.collective.runtime.shm_strips import strips_for
from sennit.errors import CollectiveError, RunError
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.dtype import DType
from sennit.ir.layout import Reduction as LayoutReduction

__all__ = ["ShmEndpoint"]

_PLANS_KEPT = 512


class ShmEndpoint:
    """One rank's end of a group."""

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
        layout = segment.layout
        self.threads = 1 if segment.scarce else layout.strips  # that large calls may be cut for; fewer are allowed too
        self.strip_bytes: int | None = None  # of a strip at least, to overrule `strips_for`; the same on all ranks
        self.may_read = may_read  # whether ranks may read each other's memory
        self.direct_from: int | None = None  # bytes of a part, to overrule `LoadedCode.inputs`; the same on all ranks
        self.ring_from: int | None = None  # bytes of a tile, to overrule `ringed`; the same
        self.shared_from: int | None = None  # bytes of an array, to overrule `is_shared`; of this rank alone
        self.rank, self.size, self.timeout = segment.rank, layout.ranks, timeout
        self.cores = len(set[int]().union(*cores))  # that the ranks may run on, all together
        self.machine = machine
        self._segment: Segment | None = segment
        self._identities = tuple(identities)
        self.cache = cache or SharedCache()  # the same on all ranks
        self._liveness = Liveness(identities)
        weakref.finalize(self, self._liveness.close)  # of a group that was dropped
        self._arena = Arena(segment.address + layout.arena(self.rank), layout.capacity.arena)
        self._pid = os.getpid()
        self._lock = new_turn()
        self._codes: dict[str, LoadedCode] = {}
        self._plans: dict[tuple[str, int, DType, Reduction | None], Plan] = {}
        self._flags_used = 0
        self._compared = [0] * self.size  # by rank: the last of its calls that were compared with this rank's
        self._broken: RuntimeFailure | None = None
        pids = [identity.pid for identity in identities]
        self._records = GroupRecords(segment, pids, Waiting.of(self.rank, cores))
        self._record = self._records.first
        self.address = ctypes.addressof(self._record)

    @classmethod
    def create(
        cls,
        rank: int,
        size: int,
        exchange: Exchange,
        *,
        timeout: float,
        capacity: Capacity | None = None,
        compiled: bool = True,
        threads: int | None = None,
        sharers: int = 1,
        busy: int = 1,
    ) -> Self:
        """All ranks call it.

        `exchange` gathers small bytes of all ranks, in their order. `compiled=False`: the interpreter in Python.
        `threads`: that move the bytes of a large call, in each rank; a rank's share of the cores, unless it is given.
        `sharers`: the processes on this host that want their share too, if the group has not all of them. `busy`: threads
        that a rank computes with at the same time.
        """
        if threads is not None and threads < 1:
            raise RunError(f"{threads} threads for collectives", where=f"rank {rank}", fix="use one or more")
        if not 0 <= rank < size:
            raise RunError(f"rank {rank} of {size}", fix="use ranks 0 to size - 1")
        if not hasattr(os, "memfd_create"):
            raise RunError("shared-memory groups need Linux", fix="use the gloo backend on other systems")
        machine = choose_machine(compiled)
        secret = Secret()
        own = Facts.own(rank, size, machine, secret, threads=threads, sharers=sharers, busy=busy)
        ranks = everyone(own, exchange)
        if len({facts.machine for facts in ranks}) > 1:
            machine = choose_machine(False)  # the two speak the same protocol, but only one of them can fence memory
        capacity = capacity or Capacity(arena=min(facts.room for facts in ranks))
        layout = Layout(size, capacity, threads_of(ranks))
        segment = open_segment(rank, layout, exchange)
        cores = [set(facts.cores) for facts in ranks]
        sees_all = sees(machine, [facts for facts in ranks if facts.rank != rank])
        may_read = all(answer == b"1" for answer in exchange(b"1" if sees_all else b"0"))
        del secret  # not before all have looked
        cache = SharedCache(
            bytes=min(facts.cache for facts in ranks),
            keeps=min(facts.keeps for facts in ranks),
        )
        return cls(segment, [facts.identity for facts in ranks], machine, timeout, cores, may_read, cache)

    # ---- collectives -------------------------------------------------------------------------------------------------

    def run(
        self,
        code: Code,
        source: int,
        target: int,
        elements: int,
        dtype: DType,
        reduction: Reduction | LayoutReduction | None = None,
        *,
        timeout: float | None = None,
    ) -> None:
        """Run a code.

        `source` and `target` are addresses of as many parts of `elements` as the collective has; 0 where this rank has
        none.
        """
        if isinstance(reduction, LayoutReduction):
            reduction = Reduction(reduction.value)
        plan = self._plans.get((code.fingerprint, elements, dtype, reduction))
        if plan is None:
            plan = self.plan(code, elements, dtype, reduction)
        self.run_plan(plan, source, target, timeout)

    def run_plan(self, plan: Plan, source: int, target: int, timeout: float | None = None) -> None:
        """`run`, for who keeps the plan: what is left is one call of the machine, which also looks whether the group
        may be used.
        """
        with self._lock:
            kept: object = None
            apart = plan.one_array if source == target else not _overlap(source, target, plan.sizes)
            if plan.staged is not None and source and target and apart:
                staged = plan.staged  # the common case: peers only read
            else:
                source, target, staged, kept = self._aim(plan, source, target)
            status = self.machine.start(self._record, self.address, plan, source, target, staged)
            if status:
                self._finish(plan, status, timeout)
            del kept

    def finish_plan(self, plan: Plan, status: int, timeout: float | None = None) -> None:
        """The rest of a call that `sennit_start` began and did not end, for who calls that itself."""
        with self._lock:
            self._finish(plan, status, timeout)

    def _finish(self, plan: Plan, status: int, timeout: float | None) -> None:
        segment = self._usable()
        with self._unfinished(segment, plan.text):
            kept: object = None
            if status == Status.UNREADABLE:  # by peers: they read a copy
                status, kept = self._start_with_copy(plan)
            self._wait_for_call(segment, plan, status, self.timeout if timeout is None else timeout)
            del kept

    def has(self, address: int) -> bool:
        """Does it lie in memory of `allocate`?"""
        return self._arena.first <= address < self._arena.last

    def load(self, code: Code) -> LoadedCode:
        """Make room for the flags of a code. All ranks load the same codes in the same order, as they run them."""
        found = self._codes.get(code.fingerprint)
        if found is not None:
            return found
        if code.ranks != self.size:
            raise CollectiveError(
                f"code {code.name!r} is for {code.ranks} ranks",
                where=f"a group of {self.size}",
                fix="build it for these",
            )
        loaded = LoadedCode.load(code, self.rank, self._flags_used)
        if self._flags_used + loaded.flag_count > self._layout.capacity.flags:
            raise CollectiveError(
                f"the codes of this group need {self._flags_used + loaded.flag_count} flags, and it has "
                f"{self._layout.capacity.flags}",
                where=f"code {code.name!r}",
                fix="make the group with a larger Capacity.flags, or run fewer different codes",
            )
        self._flags_used += loaded.flag_count
        self._codes[code.fingerprint] = loaded
        return loaded

    def plan(
        self, code: Code, elements: int, dtype: DType, reduction: Reduction | None, title: str | None = None
    ) -> Plan:
        """A call that is ready but for its addresses.

        All ranks make their plans in the same order. `title` is for messages.
        """
        if elements < 0:
            raise CollectiveError(f"{elements} elements", where=f"code {code.name!r}", fix="use 0 or more")
        with self._lock:
            if len(self._plans) >= _PLANS_KEPT:
                self._plans.clear()
            loaded = self.load(code)
            slot, part = self._layout.capacity.slot, elements * dtype.itemsize
            inputs, strips = Inputs.STAGED, self._strips_for(loaded, part)
            if self.may_read:
                inputs = loaded.inputs(part, self.cache, self.direct_from, slot, self.cores, strips)
            plan = make_plan(
                loaded,
                elements,
                dtype,
                reduction,
                slot,
                title,
                inputs=inputs,
                cache=self.cache,
                cores=self.cores,
                ring_from=self.ring_from,
                shared_from=self.shared_from,
                strips=strips,
            )
            self._records.prepare(plan, self._usable(), self.machine)
            if title is None:
                self._plans[code.fingerprint, elements, dtype, reduction] = plan
            return plan

    def _strips_for(self, loaded: LoadedCode, part_bytes: int) -> int:
        collective = loaded.code.collective
        exchanged = isinstance(collective, CollectiveSpec) and collective.name is CollectiveName.ALL_TO_ALL
        whole = loaded.widest * part_bytes
        return strips_for(whole, self.threads, exchanged=exchanged, least=self.strip_bytes)

    def _start_with_copy(self, plan: Plan) -> tuple[int, object]:
        record = plan.record
        kept = np.frombuffer(ctypes.string_at(record.source, plan.sizes[INPUT]), dtype=np.uint8)
        staged = record.staged[INPUT] + 2 * record.staged[OUTPUT]
        start = self.machine.start
        return start(self._record, self.address, plan, kept.ctypes.data, record.target or 0, staged), kept

    def _aim(self, plan: Plan, source: int, target: int) -> tuple[int, int, int, object]:
        """The addresses of a call; what is copied through staging, as bits; and what must live as long as the call."""
        loaded, direct = plan.loaded, plan.record.direct == Inputs.DIRECT
        inward = plan.touched[INPUT] and not direct
        outward = plan.touched[OUTPUT] and not self.has(target)
        kept: NDArray[np.uint8] | None = None
        if not source and loaded.used_at_all(INPUT) and plan.sizes[INPUT]:
            raise CollectiveError(f"{plan.text} without an input", where=self._where(), fix="pass the address of one")
        if not target and loaded.used[OUTPUT] and not outward and plan.sizes[OUTPUT]:
            # the code writes an output that nobody asked for
            kept = np.empty(plan.sizes[OUTPUT], dtype=np.uint8)
            target = kept.ctypes.data
        if loaded.in_place:
            inward = outward = (inward and not self.has(source)) or outward
        elif loaded.used_at_all(INPUT) and _overlap(source, target, plan.sizes):
            inward |= loaded.touched_anywhere[INPUT] and not direct
            if direct and (part := loaded.overlaid) is not None and target == source + part * plan.part_bytes:
                pass  # nothing is overwritten before it was read
            elif not inward or (target - source) % max(1, plan.part_bytes):
                # a slot has no room for it, or a tile of the output would overwrite a later one of the input
                kept = np.frombuffer(ctypes.string_at(source, plan.sizes[INPUT]), dtype=np.uint8)
                source = kept.ctypes.data
        return source, target, inward + 2 * outward, kept

    def _wait_for_call(self, segment: Segment, plan: Plan, status: int, timeout: float) -> None:
        """Run on until it is done, and look around in between."""
        deadline = time.monotonic() + timeout
        while status != Status.DONE:
            if status == Status.OTHER_CALL:
                self._check_calls(segment, plan)
                other = int(self._record.waiting_for)
                self._compared[other] = 0
                self._check_history(segment, [other])
                self._fail(segment, self._mismatch_before(segment, other, None))
            self._look_around(segment, self._awaited(plan), plan.text, deadline, timeout, plan)
            status = self.machine.run(self._record, self.address, plan)

    def _awaited(self, plan: Plan) -> tuple[int, ...]:
        """The ranks whose signals the blocks of this rank stand at, in the oldest tile that is under way."""
        found = set[int]()
        for group, strip in zip(self._records.groups, plan.strips, strict=False):
            if not strip.begun or strip.left < strip.begun or strip.entered < strip.stop:
                found |= self._awaited_in(plan, group, strip)
        return tuple(sorted(found - {self.rank}))

    def _awaited_in(self, plan: Plan, group: GroupRecord, strip: CallRecord) -> set[int]:
        if strip.begun == strip.left:
            return {int(group.waiting_for)}
        found = set[int]()
        rows = plan.loaded.code.instructions
        for block in range(strip.block_count):
            at = strip.at[strip.left % SLOTS * strip.block_count + block]
            end = strip.blocks[2 * block + 1]
            if at < end:
                step = Instruction(Op(rows[at][0]), *rows[at][1:].tolist())
                if strip.direct:  # it reads what other processes have, if they live
                    found |= {place.rank for place in pulled_places(plan.loaded.code, self.rank, step)}
                found |= {step.peer} if step.op is Op.WAIT else set()
        return found

    def _check_calls(self, segment: Segment, plan: Plan) -> None:
        """Has a peer made another call where this rank makes this one?"""
        others = [
            rank
            for rank in range(self.size)
            if (call := segment.call_of(rank, self._record.calls)) is not None and call[0] != plan.identity
        ]
        if others:
            self._fail(segment, self._mismatch(segment, plan, others))

    def _mismatch(self, segment: Segment, plan: Plan, others: Sequence[int]) -> RuntimeFailure:
        said = [f"rank {self.rank}: {plan.text} ({plan.loaded.code.name})"]
        for rank in others:
            call = segment.call_of(rank, self._record.calls)
            said.append(f"rank {rank}: {'something else' if call is None else call[1]}")
        return RuntimeFailure(
            f"call {self._record.calls} of the group is not the same on all ranks: {'; '.join(sorted(said))}",
            cause=Cause.MISMATCH,
            ranks=tuple(sorted({self.rank, *others})),
            where=self._where(),
            fix="all ranks make the same collective calls, with the same sizes, types and algorithms, in the same order",
        )

    def _check_history(self, segment: Segment, others: Sequence[int]) -> None:
        """Has a peer made another call before, where neither waited for the other, as in broadcasts of different roots?
        Each call is compared once.
        """
        now = int(self._record.calls)
        for other in others:
            for number in range(max(self._compared[other] + 1, now - CALLS_KEPT + 1), now):
                mine, theirs = segment.call_of(self.rank, number), segment.call_of(other, number)
                if mine is not None and theirs is not None and mine[0] != theirs[0]:
                    self._fail(segment, self._mismatch_before(segment, other, number))
            self._compared[other] = min(now - 1, segment.calls_begun(other))

    def _mismatch_before(self, segment: Segment, other: int, number: int | None) -> RuntimeFailure:
        now = int(self._record.calls)
        if number is None:
            what = f"ranks {self.rank} and {other} made different calls, more than {CALLS_KEPT} calls before this one"
        else:
            calls = [segment.call_of(rank, number) for rank in range(self.size)]
            said = "; ".join(f"rank {rank}: {call[1]}" for rank, call in enumerate(calls) if call is not None)
            what = f"call {number} of the group was not the same on all ranks: {said}"
        return RuntimeFailure(
            f"{what} (found in call {now})",
            cause=Cause.MISMATCH,
            ranks=tuple(sorted({self.rank, other})),
            where=self._where(),
            fix="all ranks make the same collective calls, with the same sizes, types and roots, in the same order",
        )

    # ---- failures ----------------------------------------------------------------------------------------------------

    def _usable(self) -> Segment:
        if os.getpid() != self._pid:
            raise RunError(
                f"process {os.getpid()} uses a group that process {self._pid} made",
                where=self._where(),
                fix="a forked process makes its own group; use the spawn method where it needs none",
            )
        if self._broken is not None:
            raise RuntimeFailure(
                f"the group is broken: {self._broken.what}",
                cause=Cause.BROKEN,
                ranks=self._broken.ranks,
                where=self._where(),
                fix="make a new group",
            )
        segment = self._segment
        if segment is None:
            raise RunError("the group is closed", where=self._where(), fix="make a new group")
        if segment.memory[BROKEN]:
            raise self._declared(segment, "a call")
        return segment

    @contextmanager
    def _unfinished(self, segment: Segment, what: str) -> Iterator[None]:
        """What is interrupted here (by Ctrl-C, by an error in a signal handler) stays half done, and the peers must
        know.
        """
        try:
            yield
        except RuntimeFailure:
            raise
        except BaseException:
            failure = self._failure(Cause.LEFT, (self.rank,), "was interrupted", what)
            segment.declare(failure)
            self._break(failure)
            raise

    def _look_around(
        self,
        segment: Segment,
        awaited: tuple[int, ...],
        what: str,
        deadline: float,
        timeout: float,
        plan: Plan | None,
    ) -> None:
        """Called while nothing moves; raises if it never will."""
        if segment.memory[BROKEN]:
            raise self._declared(segment, what)
        if plan is not None:
            self._check_calls(segment, plan)
            self._check_history(segment, awaited)
        gone = self._liveness.dead(awaited)
        left = tuple(rank for rank in awaited if segment.has_left(rank))
        late = tuple(rank for rank in awaited) if time.monotonic() > deadline else ()
        if (gone or left or late) and self._moves_after_all(plan):
            return  # a peer may have done its part and gone
        if gone:
            self._fail(segment, self._failure(Cause.DIED, gone, "died", what))
        if left:
            self._fail(segment, self._failure(Cause.LEFT, left, "closed the group", what))
        if late:
            if plan is not None:
                behind = tuple(r for r in range(self.size) if segment.calls_begun(r) < self._record.calls)
                late = behind or late
            self._fail(segment, self._failure(Cause.LATE, late, f"did not come within {timeout:g} s", what))

    def _declared(self, segment: Segment, what: str) -> RuntimeFailure:
        """What another rank has found."""
        found = segment.failure()
        assert found is not None
        rank, said = found
        ranks = said["ranks"]
        assert isinstance(ranks, list)
        failure = RuntimeFailure(
            f"{said['what']} (found by rank {rank})",
            cause=Cause(said["cause"]),
            ranks=tuple(ranks),
            where=f"{what}, {self._where()}",
            fix="make a new group without it, or start again",
        )
        return self._break(failure)

    def _moves_after_all(self, plan: Plan | None) -> bool:
        if plan is None:
            return False
        before = _progress(plan)
        status = self.machine.run(self._record, self.address, plan)
        return status == Status.DONE or before != _progress(plan)

    def _failure(self, cause: Cause, ranks: tuple[int, ...], did: str, what: str) -> RuntimeFailure:
        names = ", ".join(map(str, ranks))
        return RuntimeFailure(
            f"rank{'s' if len(ranks) > 1 else ''} {names} {did} in {what}",
            cause=cause,
            ranks=ranks,
            where=self._where(),
            fix="see what those ranks last logged; make a new group without them, or start again",
        )

    def _fail(self, segment: Segment, failure: RuntimeFailure) -> None:
        segment.declare(failure)
        raise self._break(failure)

    def _break(self, failure: RuntimeFailure) -> RuntimeFailure:
        self._broken = failure
        return failure

    def _where(self) -> str:
        return f"rank {self.rank} of a group of {self.size}"

    # ---- memory and end ----------------------------------------------------------------------------------------------

    @property
    def _layout(self) -> Layout:
        return self._usable().layout

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Memory that peers read where it is. It returns to the group when the array and all its views are gone."""
        segment = self._usable()
        address = self._arena.take(nbytes)
        offset = address - segment.address
        try:
            segment.reserve(offset, nbytes)
        except BaseException:
            self._arena.give_back(address)
            raise
        array = np.frombuffer(segment.memory, dtype=np.uint8, count=nbytes, offset=offset)
        weakref.finalize(array, self._arena.give_back, address)
        return array

    def close(self) -> None:
        """Leave the group. Peers that still wait for this rank raise; arrays of `allocate` stay valid."""
        segment = self._segment
        if segment is None or os.getpid() != self._pid:
            return
        with self._lock:
            self._segment, self.address = None, 0
            segment.leave()
            self._liveness.close()
            self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _progress(plan: Plan) -> list[tuple[int, int, list[int]]]:
    """By strip."""
    return [(strip.begun, strip.left, strip.at[: SLOTS * strip.block_count]) for strip in plan.strips]


def _overlap(source: int, target: int, sizes: tuple[int, int]) -> bool:
    return bool(source and target and source < target + sizes[OUTPUT] and target < source + sizes[INPUT])
