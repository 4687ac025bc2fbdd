"""MSCCL XML as a schedule, checked on reading. The format is described in `export_xml.py`.

Files come from anywhere, so nothing is believed:

1. the text is XML, and every attribute that the executor reads is there and of its kind;
2. ranks, blocks and steps are numbered 0, 1, 2, ... without gaps; peers exist; a connection (sender, receiver, channel)
   has one
   block at each end; buffers hold what the steps name; waits name steps that exist and that tell their end (`hasdep`);
3. on each connection the messages sent are those received, in number and in chunks;
4. what the executor would do otherwise than the file says is refused (`re` steps that it joins, a wait that it loses);
5. `verify_schedule`: right result, no race, no deadlock, in each way (in place, out of place) that the file says it
   serves.

A step that fails is named by rank, block and step. `rrc` and `rrcs` with different operands, which the executor runs as
dst = src + message, become a copy and a receive_reduce. Files of msccl-tools have no `outofplace`, `minBytes` and
`maxBytes`, which microsoft/msccl does not need: out of place is then what in place is not. Without `slots` a file is
verified with the slots of its protocol.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from xml.etree import ElementTree

from sennit.collective.export_xml import joined_by_executor
from sennit.collective.normal_form import SCRATCH
from sennit.collective.protocol import Protocol
from sennit.collective.verify import verify_schedule
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName, CollectiveSpec, CustomCollective, Scratch
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule, Wait

__all__ = ["read_msccl_xml"]

Spec = CollectiveSpec | CustomCollective


def read_msccl_xml(
    text: str, *, collective: Spec | None = None, root: int | None = None, verify: bool = True
) -> Schedule:
    """The schedule of an MSCCL file.

    `collective` says what a file of a custom collective is to do; `root` is the root of one that has one and does not
    name it.
    """
    algo = _parse(text)
    spec = collective or _spec(algo, root)
    where = f"algo {algo.get('name', '')!r}"
    if _integer(algo, "ngpus", where) != spec.ranks:
        raise CollectiveError(f"it is for {algo.get('ngpus')} ranks, the collective for {spec.ranks}", where=where)
    protocol = Protocol.named(_string(algo, "proto", where))
    gpus = _numbered(algo, "gpu", where)
    if len(gpus) != spec.ranks:
        raise CollectiveError(f"ngpus is {spec.ranks}, but {len(gpus)} gpu elements follow", where=where)
    ranks = tuple(_Rank(number, gpu, spec, where).read() for number, gpu in enumerate(gpus))
    slots = _integer(algo, "slots", where) if "slots" in algo.attrib else protocol.transport.slots
    if slots < 1:
        raise CollectiveError(f"slots is {slots}", where=where, fix="a connection has at least 1")
    schedule = Schedule(_string(algo, "name", where), spec, slots, ranks)
    _check_connections(schedule, where)
    if verify:
        _verify(schedule, algo, where)
    return schedule


def _verify(schedule: Schedule, algo: ElementTree.Element, where: str) -> None:
    verify_schedule(schedule)
    spec = schedule.collective
    if isinstance(spec, CollectiveSpec) and spec.in_place and _flag(algo, "outofplace", False, where):
        try:
            verify_schedule(replace(schedule, collective=replace(spec, in_place=False)))
        except CollectiveError as error:
            raise CollectiveError(
                f"it says that it serves out of place too, and does not: {error.what}",
                where=error.where or where,
                fix='set outofplace="0"',
            ) from None


# ---- the header ------------------------------------------------------------------------------------------------------


def _parse(text: str) -> ElementTree.Element:
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise CollectiveError("the file declares a document type", fix="an MSCCL file is one plain <algo> element")
    try:
        algo = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        line, column = error.position
        raise CollectiveError(f"not XML: {error}", where=f"line {line}, column {column}") from None
    if algo.tag != "algo":
        raise CollectiveError(f"the file holds <{algo.tag}>", fix="an MSCCL file is one <algo> element")
    return algo


def _spec(algo: ElementTree.Element, root: int | None) -> CollectiveSpec:
    where = f"algo {algo.get('name', '')!r}"
    ranks, chunks = _integer(algo, "ngpus", where), _integer(algo, "nchunksperloop", where)
    if ranks < 1 or chunks < 1:
        raise CollectiveError(f"ngpus is {ranks}, nchunksperloop {chunks}", where=where, fix="both are at least 1")
    name = _name(algo, where)
    per_rank = (CollectiveName.ALL_GATHER, CollectiveName.REDUCE_SCATTER, CollectiveName.ALL_TO_ALL)
    if name in per_rank:
        if chunks % ranks:
            raise CollectiveError(
                f"nchunksperloop is {chunks}, no multiple of {ranks} ranks, as {name.value} needs", where=where
            )
        chunks //= ranks
    rooted = name in (CollectiveName.BROADCAST, CollectiveName.REDUCE, CollectiveName.GATHER, CollectiveName.SCATTER)
    if rooted and "root" in algo.attrib:
        root = _integer(algo, "root", where)
    in_place = _flag(algo, "inplace", False, where)
    if not in_place and not _flag(algo, "outofplace", True, where):
        raise CollectiveError("it serves neither in place nor out of place", where=where)
    return CollectiveSpec(name, ranks, chunks, (root or 0) if rooted else None, in_place)


def _name(algo: ElementTree.Element, where: str) -> CollectiveName:
    wanted = _string(algo, "coll", where).replace("_", "")
    if wanted == "custom":
        wanted = algo.get("condition", "custom").replace("_", "")
    for name in CollectiveName:
        if name.value.replace("_", "") == wanted:
            return name
    known = ", ".join(name.value.replace("_", "") for name in CollectiveName)
    raise CollectiveError(
        f"collective {wanted!r} does not say what the result must be"
        if wanted == "custom"
        else f"unknown collective {wanted!r}",
        where=where,
        fix="give the condition as collective=..." if wanted == "custom" else f"use one of {known}",
    )


# ---- attributes ------------------------------------------------------------------------------------------------------


def _string(element: ElementTree.Element, name: str, where: str) -> str:
    value = element.get(name)
    if value is None:
        raise CollectiveError(f"<{element.tag}> has no {name!r}", where=where, fix="the executor reads it")
    return value


def _integer(element: ElementTree.Element, name: str, where: str) -> int:
    text = _string(element, name, where)
    try:
        return int(text)
    except ValueError:
        raise CollectiveError(f"{name} is {text!r}, no integer", where=where) from None


def _flag(element: ElementTree.Element, name: str, missing: bool, where: str) -> bool:
    if name not in element.attrib:
        return missing
    value = _integer(element, name, where)
    if value not in (0, 1):
        raise CollectiveError(f"{name} is {value}", where=where, fix="use 0 or 1")
    return bool(value)


def _numbered(parent: ElementTree.Element, tag: str, where: str) -> list[ElementTree.Element]:
    """The children with this tag, by their ids, which are 0, 1, 2, ... in any order."""
    found: dict[int, ElementTree.Element] = {}
    for child in parent.findall(tag):
        number = _integer(child, "id", where)
        if number in found:
            raise CollectiveError(f"two <{tag}> elements have id {number}", where=where)
        found[number] = child
    for number in range(len(found)):
        if number not in found:
            raise CollectiveError(f"<{tag}> {number} is missing; there are {len(found)} in all", where=where)
    return [found[number] for number in range(len(found))]


# ---- ranks, blocks, steps --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """A step as the file has it. `waits` counts steps of the file."""

    number: int
    kind: str
    source: Place
    target: Place
    waits: tuple[tuple[int, int], ...]
    tells: bool


@dataclass(frozen=True, slots=True)
class _Rank:
    number: int
    element: ElementTree.Element
    spec: Spec
    algo: str

    @property
    def where(self) -> str:
        return f"{self.algo}, rank {self.number}"

    def read(self) -> RankSchedule:
        scratch = _integer(self.element, "s_chunks", self.where)
        for name, most in (
            ("i_chunks", self.spec.input_chunks(self.number)),
            ("o_chunks", self.spec.output_chunks(self.number)),
        ):
            size = _integer(self.element, name, self.where)
            if not 0 <= size <= most:
                raise CollectiveError(f"{name} is {size}, the collective has {most} chunks there", where=self.where)
        if scratch < 0:
            raise CollectiveError(f"s_chunks is {scratch}", where=self.where)
        blocks = _numbered(self.element, "tb", self.where)
        steps = [self._steps(number, block, scratch) for number, block in enumerate(blocks)]
        last = [_last_parts(block) for block in steps]
        for number, block in enumerate(steps):
            self._check_waits(number, block, steps)
            self._check_joined(number, block)
        return RankSchedule(
            self.number,
            tuple(self._block(number, block, steps[number], last) for number, block in enumerate(blocks)),
            (Scratch(self.number, SCRATCH, scratch),) if scratch else (),
        )

    def _block(
        self, number: int, element: ElementTree.Element, steps: list[_Step], last: list[dict[int, int]]
    ) -> Block:
        where = f"{self.where}, block {number}"
        peers: list[int | None] = []
        for name in ("send", "recv"):
            peer = _integer(element, name, where)
            if peer == self.number or not -1 <= peer < self.spec.ranks:
                raise CollectiveError(
                    f"{name} is {peer}",
                    where=where,
                    fix=f"use another rank of 0 to {self.spec.ranks - 1}, or -1 for none",
                )
            peers.append(None if peer < 0 else peer)
        channel = _integer(element, "chan", where)
        if channel < 0:
            raise CollectiveError(f"chan is {channel}", where=where)
        instructions = tuple(
            replace(instruction, after=waits)
            for step in steps
            for instruction, waits in _instructions(step, tuple(Wait(b, last[b][s]) for b, s in step.waits))
        )
        for step in steps:
            opcode = _opcode(step.kind)
            if (opcode.sends and peers[0] is None) or (opcode.receives and peers[1] is None):
                raise CollectiveError(
                    f"{step.kind!r} in a block that has no peer to {'send to' if opcode.sends and peers[0] is None else 'receive from'}",
                    where=f"{where}, step {step.number}",
                )
        return Block(peers[0], peers[1], channel, instructions)

    def _steps(self, block: int, element: ElementTree.Element, scratch: int) -> list[_Step]:
        where = f"{self.where}, block {block}"
        steps: list[_Step] = []
        pending: list[tuple[int, int]] = []  # of the nops before a step
        total = 0
        for total, item in enumerate(element.findall("step"), 1):
            place = f"{where}, step {total - 1}"
            if (number := _integer(item, "s", place)) != total - 1:
                raise CollectiveError(f"s is {number}", where=place, fix="number the steps 0, 1, 2, ... in order")
            wait = (_integer(item, "depid", place), _integer(item, "deps", place))
            kind, tells = _string(item, "type", place), _flag(item, "hasdep", False, place)
            if kind == "nop":
                if wait[0] >= 0:
                    pending.append(wait)
                continue
            if pending and wait[0] < 0:
                raise CollectiveError(
                    "a nop's wait precedes a step without one, which the executor refuses",
                    where=place,
                    fix="move one of the waits to the step itself",
                )
            waits = (*pending, *([wait] if wait[0] >= 0 else ()))
            steps.append(_Step(number, kind, *self._places(item, kind, scratch, place), waits, tells))
            pending = []
        if pending:
            raise CollectiveError(
                "the block ends with a nop, whose wait the executor loses", where=f"{where}, step {total - 1}"
            )
        return steps

    def _places(self, item: ElementTree.Element, kind: str, scratch: int, where: str) -> tuple[Place, Place]:
        opcode = _opcode_at(kind, where)
        count = _integer(item, "cnt", where)
        if count < 1:
            raise CollectiveError(f"cnt is {count}", where=where, fix="a step moves at least 1 chunk")
        sizes = {
            "i": ("input", self.spec.input_chunks(self.number)),
            "o": ("output", self.spec.output_chunks(self.number)),
            "s": (SCRATCH, scratch),
        }
        places: dict[str, Place] = {}
        for side, used in (("src", _reads_source(opcode)), ("dst", _writes_target(opcode))):
            name = _string(item, f"{side}buf", where)
            if name not in sizes:
                raise CollectiveError(f"{side}buf is {name!r}", where=where, fix="use i, o or s")
            buffer, size = sizes[name]
            start = _integer(item, f"{side}off", where)
            if used and not 0 <= start <= size - count:
                raise CollectiveError(
                    f"{kind!r} names {buffer}[{start}:{start + count}], which has {size} chunks", where=where
                )
            places[side] = Place(buffer, start, count)
        return places["src"], places["dst"]

    def _check_waits(self, number: int, steps: list[_Step], blocks: list[list[_Step]]) -> None:
        for step in steps:
            where = f"{self.where}, block {number}, step {step.number}"
            for block, other in step.waits:
                found = None
                if block < len(blocks):
                    found = next((item for item in blocks[block] if item.number == other), None)
                if found is None:
                    raise CollectiveError(
                        f"it waits for block {block}, step {other}, which does not exist", where=where
                    )
                if not found.tells:
                    raise CollectiveError(
                        f"it waits for block {block}, step {other}, whose hasdep is 0: it would wait forever",
                        where=where,
                    )

    def _check_joined(self, number: int, steps: list[_Step]) -> None:
        for first, second in itertools.pairwise(steps):
            if first.kind == second.kind == "re" and not first.tells and not second.waits:
                pair = [Instruction(Opcode.REDUCE, step.source, step.target) for step in (first, second)]
                if joined_by_executor(*pair):
                    raise CollectiveError(
                        "the executor joins this reduction with the one before it, and so computes something else",
                        where=f"{self.where}, block {number}, step {second.number}",
                        fix='set hasdep="1" on the earlier one',
                    )


def _opcode(kind: str) -> Opcode:
    return {
        "cpy": Opcode.COPY,
        "re": Opcode.REDUCE,
        "s": Opcode.SEND,
        "r": Opcode.RECEIVE,
        "rcs": Opcode.RECEIVE_COPY_SEND,
        "rrc": Opcode.RECEIVE_REDUCE,
        "rrs": Opcode.RECEIVE_REDUCE_SEND,
        "rrcs": Opcode.RECEIVE_REDUCE_COPY_SEND,
    }[kind]


def _opcode_at(kind: str, where: str) -> Opcode:
    try:
        return _opcode(kind)
    except KeyError:
        raise CollectiveError(
            f"unknown type {kind!r}", where=where, fix="use cpy, re, s, r, rcs, rrc, rrs, rrcs or nop"
        ) from None


def _reads_source(opcode: Opcode) -> bool:
    return opcode not in (Opcode.RECEIVE, Opcode.RECEIVE_COPY_SEND)


def _writes_target(opcode: Opcode) -> bool:
    return opcode not in (Opcode.SEND, Opcode.RECEIVE_REDUCE_SEND)


def _adds_elsewhere(step: _Step) -> bool:
    return step.kind in ("rrc", "rrcs") and step.source != step.target


def _last_parts(steps: list[_Step]) -> dict[int, int]:
    """By number in the file, the instruction that a wait for it means."""
    last: dict[int, int] = {}
    total = 0
    for step in steps:
        total += 2 if _adds_elsewhere(step) else 1
        last[step.number] = total - 1
    return last


def _instructions(step: _Step, waits: tuple[Wait, ...]) -> Iterator[tuple[Instruction, tuple[Wait, ...]]]:
    opcode = _opcode(step.kind)
    if opcode in (Opcode.RECEIVE_REDUCE, Opcode.RECEIVE_REDUCE_COPY_SEND):
        if _adds_elsewhere(step):
            yield Instruction(Opcode.COPY, step.source, step.target), waits
            waits = ()
        yield Instruction(opcode, None, step.target), waits
        return
    source = step.source if _reads_source(opcode) else None
    yield Instruction(opcode, source, step.target if _writes_target(opcode) else None), waits


# ---- connections -----------------------------------------------------------------------------------------------------


def _check_connections(schedule: Schedule, where: str) -> None:
    sent: dict[tuple[int, int, int], tuple[int, list[tuple[int, int]]]] = {}
    received: dict[tuple[int, int, int], tuple[int, list[tuple[int, int]]]] = {}
    for rank in schedule.ranks:
        for number, block in enumerate(rank.blocks):
            for messages, peer, sends in ((sent, block.send, True), (received, block.receive, False)):
                found = [
                    (step, (item.source or item.target).count)  # type: ignore[union-attr]
                    for step, item in enumerate(block.instructions)
                    if (item.opcode.sends if sends else item.opcode.receives)
                ]
                if peer is None or not found:
                    continue
                key = (rank.rank, peer, block.channel) if sends else (peer, rank.rank, block.channel)
                if key in messages:
                    raise CollectiveError(
                        f"blocks {messages[key][0]} and {number} both {'send to' if sends else 'receive from'} rank {peer} on channel {block.channel}",
                        where=f"{where}, rank {rank.rank}",
                        fix="give them different channels",
                    )
                messages[key] = (number, found)
    for key in sorted(sent.keys() | received.keys()):
        _check_messages(key, sent.get(key, (None, [])), received.get(key, (None, [])), where)


def _check_messages(
    key: tuple[int, int, int],
    sent: tuple[int | None, list[tuple[int, int]]],
    received: tuple[int | None, list[tuple[int, int]]],
    where: str,
) -> None:
    sender, receiver, channel = key
    if len(sent[1]) != len(received[1]):
        raise CollectiveError(
            f"rank {sender} sends {len(sent[1])} messages to rank {receiver} on channel {channel}, which receives {len(received[1])}",
            where=f"{where}, rank {sender}, block {sent[0]}; rank {receiver}, block {received[0]}",
        )
    for number, ((step, count), (other_step, other_count)) in enumerate(zip(sent[1], received[1], strict=True)):
        if count != other_count:
            raise CollectiveError(
                f"message {number} of channel {channel} has {count} chunks at rank {sender} and {other_count} at rank {receiver}",
                where=f"{where}, rank {sender}, block {sent[0]}, step {step}; "
                f"rank {receiver}, block {received[0]}, step {other_step}",
            )
