"""Which targets of the collectives are reached, and which no program that was written here by hand reaches either.

    python benchmarks/collective/peers.py --ranks 8 --json peers8.json ...
    python benchmarks/collective/by_hand.py --ranks 8 4 --json by_hand.json        # on the same machine, at the same time
    python benchmarks/collective/reach.py by_hand.json peers8.json peers4.json [--markdown F]

The targets: twice the best of gloo, MPICH and Open MPI with 8 ranks from 64 KiB to 16 MiB, and not behind with 4 ranks at any size. A call through torch.distributed takes at least

    floor = torch's own part of the call + the least time of a program in C that does nothing but this collective of this size

(`by_hand.c` has several ways for each; ways that need arrays that all ranks map are no users' ways, and stand apart, as *open*.) Where the floor is above what the target allows, the target is out of reach
of what we know how to write: marked **floor**. A target that is missed and whose floor is lower is marked **missed**. Gains are those of `peers.py`: medians of the ratios of each round, not ratios of the
medians beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from by_hand import Row, least
from peers import THEIRS, Figure, gain

GAIN = {8: 2.0, 4: 1.0}
RANGE = {8: (64 << 10, 16 << 20), 4: (0, 64 << 20)}

Found = dict[tuple[int, str, int], dict[str, Figure]]  # by ranks, collective and bytes: by peer


@dataclass(frozen=True)
class Verdict:
    """Of one target; microseconds."""

    ranks: int
    collective: str
    bytes: int
    best: float
    ours: float
    gain: float
    gain_of_calls: float | None
    allowed: float
    by_hand: Row | None
    is_open: Row | None
    torch: float

    @property
    def floor(self) -> float | None:
        return None if self.by_hand is None else self.torch + self.by_hand.microseconds

    @property
    def word(self) -> str:
        if self.gain >= GAIN[self.ranks]:
            return "reached"
        return "**floor**" if self.floor is not None and self.floor > self.allowed else "**missed**"

    @property
    def line(self) -> str:
        hand = ["-", "-", "-"]
        if self.by_hand is not None and self.floor is not None:
            hand = [f"{self.by_hand.microseconds:.1f}", self.by_hand.way.replace("_", " "), f"{self.floor:.1f}"]
        cells = (
            f"{self.ranks}",
            self.collective,
            shown(self.bytes),
            f"{self.best:.1f}",
            f"{self.allowed:.1f}",
            f"{self.ours:.1f}",
            f"{self.gain:.2f}x",
            f"{self.gain_of_calls:.2f}x" if self.gain_of_calls else "-",
            *hand,
            f"{self.is_open.microseconds:.1f}" if self.is_open is not None else "-",
            self.word,
        )
        return f"| {' | '.join(cells)} |"


def figures_of(paths: list[Path]) -> Found:
    """Of the later file where two have one."""
    found: Found = {}
    for path in paths:
        for fields in json.loads(path.read_text())["figures"]:
            figure = Figure(**fields)
            found.setdefault((figure.ranks, figure.collective, figure.bytes), {})[figure.peer] = figure
    return found


def shown(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"


def verdicts(rows: list[Row], found: Found) -> list[Verdict]:
    torch = {key[:2]: figures["torch"].median for key, figures in found.items() if "torch" in figures}
    made = []
    for (ranks, name, nbytes), figures in found.items():
        won = gain(figures, "sennit")
        if won is None or (ranks, name) not in torch or ranks not in GAIN:
            continue
        low, high = RANGE[ranks]
        if not low <= nbytes <= high:
            continue
        here = [row for row in rows if (row.ranks, row.collective, row.bytes) == (ranks, name, nbytes)]
        best = 1e6 * min(figures[peer].median for peer in THEIRS if peer in figures)
        made.append(
            Verdict(
                ranks,
                name,
                nbytes,
                best,
                1e6 * figures["sennit"].median,
                won,
                gain(figures, "calls"),
                best / GAIN[ranks],
                least([row for row in here if not row.is_open]),
                least(here, "open"),
                1e6 * torch[ranks, name],
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("by_hand", type=Path)
    parser.add_argument("peers", type=Path, nargs="+")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = verdicts([Row(**row) for row in json.loads(options.by_hand.read_text())], figures_of(options.peers))
    lines = [
        "| ranks | collective | bytes | best peer, us | allowed | ours | gain | of `calls` | by hand | by | floor | open | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(row.line for row in rows),
    ]
    for ranks in sorted({row.ranks for row in rows}, reverse=True):
        said = [row.word for row in rows if row.ranks == ranks]
        lines.append(
            f"\n{ranks} ranks: {said.count('reached')} of {len(said)} reached, {said.count('**floor**')} out of reach by hand too, "
            f"{said.count('**missed**')} missed"
        )
    print("\n".join(lines))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
