"""Which targets of the collectives are reached, and which no program can reach on the machine that was measured.

    python benchmarks/collective/peers.py --ranks 8 --json peers8.json ...
    python benchmarks/collective/memory_ceiling.py --ranks 8 4 --json ceiling.json        # on the same machine, at the same time
    python benchmarks/collective/reach.py ceiling.json peers8.json peers4.json [--markdown F]

The targets: twice the best of gloo, MPICH and Open MPI with 8 ranks from 64 KiB to 16 MiB, and not behind with 4 ranks at any size. A call through torch.distributed takes at least

    floor = torch's own part of the call + the time in which the ranks meet once + what must be moved, at the rates that were measured

(`memory_ceiling.py` says what must be moved; of the smallest sizes nothing is counted.) Where the floor is above what the target allows, the target is out of reach there: marked **floor**. A target
that is missed and whose floor is lower is marked **missed**. Gains are those of `peers.py`: medians of the ratios of each round, not ratios of the medians beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from peers import THEIRS, Figure, gain

GAIN = {8: 2.0, 4: 1.0}
RANGE = {8: (64 << 10, 16 << 20), 4: (0, 64 << 20)}

Found = dict[tuple[int, str, int], dict[str, Figure]]  # by ranks, collective and bytes: by peer


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


def verdicts(ceiling: list[dict[str, Any]], found: Found) -> list[tuple[Any, ...]]:
    bounds = {(row["ranks"], row["collective"], row["bytes"]): row["bound"] for row in ceiling}
    meets = {row["ranks"]: row["meet"] for row in ceiling}
    torch = {key[:2]: figures["torch"].median for key, figures in found.items() if "torch" in figures}
    rows = []
    for (ranks, name, nbytes), figures in found.items():
        won = gain(figures, "sennit")
        if won is None or (ranks, name) not in torch or ranks not in GAIN:
            continue
        low, high = RANGE[ranks]
        if not low <= nbytes <= high:
            continue
        best = 1e6 * min(figures[peer].median for peer in THEIRS if peer in figures)
        ours, allowed = 1e6 * figures["sennit"].median, best / GAIN[ranks]
        floor = 1e6 * torch[ranks, name] + meets[ranks] + bounds.get((ranks, name, nbytes), 0.0)
        verdict = "reached" if won >= GAIN[ranks] else "**floor**" if floor > allowed else "**missed**"
        rows.append((ranks, name, nbytes, best, ours, won, gain(figures, "calls"), allowed, floor, verdict))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ceiling", type=Path)
    parser.add_argument("peers", type=Path, nargs="+")
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    rows = verdicts(json.loads(options.ceiling.read_text()), figures_of(options.peers))
    lines = [
        "| ranks | collective | bytes | best peer, us | ours | gain | of `calls` | allowed by the target | floor | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for ranks, name, nbytes, best, ours, won, calls, allowed, floor, verdict in rows:
        without = f"{calls:.2f}x" if calls else "-"
        lines.append(
            f"| {ranks} | {name} | {shown(nbytes)} | {best:.1f} | {ours:.1f} | {won:.2f}x | {without} | {allowed:.1f} "
            f"| {floor:.1f} | {verdict} |"
        )
    for ranks in sorted({row[0] for row in rows}, reverse=True):
        said = [row[-1] for row in rows if row[0] == ranks]
        lines.append(
            f"\n{ranks} ranks: {said.count('reached')} of {len(said)} reached, {said.count('**floor**')} below what the machine "
            f"allows, {said.count('**missed**')} missed"
        )
    print("\n".join(lines))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
