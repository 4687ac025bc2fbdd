"""Which targets of the collectives are reached, and which no program that was written here by hand reaches either.

    python benchmarks/collective/peers.py --ranks 8 --json peers8.json ...
    python benchmarks/collective/reach.py peers8.json peers4.json ... [--markdown F] [--gains]

Several runs of one number of ranks count as one with as many rounds. The markdown has all figures, and then the
targets. `--gains` prints a short table, of each size and collective the gain through c10d (bold where the target is
reached), by `calls`, of the floor, and through c10d with tensors of `sennit.backend.empty` (*inside*).

The targets: twice the best of gloo, MPICH and Open MPI with 8 ranks from 64 KiB to 16 MiB, and not behind with 4 ranks
at any size. What can be reached is measured in the same rounds, on arrays of the same kind, with a program in C that
does nothing but this collective of this size, in the fastest of the ways that we know (`by_hand.h`): called in a loop
of C (*by hand*), and behind torch.distributed, as a backend is (*floor*). All gains are those of `peers.py`, medians of
the ratios of two times of one round, also

    of the floor     the best of the others / the program behind torch.distributed
    of the sum       the best of the others / (torch's own part, measured with nothing behind it, + the program in a loop of C)

The sum is what a program would take that is called at no cost, if torch's code and data stayed in the caches while the
program moves its bytes; where ranks take turns on a core, each of them passes torch's part there; the program behind torch.distributed is called by ctypes, some tenths of a microsecond. Where
both are below the target, it is out of reach of what we know how to write: marked **floor**. A target that is missed
and that one of the two reaches is marked **missed**.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import BY_HAND, COLLECTIVES, OWN, THEIRS, Figure, Report, gain, markdown, size_text

GAIN = {8: 2.0, 4: 1.0}
SHORT, LONG = (64 << 10, 512 << 10), 2.5
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
    gain_inside: float | None
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
        shown = (self.gain, self.gain_of_calls, self.gain_inside, self.gain_of_floor, self.gain_of_sum)
        gains = [f"{value:.2f}x" if value else "-" for value in shown]
        cells = (
            f"{self.ranks}",
            self.collective,
            size_text(self.bytes),
            f"{self.best:.1f}",
            f"{self.ours:.1f}",
            *gains[:3],
            f"{self.torch:.1f}",
            f"{self.by_hand:.1f}" if self.by_hand is not None else "-",
            ", ".join(way.replace("_", " ") for way in self.ways) or "-",
            f"{self.floor:.1f}" if self.floor is not None else "-",
            *gains[3:],
            self.word,
        )
        return f"| {' | '.join(cells)} |"


def pooled(paths: list[Path]) -> Report:
    """All runs as one, each with rounds of its own."""
    report, rounds = Report(""), 0
    for path in paths:
        run = json.loads(path.read_text())
        report.where = "; ".join(dict.fromkeys([*filter(None, [report.where]), run["where"]]))
        report.versions |= run["versions"]
        for fields in run["figures"]:
            figure = Figure(**fields)
            figure.rounds = [rounds + number for number in figure.rounds]
            before = report.of(figure.collective, figure.ranks, figure.bytes).get(figure.peer)
            if before is None:
                report.figures.append(figure)
            else:
                before.seconds += figure.seconds
                before.rounds += figure.rounds
                before.ways += figure.ways
        rounds = 1 + max((number for figure in report.figures for number in figure.rounds), default=0)
    report.figures.sort(key=lambda figure: (-figure.ranks, COLLECTIVES.index(figure.collective), figure.bytes))
    return report


def figures_of(report: Report) -> Found:
    """Torch's own part, which is timed at one size of a run, stands with all sizes: where it was timed most often."""
    found: Found = {}
    for figure in report.figures:
        found.setdefault((figure.ranks, figure.collective, figure.bytes), {})[figure.peer] = figure
    for (ranks, name, _), cell in found.items():
        timed = [f for f in report.figures if (f.peer, f.ranks, f.collective) == ("torch", ranks, name)]
        if timed:
            cell["torch"] = max(timed, key=lambda figure: len(figure.seconds))
    return found


def turns(ranks: int, where: str) -> int:
    """How many ranks share a core, by what a report says of the machine."""
    cores = min(int(cores) for cores in re.findall(r"(\d+) cores?, ", where))
    return -(-ranks // cores)


def verdicts(found: Found, where: str) -> list[Verdict]:
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
                gain(figures, "inside"),
                None if hand is None else 1e6 * hand.median,
                () if hand is None else tuple(dict.fromkeys(hand.ways)),
                1e6 * torch,
                1e6 * figures["floor"].median if "floor" in figures else None,
                gain(figures, "floor"),
                gain(figures, "hand", torch * turns(ranks, where)),
            )
        )
    return made


def disturbed(report: Report, ranks: int, peers: tuple[str, ...]) -> str:
    """How many short rounds took much longer than the fastest of their row, as where the host takes a core away."""
    rows = [f.seconds for f in report.figures if f.ranks == ranks and f.peer in peers and f.bytes in SHORT]
    long = sum(seconds > LONG * min(row) for row in rows for seconds in row)
    return f"{', '.join(peers)}: {long} of {sum(map(len, rows))} rounds of 64 and 512 KiB took more than {LONG} times the fastest of their row"


def short_table(rows: list[Verdict]) -> list[str]:
    """By size and collective: the gain through c10d, by `calls`, of the program by hand behind torch, and through c10d
    with tensors in memory of the group, where that was measured.
    """
    lines = [f"| | {' | '.join(COLLECTIVES)} |", f"|---|{'---|' * len(COLLECTIVES)}"]
    by_place = {(row.ranks, row.bytes, row.collective): row for row in rows}
    for ranks, nbytes in sorted({place[:2] for place in by_place}, key=lambda place: (-place[0], place[1])):
        cells = [gains_of(by_place.get((ranks, nbytes, name))) for name in COLLECTIVES]
        lines.append(f"| {ranks} ranks, {size_text(nbytes)} | {' | '.join(cells)} |")
    return lines


def gains_of(row: Verdict | None) -> str:
    if row is None:
        return "-"
    own = f"**{row.gain:.2f}x**" if row.word == "reached" else f"{row.gain:.2f}x"
    others = [f"{gain:.2f}x" if gain else "-" for gain in (row.gain_of_calls, row.gain_of_floor)]
    return ", ".join([own, *others, *([f"{row.gain_inside:.2f}x"] if row.gain_inside else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", type=Path, nargs="+")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--gains", action="store_true", help="a short table of gains alone")
    options = parser.parse_args()
    report = pooled(options.peers)
    rows = verdicts(figures_of(report), report.where)
    if options.gains:
        print("\n".join(short_table(rows)))
        return
    lines = [
        "| ranks | collective | bytes | best peer, us | ours | gain | of `calls` | inside | torch | by hand | by | floor | of the floor | of the sum | |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(row.line for row in rows),
    ]
    for ranks in sorted({row.ranks for row in rows}, reverse=True):
        said = [row.word for row in rows if row.ranks == ranks]
        lines.append(
            f"\n{ranks} ranks: {said.count('reached')} of {len(said)} reached, {said.count('**floor**')} out of reach by hand too, "
            f"{said.count('**missed**')} missed; by `calls` {sum((row.gain_of_calls or 0.0) >= GAIN[ranks] for row in rows if row.ranks == ranks)} reached, "
            f"inside {sum((row.gain_inside or 0.0) >= GAIN[ranks] for row in rows if row.ranks == ranks)}"
        )
        lines += [f"  {disturbed(report, ranks, peers)}" for peers in (OWN, BY_HAND, THEIRS)]
    print("\n".join(lines))
    if options.markdown is not None:
        targets = "\n".join(lines)
        options.markdown.write_text(f"{markdown(report)}\nTargets and programs by hand:\n\n{targets}\n")


if __name__ == "__main__":
    main()
