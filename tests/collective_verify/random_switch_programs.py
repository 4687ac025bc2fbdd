"""Random legal programs for a topology with a multicast switch: moves as in `random_programs.py`, and between them
multicasts and reductions in the switch, over random groups of ranks and places, in place or not, the own rank in the
group or not.
"""

from __future__ import annotations

from random_programs import Draft, finish, start

from sennit.ir.collective import Algorithm, Chunks, Move, MoveKind, Value, add_values

__all__ = ["random_switch_program"]

MOST_STEPS = 25
ATTEMPTS = 20


def random_switch_program(seed: int) -> Algorithm:
    draft = start(seed)
    draw = draft.draw
    switches = 0
    for _ in range(draw.randint(2, MOST_STEPS)):
        for _ in range(ATTEMPTS):
            kind = draw.random()
            if kind < 0.4:
                done = draft.try_move()
            else:
                done = _multicast(draft, switches) if kind < 0.7 else _reduction(draft, switches)
                switches += done
            if done:
                break
    return finish(draft)


def _group(draft: Draft) -> list[int]:
    ranks = len(draft.cells)
    return draft.draw.sample(range(ranks), draft.draw.randint(2, ranks))


def _held(draft: Draft, place: Chunks) -> list[Value] | None:
    """What a place holds, or None where there is no such place or a part of it was never written."""
    found = draft.cells[place.rank].find(place.buffer, place.start, place.count)
    if found is None:
        return None
    values = [value for value in draft.values[place.rank][slice(*found)] if value is not None]
    return values if len(values) == place.count else None


def _apart_or_same(draft: Draft, one: Chunks, other: Chunks, *, same: bool) -> bool:
    if one.rank != other.rank:
        return True
    (a, b), (c, d) = draft.span(one), draft.span(other)
    return b <= c or d <= a or (same and a == c)


def _multicast(draft: Draft, number: int) -> bool:
    draw, group = draft.draw, _group(draft)
    source = draft.place(draw.randrange(len(draft.cells)))
    if source is None or (values := _held(draft, source)) is None:
        return False
    named = source if draw.random() < 0.5 else draft.place(group[0], source.count)
    if named is None:
        return False
    targets = [Chunks(rank, named.buffer, named.start, named.count) for rank in group]
    if not all(
        draft.cells[target.rank].find(target.buffer, target.start, target.count)
        and _apart_or_same(draft, source, target, same=True)
        for target in targets
    ):
        return False
    for target in targets:
        draft.values[target.rank][slice(*draft.span(target))] = values
        draft.moves.append(Move(MoveKind.COPY, source, target, None, 0, f"multicast {number}", number))
    return True


def _reduction(draft: Draft, number: int) -> bool:
    draw, group = draft.draw, _group(draft)
    named = draft.place(group[0])
    if named is None:
        return False
    sources = [Chunks(rank, named.buffer, named.start, named.count) for rank in group]
    into = sources[0] if draw.random() < 0.5 else draft.place(draw.randrange(len(draft.cells)), named.count)
    held = [_held(draft, source) for source in sources]
    if into is None or any(values is None for values in held):
        return False
    onto_itself = into.rank in group and draft.span(into) == draft.span(sources[group.index(into.rank)])
    if onto_itself:
        sources.sort(key=lambda source: source.rank != into.rank)
    elif not all(_apart_or_same(draft, source, into, same=False) for source in sources):
        return False
    total = _held(draft, sources[0])
    for source in sources[1:]:
        added = _held(draft, source)
        assert total is not None
        assert added is not None
        sums = [add_values(one, other) for one, other in zip(total, added, strict=True)]
        total = [value for value in sums if value is not None]
        if len(total) < named.count:
            return False
    draft.values[into.rank][slice(*draft.span(into))] = list(total or [])
    kinds = [MoveKind.COPY] + [MoveKind.REDUCE] * (len(sources) - 1)
    for kind, source in list(zip(kinds, sources, strict=True))[onto_itself:]:
        draft.moves.append(Move(kind, source, into, None, 0, f"reduction {number}", number))
    return True
