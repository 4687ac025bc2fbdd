"""Do the outputs hold what the collective asks for? If not: which chunk of which rank lacks what.

`held(rank)` gives segments (first, last, relative value) of the rank's output, as `collective/language.py` defines
them.
"""

from __future__ import annotations

from collections.abc import Callable

from sennit.errors import CollectiveError
from sennit.ir.collective import CollectiveSpec, CustomCollective, Value

__all__ = ["check_outputs"]

Held = list[tuple[int, int, Value | None]]
SHOWN = 6  # faults named in one message


def check_outputs(collective: CollectiveSpec | CustomCollective, held: Callable[[int], Held], name: str) -> None:
    faults: list[str] = []
    for rank in range(collective.ranks):
        for first, last, value in held(rank):
            for index in range(first, last):
                wanted = collective.after(rank, index)
                if wanted is None:
                    continue
                have = None if value is None else tuple((delta + index, ranks) for delta, ranks in value)
                if have != wanted:
                    faults.append(f"output chunk {index} of rank {rank} {_difference(have, wanted)}")
    if faults:
        more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CollectiveError(
            f"the result is wrong in {len(faults)} chunks:\n  " + "\n  ".join(faults[:SHOWN]) + more,
            where=f"algorithm {name!r}, at its end",
            fix=f"add the moves that bring these; {collective} asks for them"
            if isinstance(collective, CollectiveSpec)
            else "add the moves that bring these",
        )


def _difference(have: Value | None, wanted: Value) -> str:
    if have is None:
        return f"was never written; it should hold {_text(wanted)}"
    held, asked = dict(have), dict(wanted)
    lacks = [(index, ranks & ~held.get(index, 0)) for index, ranks in wanted]
    extra = [(index, ranks & ~asked.get(index, 0)) for index, ranks in have]
    parts = [
        f"{verb} {_text(value)}"
        for verb, pairs in (("lacks", lacks), ("should not hold", extra))
        if (value := tuple((index, ranks) for index, ranks in pairs if ranks))
    ]
    return ", ".join(parts)


def _text(value: Value) -> str:
    return " + ".join(f"chunk {index} of {_ranks(ranks)}" for index, ranks in value)


def _ranks(bits: int) -> str:
    """`rank 3`, `ranks 0, 2 to 7`."""
    runs: list[str] = []
    start = 0
    while bits >> start:
        start += ((bits >> start) & -(bits >> start)).bit_length() - 1
        rest = ~(bits >> start)
        stop = start + (rest & -rest).bit_length() - 1
        runs.append(f"{start}" if stop == start + 1 else f"{start} to {stop - 1}")
        start = stop
    return f"rank{'s' if bits & (bits - 1) else ''} {', '.join(runs)}"
