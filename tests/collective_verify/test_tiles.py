"""The verifier looks at one tile and speaks for any number: against schedules whose tiles are written out."""

from __future__ import annotations

from dataclasses import replace

from test_model_check import verdict
from tiny_schedules import CHUNKS, random_schedule

from sennit.ir.collective import CollectiveSpec
from sennit.ir.schedule import Instruction, Place, Schedule, Wait


def unroll(schedule: Schedule, tiles: int) -> Schedule:
    """Every block runs its list once for each tile; tile t of chunk c is chunk t * CHUNKS + c."""
    assert isinstance(schedule.collective, CollectiveSpec)
    ranks = []
    for ranked in schedule.ranks:
        lengths = [len(block.instructions) for block in ranked.blocks]
        blocks = tuple(
            replace(block, instructions=tuple(shift(i, t, lengths) for t in range(tiles) for i in block.instructions))
            for block in ranked.blocks
        )
        ranks.append(replace(ranked, blocks=blocks))
    wide = replace(schedule.collective, chunks=tiles * CHUNKS)
    return replace(schedule, collective=wide, ranks=tuple(ranks))


def shift(instruction: Instruction, tile: int, lengths: list[int]) -> Instruction:
    def at(place: Place | None) -> Place | None:
        return None if place is None else replace(place, start=place.start + tile * CHUNKS)

    after = tuple(Wait(wait.block, wait.step + tile * lengths[wait.block]) for wait in instruction.after)
    return replace(instruction, source=at(instruction.source), target=at(instruction.target), after=after)


def test_what_holds_for_one_tile_holds_for_all() -> None:
    for seed in range(400):
        schedule = random_schedule(seed)
        said = verdict(schedule)
        for tiles in (2, schedule.slots + 1, 5):
            if said != "malformed":
                assert verdict(unroll(schedule, tiles)) == said, str(schedule)
