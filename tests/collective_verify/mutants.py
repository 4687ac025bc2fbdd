"""Small faults put into a schedule: each one must be refused by the verifier, or change nothing that can be seen.

| kind | fault |
|---|---|
| drop wait | one wait of one step is gone |
| swap steps | two neighbouring steps of a block change places |
| shift place | a place begins one chunk earlier or later |
| other buffer | a place lies in another buffer |
| wrong peer | a block sends to, or receives from, another rank |
| wrong channel | a block is on another channel |
| fewer slots | one slot less |
| drop step | one step is gone |
| other opcode | a step does something else with the same operands |
| drop operand | a reduce of several sources lacks one |
| repeat operand | a reduce has one of its sources twice |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule

__all__ = ["KINDS", "mutate"]

LIKE = (  # opcodes with the same operands
    (Opcode.COPY, Opcode.REDUCE),
    (Opcode.SEND, Opcode.RECEIVE_REDUCE_SEND),
    (Opcode.RECEIVE, Opcode.RECEIVE_COPY_SEND, Opcode.RECEIVE_REDUCE, Opcode.RECEIVE_REDUCE_COPY_SEND),
)


def mutate(schedule: Schedule, kind: str, draw: random.Random) -> Schedule | None:
    """A schedule with one fault of this kind, or None where there is no place for it."""
    if kind == "fewer slots":
        return replace(schedule, slots=schedule.slots - 1) if schedule.slots > 1 else None
    sites = [
        (rank, block, step)
        for rank, ranked in enumerate(schedule.ranks)
        for block, held in enumerate(ranked.blocks)
        for step in range(len(held.instructions))
    ]
    draw.shuffle(sites)
    for rank, index, step in sites:
        ranked = schedule.ranks[rank]
        changed = STEP_FAULTS[kind](ranked, index, step, draw)
        if changed is not None and changed != ranked.blocks[index]:
            blocks = (*ranked.blocks[:index], changed, *ranked.blocks[index + 1 :])
            ranks = (*schedule.ranks[:rank], replace(ranked, blocks=blocks), *schedule.ranks[rank + 1 :])
            return replace(schedule, ranks=ranks)
    return None


def _with(block: Block, step: int, *instructions: Instruction) -> Block:
    held = block.instructions
    return replace(block, instructions=(*held[:step], *instructions, *held[step + 1 :]))


def _drop_wait(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block = ranked.blocks[index]
    after = block.instructions[step].after
    if not after:
        return None
    gone = draw.choice(after)
    return _with(block, step, replace(block.instructions[step], after=tuple(wait for wait in after if wait != gone)))


def _swap_steps(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block = ranked.blocks[index]
    if step + 1 == len(block.instructions):
        return None
    first, second = block.instructions[step : step + 2]
    held = block.instructions
    return replace(block, instructions=(*held[:step], second, first, *held[step + 2 :]))


def _change_place(
    ranked: RankSchedule, index: int, step: int, draw: random.Random, change: Callable[[Place], Place]
) -> Block:
    block = ranked.blocks[index]
    instruction = block.instructions[step]
    source, target = instruction.source, instruction.target
    if source is not None and (target is None or draw.random() < 0.5):
        return _with(block, step, replace(instruction, source=change(source)))
    assert target is not None
    return _with(block, step, replace(instruction, target=change(target)))


def _shift_place(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    shift = draw.choice([-1, 1])
    return _change_place(ranked, index, step, draw, lambda place: replace(place, start=place.start + shift))


def _other_buffer(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    names = ["input", "output", *(piece.name for piece in ranked.scratch)]
    return _change_place(ranked, index, step, draw, lambda place: replace(place, buffer=draw.choice(names)))


def _wrong_peer(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block, shift = ranked.blocks[index], draw.choice([-1, 1])
    if block.send is not None and (block.receive is None or draw.random() < 0.5):
        return replace(block, send=block.send + shift)
    return None if block.receive is None else replace(block, receive=block.receive + shift)


def _wrong_channel(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block = ranked.blocks[index]
    return None if block.send is block.receive is None else replace(block, channel=block.channel + 1)


def _drop_step(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    return _with(ranked.blocks[index], step)


def _other_opcode(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block = ranked.blocks[index]
    instruction = block.instructions[step]
    group = next(group for group in LIKE if instruction.opcode in group)
    others = [opcode for opcode in group if opcode is not instruction.opcode]
    return _with(block, step, replace(instruction, opcode=draw.choice(others)))


def _drop_operand(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block = ranked.blocks[index]
    instruction = block.instructions[step]
    if not instruction.further:
        return None
    gone = draw.randrange(len(instruction.sources))
    first, *further = (place for number, place in enumerate(instruction.sources) if number != gone)
    return _with(block, step, replace(instruction, source=first, further=tuple(further)))


def _repeat_operand(ranked: RankSchedule, index: int, step: int, draw: random.Random) -> Block | None:
    block = ranked.blocks[index]
    instruction = block.instructions[step]
    if instruction.opcode is not Opcode.REDUCE:
        return None
    further = (*instruction.further, draw.choice(instruction.sources))
    return _with(block, step, replace(instruction, further=further))


STEP_FAULTS: dict[str, Callable[[RankSchedule, int, int, random.Random], Block | None]] = {
    "drop wait": _drop_wait,
    "swap steps": _swap_steps,
    "shift place": _shift_place,
    "other buffer": _other_buffer,
    "wrong peer": _wrong_peer,
    "wrong channel": _wrong_channel,
    "drop step": _drop_step,
    "other opcode": _other_opcode,
    "drop operand": _drop_operand,
    "repeat operand": _repeat_operand,
}

KINDS = (*STEP_FAULTS, "fewer slots")
