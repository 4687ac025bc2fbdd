"""Hypothesis strategies for algorithms and schedules whose text is to be read back: of any content, legal or not."""

from __future__ import annotations

from hypothesis import strategies as st

from sennit.ir.collective import (
    Algorithm,
    Chunks,
    CollectiveName,
    CollectiveSpec,
    CustomCollective,
    Move,
    MoveKind,
    Scratch,
)
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule, Wait

__all__ = ["algorithms", "collectives", "schedules"]

ROOTED = (CollectiveName.BROADCAST, CollectiveName.REDUCE, CollectiveName.GATHER, CollectiveName.SCATTER)
titles = st.text(alphabet=st.characters(codec="ascii", exclude_characters="\r"), max_size=8)
names = st.sampled_from(["input", "output", "tmp", "a_b", "x9"])
small = st.integers(0, 12)


@st.composite
def specs(draw: st.DrawFn) -> CollectiveSpec:
    name, ranks = draw(st.sampled_from(CollectiveName)), draw(st.integers(1, 9))
    root = draw(st.integers(0, ranks - 1)) if name in ROOTED else None
    return CollectiveSpec(name, ranks, draw(st.integers(1, 4)), root, draw(st.booleans()))


@st.composite
def customs(draw: st.DrawFn) -> CustomCollective:
    ranks = draw(st.integers(1, 4))
    inputs = tuple(draw(st.integers(1, 3)) for _ in range(ranks))
    terms = st.dictionaries(st.just(0), st.integers(1, (1 << ranks) - 1), min_size=1)
    values = st.none() | terms.map(lambda value: tuple(sorted(value.items())))
    wanted = tuple(tuple(draw(st.lists(values, max_size=3))) for _ in range(ranks))
    outputs = tuple(len(row) for row in wanted)
    aliases = tuple(draw(st.integers(0, abs(i - o))) for i, o in zip(inputs, outputs, strict=True))
    return CustomCollective(draw(titles), inputs, outputs, wanted, draw(st.none() | st.just(aliases)))


collectives = specs() | customs()
chunks = st.builds(Chunks, small, names, small, st.integers(1, 4))
places = st.builds(Place, names, small, st.integers(1, 4))
moves = st.builds(Move, st.sampled_from(MoveKind), chunks, chunks, st.none() | small, small, titles, st.none() | small)
algorithms = st.builds(
    Algorithm,
    titles,
    collectives,
    st.lists(moves, max_size=5).map(tuple),
    st.lists(st.builds(Scratch, small, names, small), max_size=3).map(tuple),
)
instructions = st.builds(
    Instruction,
    st.sampled_from(Opcode),
    st.none() | places,
    st.none() | places,
    st.lists(st.builds(Wait, small, small), max_size=3).map(tuple),
)
instructions |= st.builds(
    Instruction, st.just(Opcode.REDUCE), places, places, st.just(()), st.lists(places, max_size=3).map(tuple)
)
blocks = st.builds(Block, st.none() | small, st.none() | small, small, st.lists(instructions, max_size=4).map(tuple))


@st.composite
def rank_schedules(draw: st.DrawFn) -> RankSchedule:
    rank = draw(small)
    scratch = draw(st.lists(st.builds(Scratch, st.just(rank), names, small), max_size=2))
    return RankSchedule(rank, tuple(draw(st.lists(blocks, max_size=3))), tuple(scratch))


schedules = st.builds(Schedule, titles, collectives, small, st.lists(rank_schedules(), max_size=3).map(tuple))
