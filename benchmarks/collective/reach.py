"""Which targets of the collectives are reached, and which no program that was written here by hand reaches either.

    python benchmarks/collective/peers.py --ranks 8 --json peers8.json ...
    python benchmarks/collective/reach.py peers8.json peers4.json [--markdown F]

The targets: twice the best of gloo, MPICH and Open MPI with 8 ranks from 64 KiB to 16 MiB, and not behind with 4 ranks at any size. What can be reached is measured in the same rounds, on arrays of the same kind, with a program in C that does nothing but
this collective of this size, in the fastest of the ways that we know (`by_hand.h`): called in a loop of C (*by hand*), and behind torch.distributed, as a backend is (*floor*). All gains are those of `peers.py`, medians of the ratios of two times of one round, also

    of the floor     the best of the others / the program behind torch.distributed
    of the sum       the best of the others / (torch's own part, measured with nothing behind it, + the program in a loop of C)

The sum is what a program would take that is called at no cost, if torch's code and data stayed in the caches while the program moves its bytes; the program behind torch.distributed is called by ctypes, some tenths of a microsecond. Where both are below the target, it is out of
reach of what we know how to write: marked **floor**. A target that is missed and that one of the two reaches is marked **missed**.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import THEIRS, Figure, gain, size_text

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
    by_hand: float | None
    ways: tuple[str, ...]
    torch: float
    floor: float | None
    gain_of_floor: float | None
    gain_of_sum: float | None

    @property
    def word(self) -> str:
        target, by_hand = (
            GAIN[self.ranks],
            [found for found in (self.gain_of_floor, self.gain_of_sum) if found is not None],
        )
        if self.gain >= target:
            return "reached"
        return "**floor**" if by_hand and max(by_hand) < target else "**missed**"

    @property
    def line(self) -> str:
        shown = (self.gain, self.gain_of_calls, self.gain_of_floor, self.gain_of_sum)
        gains = [f"{value:.2f}x" if value else "-" for value in shown]
        cells = (
            f"{self.ranks}",
            self.collective,
            size_text(self.bytes),
            f"{self.best:.1f}",
            f"{self.ours:.1f}",
            *gains[:2],
            f"{self.torch:.1f}",
            f"{self.by_hand:.1f}" if self.by_hand is not None else "-",
            ", ".join(way.replace("_", " ") for way in self.ways) or "-",
            f"{self.floor:.1f}" if self.floor is not None else "-",
            *gains[2:],
            self.word,
        )
        return f"| {' | '.join(cells)} |"


def figures_of(paths: list[Path]) -> Found:
    """Of the later file where two have one. Torch's own part, which is timed at one size, stands with all sizes of its file."""
    found: Found = {}
    for path in paths:
        figures = [Figure(**fields) for fields in json.loads(path.read_text())["figures"]]
        torch = {(figure.ranks, figure.collective): figure for figure in figures if figure.peer == "torch"}
        for figure in figures:
            cell = found.setdefault((figure.ranks, figure.collective, figure.bytes), {})
            cell[figure.peer] = figure
            if (figure.ranks, figure.collective) in torch:
                cell["torch"] = torch[figure.ranks, figure.collective]
    return found


def verdicts(found: Found) -> list[Verdict]:
    made = []
    for (ranks, name, nbytes), figures in found.items():
        won = gain(figures, "sennit")
        if won is None or ranks not in GAIN or "torch" not in figures:
            continue
        low, high = RANGE[ranks]
        if not low <= nbytes <= high:
            continue
        hand, torch = figures.get("hand"), figures["torch"].median
        made.append(
            Verdict(
                ranks,
                name,
                nbytes,
                1e6 * min(figures[peer].median for peer in THEIRS if peer in figures),
                1e6 * figures["sennit"].median,
                won,
                gain(figures, "calls"),
                None if hand is None else 1e6 * hand.median,
                () if hand is None else tuple(dict.fromkeys(hand.ways)),
                1e6 * torch,
                1e6 * figures["floor"].median if "floor" in figures else None,
                gain(figures, "floor"),
                gain(figures, "hand", torch),
            )
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, nargs="+")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = verdicts(figures_of(options.peers))
    lines = [
        "| ranks | collective | bytes | best peer, us | ours | gain | of `calls` | torch | by hand | by | floor | of the floor | of the sum | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
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
