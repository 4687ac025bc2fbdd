"""A schedule as MSCCL XML, the input of microsoft/msccl and Azure/msccl-executor-nccl.

    <algo name proto nchannels nchunksperloop ngpus coll inplace outofplace minBytes maxBytes>
      <gpu id i_chunks o_chunks s_chunks>
        <tb id send recv chan>
          <step s type srcbuf srcoff dstbuf dstoff cnt depid deps hasdep/>

| attribute | is |
|---|---|
| type | cpy, re, s, r, rcs, rrc, rrs, rrcs: the opcodes of `ir/schedule.py` in their order there; nop waits and does nothing |
| srcbuf, dstbuf | i, o, s: input, output, the joint scratch |
| depid, deps | wait for that step of that block of the same rank; -1 for none. A step has one: further ones are nops right before it |
| hasdep | 1 where another block waits for this step |
| nchunksperloop | the chunks that the executor cuts the user's count into |
| maxBytes | 0 for no limit |

`slots`, `root` and `condition` are ours: executors look attributes up by name and do not see them; the import reads
them.

What the executors do that the format does not say, from their parsers and interpreters:

- rrc and rrcs add the message to what lies at *src* and store at *dst*: both are written as the target.
- `s` counts nops; the interpreter's step counter does so too, if the step after a nop has a dependency of its own. It
  has.
- consecutive `re` steps onto one target from one buffer are joined: all sources are read before the target is written,
  and the
  last step's `cnt` is taken for all. Where that would change the result, `hasdep` on the earlier step keeps them apart.
- a message of several chunks travels in several slots where they do not fit one, in the worst case one a chunk. So the
  deadlock
  check is made once more on the schedule cut like that (`cut_messages`), with the slots that the protocol has: 2 with Simple, 8 with
  LL and LL128. A ring that passes on three chunks at a time hangs with Simple once the data is large; `max_bytes` keeps it small.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from xml.etree import ElementTree

from sennit.collective.normal_form import SCRATCH, normal_form
from sennit.collective.protocol import Protocol
from sennit.collective.step_graph import StepGraph, order_steps
from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveName, CollectiveSpec, CustomCollective
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule, Wait

__all__ = ["MscclLimits", "XmlOptions", "cut_messages", "joined_by_executor", "msccl_xml"]


@dataclass(frozen=True, slots=True)
class MscclLimits:
    """What the executor's arrays hold. `steps` is 256 in microsoft/msccl; builds of msccl-executor-nccl with 64 exist.
    A block that others wait for is named by a signed byte; offsets are signed 16-bit numbers."""

    steps: int = 256
    blocks_per_channel: int = 32
    channels: int = 32
    count: int = 71  # both executors refuse 72, their MSCCL_MAX_COUNT
    awaited_block: int = 127
    offset: int = 32767
    name: int = 63


@dataclass(frozen=True, slots=True)
class XmlOptions:
    protocol: Protocol = Protocol.SIMPLE
    min_bytes: int = 0
    max_bytes: int = 0
    limits: MscclLimits = MscclLimits()

    def __post_init__(self) -> None:
        if self.min_bytes < 0 or self.max_bytes < 0 or 0 < self.max_bytes < self.min_bytes:
            raise CollectiveError(
                f"a schedule for {self.min_bytes} to {self.max_bytes} bytes",
                fix="give 0 <= min <= max, or max 0 for no limit",
            )


def msccl_xml(schedule: Schedule, options: XmlOptions | None = None) -> str:
    """The XML text. Raises CollectiveError where the executor could not load it or would run it otherwise."""
    options = options or XmlOptions()
    schedule = normal_form(schedule)
    _check_limits(schedule, options)
    spec = schedule.collective
    root = ElementTree.Element(
        "algo",
        name=schedule.name,
        proto=options.protocol.value,
        nchannels=str(1 + max((block.channel for rank in schedule.ranks for block in rank.blocks), default=0)),
        nchunksperloop=str(_chunks_per_loop(spec)),
        ngpus=str(spec.ranks),
        coll=_collective(spec),
        inplace=str(int(spec.in_place)),
        outofplace=str(int(not spec.in_place)),
        minBytes=str(options.min_bytes),
        maxBytes=str(options.max_bytes),
        slots=str(schedule.slots),
    )
    if isinstance(spec, CollectiveSpec):
        if spec.root is not None:
            root.set("root", str(spec.root))
        if _collective(spec) == "custom":
            root.set("condition", spec.name.value)
    for rank in schedule.ranks:
        _rank(root, rank, schedule, options.limits)
    _check_slots(schedule, options)
    ElementTree.indent(root, space="  ")
    text: str = ElementTree.tostring(root, encoding="unicode")
    return text + "\n"


def _check_slots(schedule: Schedule, options: XmlOptions) -> None:
    """That it ends also where the executor sends a message in several slots."""
    transport, most = options.protocol.transport, 1
    if options.max_bytes:
        most = max(1, transport.slot_bytes // -(-options.max_bytes // _chunks_per_loop(schedule.collective)))
    cut = replace(cut_messages(schedule, most), slots=transport.slots)
    try:
        order_steps(StepGraph.of(cut))
    except CollectiveError as error:
        raise CollectiveError(
            f"with large data the executor sends {most} of a message's chunks a slot, and with the {cut.slots} slots of "
            f"protocol {options.protocol.value} that deadlocks",
            where=(error.where or "").split("\n")[0],
            fix="move one chunk at a time, use LL or LL128, which have 8 slots, or state max_bytes so that a message fits a slot",
        ) from None


def cut_messages(schedule: Schedule, most: int) -> Schedule:
    """The same schedule with every instruction cut into some of at most this many chunks.

    A wait is for the last part of what it names; the first part waits.
    """
    return replace(schedule, ranks=tuple(_cut_rank(rank, most) for rank in schedule.ranks))


def _cut_rank(rank: RankSchedule, most: int) -> RankSchedule:
    last: list[list[int]] = []  # by block and step, the number of its last part
    for block in rank.blocks:
        ends, total = [], 0
        for instruction in block.instructions:
            total += -(-_count(instruction) // most)
            ends.append(total - 1)
        last.append(ends)
    blocks = [
        replace(
            block,
            instructions=tuple(
                Instruction(
                    instruction.opcode,
                    _part(instruction.source, part, most),
                    _part(instruction.target, part, most),
                    tuple(Wait(wait.block, last[wait.block][wait.step]) for wait in instruction.after)
                    if not part
                    else (),
                    tuple(
                        Place(place.buffer, place.start + part, min(most, place.count - part))
                        for place in instruction.further
                    ),
                )
                for instruction in block.instructions
                for part in range(0, _count(instruction), most)
            ),
        )
        for block in rank.blocks
    ]
    return replace(rank, blocks=tuple(blocks))


def _part(place: Place | None, part: int, most: int) -> Place | None:
    return None if place is None else Place(place.buffer, place.start + part, min(most, place.count - part))


def _count(instruction: Instruction) -> int:
    place = instruction.source or instruction.target
    assert place is not None
    return place.count


# ---- the header ------------------------------------------------------------------------------------------------------


def _collective(spec: CollectiveSpec | CustomCollective) -> str:
    """`custom` is known to microsoft/msccl alone."""
    if isinstance(spec, CustomCollective) or spec.name is CollectiveName.ALL_TO_NEXT:
        return "custom"
    name: str = spec.name.value
    return name.replace("_", "")


def _chunks_per_loop(spec: CollectiveSpec | CustomCollective) -> int:
    """Executors cut `count` elements into this many chunks, after multiplying it by the ranks for all but the rooted
    ones.
    """
    if isinstance(spec, CollectiveSpec) and spec.name in (CollectiveName.GATHER, CollectiveName.SCATTER):
        return spec.chunks
    return max(max(spec.input_chunks(rank), spec.output_chunks(rank)) for rank in range(spec.ranks))


def _check_limits(schedule: Schedule, options: XmlOptions) -> None:
    limits, slots = options.limits, options.protocol.transport.slots
    where = f"schedule {schedule.name!r}"
    if len(schedule.name) > limits.name:
        raise CollectiveError(
            f"the name has {len(schedule.name)} characters, the executor keeps {limits.name}",
            where=where,
            fix="shorten it",
        )
    if schedule.slots > slots:
        raise CollectiveError(
            f"it needs {schedule.slots} slots a connection, protocol {options.protocol.value} has {slots}: it would deadlock",
            where=where,
            fix="use LL or LL128, which have 8, or compile it for fewer slots",
        )
    for rank in schedule.ranks:
        senders: dict[int, int] = {}
        receivers: dict[int, int] = {}
        for number, block in enumerate(rank.blocks):
            place = f"{where}, rank {rank.rank}, block {number}"
            if block.channel >= limits.channels:
                raise CollectiveError(
                    f"channel {block.channel} is beyond the executor's {limits.channels} channels",
                    where=place,
                    fix="compile with fewer channels or instances",
                )
            senders[block.channel] = senders.get(block.channel, 0) + (block.send is not None)
            receivers[block.channel] = receivers.get(block.channel, 0) + (block.receive is not None)
        for way, counts in (("send", senders), ("receive", receivers)):
            for channel, count in counts.items():
                if count > limits.blocks_per_channel:
                    raise CollectiveError(
                        f"{count} thread blocks {way} on channel {channel}, the executor holds {limits.blocks_per_channel}",
                        where=f"{where}, rank {rank.rank}",
                        fix="spread the peers over more channels, or use fewer peers at once",
                    )


# ---- ranks, blocks, steps --------------------------------------------------------------------------------------------


def _rank(root: ElementTree.Element, rank: RankSchedule, schedule: Schedule, limits: MscclLimits) -> None:
    spec = schedule.collective
    gpu = ElementTree.SubElement(
        root,
        "gpu",
        id=str(rank.rank),
        i_chunks=str(spec.input_chunks(rank.rank)),
        o_chunks=str(spec.output_chunks(rank.rank)),
        s_chunks=str(sum(scratch.chunks for scratch in rank.scratch)),
    )
    awaited = {wait for block in rank.blocks for instruction in block.instructions for wait in instruction.after}
    numbers = [_numbers(block) for block in rank.blocks]
    for number, block in enumerate(rank.blocks):
        where = f"schedule {schedule.name!r}, rank {rank.rank}, block {number}"
        element = ElementTree.SubElement(
            gpu, "tb", id=str(number), send=_peer(block.send), recv=_peer(block.receive), chan=str(block.channel)
        )
        total = numbers[number][-1] + 1 if numbers[number] else 0
        if total > limits.steps:
            raise CollectiveError(
                f"{total} steps, of which {total - len(block.instructions)} are for further waits; the executor holds {limits.steps}",
                where=where,
                fix="use fewer chunks, or more channels or instances so that each block does less",
            )
        for step, instruction in enumerate(block.instructions):
            _check_step(instruction, limits, f"{where}, step {step}")
            *extra, own = [(wait.block, numbers[wait.block][wait.step]) for wait in instruction.after] or [(-1, -1)]
            for place, (other, other_step) in enumerate(extra):
                _nop(element, numbers[number][step] - len(extra) + place, other, other_step)
            kept_apart = step + 1 < len(block.instructions) and joined_by_executor(
                instruction, block.instructions[step + 1]
            )
            _step(element, numbers[number][step], instruction, own, Wait(number, step) in awaited or kept_apart)


def _numbers(block: Block) -> list[int]:
    """The number of each instruction in the file: every wait but one takes a nop before it."""
    numbers, total = [], 0
    for instruction in block.instructions:
        total += max(1, len(instruction.after))
        numbers.append(total - 1)
    return numbers


def joined_by_executor(first: Instruction, second: Instruction) -> bool:
    """Whether the executor, left alone, would join two consecutive reductions and so change what they do."""
    if first.opcode is not Opcode.REDUCE or second.opcode is not Opcode.REDUCE or second.after:
        return False
    a, b, target = first.source, second.source, first.target
    assert a is not None
    assert b is not None
    assert target is not None
    assert second.target is not None
    if (second.target.buffer, second.target.start, b.buffer) != (target.buffer, target.start, a.buffer):
        return False
    overlaps = b.buffer == target.buffer and b.start < target.start + target.count and target.start < b.start + b.count
    return second.target.count != target.count or overlaps


def _check_step(instruction: Instruction, limits: MscclLimits, where: str) -> None:
    for place in (instruction.source, instruction.target):
        if place is not None and place.count > limits.count:
            raise CollectiveError(
                f"{instruction.opcode.value} of {place.count} chunks, the executor holds {limits.count} at most",
                where=where,
                fix="use fewer chunks, or move them in smaller ranges",
            )
        if place is not None and place.start > limits.offset:
            raise CollectiveError(
                f"chunk {place.start} of {place.buffer}, the executor's offsets end at {limits.offset}",
                where=where,
                fix="use fewer chunks or scratch",
            )
    for wait in instruction.after:
        if wait.block > limits.awaited_block:
            raise CollectiveError(
                f"it waits for block {wait.block}, the executor can name blocks 0 to {limits.awaited_block}",
                where=where,
                fix="use fewer thread blocks",
            )


def _peer(rank: int | None) -> str:
    return "-1" if rank is None else str(rank)


def _nop(parent: ElementTree.Element, number: int, block: int, step: int) -> None:
    _element(parent, number, "nop", ("i", -1), ("o", -1), 0, (block, step), has_dependents=False)


def _step(
    parent: ElementTree.Element, number: int, instruction: Instruction, wait: tuple[int, int], has_dependents: bool
) -> None:
    # an operand that the opcode does not have is written as the other one: the executor checks the bounds of some
    source, target = instruction.source or instruction.target, instruction.target or instruction.source
    assert source is not None
    assert target is not None
    _element(
        parent,
        number,
        _type(instruction.opcode),
        _buffer(source),
        _buffer(target),
        target.count,
        wait,
        has_dependents=has_dependents,
    )


def _element(
    parent: ElementTree.Element,
    number: int,
    kind: str,
    source: tuple[str, int],
    target: tuple[str, int],
    count: int,
    wait: tuple[int, int],
    *,
    has_dependents: bool,
) -> None:
    ElementTree.SubElement(
        parent,
        "step",
        s=str(number),
        type=kind,
        srcbuf=source[0],
        srcoff=str(source[1]),
        dstbuf=target[0],
        dstoff=str(target[1]),
        cnt=str(count),
        depid=str(wait[0]),
        deps=str(wait[1]),
        hasdep=str(int(has_dependents)),
    )


def _buffer(place: Place) -> tuple[str, int]:
    return {"input": "i", "output": "o", SCRATCH: "s"}[place.buffer], place.start


def _type(opcode: Opcode) -> str:
    match opcode:
        case Opcode.COPY:
            return "cpy"
        case Opcode.REDUCE:
            return "re"
        case Opcode.SEND:
            return "s"
        case Opcode.RECEIVE:
            return "r"
        case Opcode.RECEIVE_COPY_SEND:
            return "rcs"
        case Opcode.RECEIVE_REDUCE:
            return "rrc"
        case Opcode.RECEIVE_REDUCE_SEND:
            return "rrs"
        case Opcode.RECEIVE_REDUCE_COPY_SEND:
            return "rrcs"
