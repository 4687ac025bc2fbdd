"""The collective model beside published figures, and then the MSCCL paper's claims as the model sees them.

    python benchmarks/collective/predict.py            # all: about two minutes on one core
    python benchmarks/collective/predict.py --calibrate
    python benchmarks/collective/predict.py --switch       # NVLS alone
    python benchmarks/collective/predict.py --many         # AllToAll on up to 256 devices alone

First the calibration: large all-reduces on five systems, simulated, against the bus bandwidth that others published,
with the signed error. Nothing is fitted here: link efficiencies come from the presets, thread-block rates and latencies
from `collective/protocol.py`. Then, with the same constants, NCCL's algorithms against the library of this project over
sizes, and the effect of the one assumed figure, the time that a NIC is busy with a message. Last, the one-sided
algorithms for a multicast switch beside the closed form of NVLS that the presets are calibrated with. All times are
simulated. The claims of the paper (arXiv 2201.11840) were measured.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from sennit.cluster import Algorithm as LibraryAlgorithm
from sennit.cluster import Cluster, Topology, load
from sennit.collective.baseline import (
    Baseline,
    direct_all_to_all,
    fastest,
    nccl_all_reduce,
    nccl_all_to_all,
    nccl_all_to_next,
    nccl_ring,
)
from sennit.collective.compile import compile_algorithm
from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import (
    Options,
    all_pairs_all_reduce,
    halving_doubling_all_reduce,
    nvls_all_reduce,
    recipe,
    ring_all_reduce,
)
from sennit.collective.protocol import Protocol
from sennit.collective.simulate import Machine, simulate_schedule
from sennit.collective.simulate_fold import fold
from sennit.collective.simulate_one_sided import simulate_one_sided
from sennit.cost.transfer import collective
from sennit.ir.program import CollectiveKind
from sennit.ir.schedule import Schedule

SIZES = [1 << power for power in range(10, 31, 2)]
LARGE = 8 << 30
QUICK = Machine(most_tiles=4)


@dataclass(frozen=True)
class Published:
    system: str
    cluster: Cluster
    algorithm: str
    low: float
    high: float
    source: str


def eight_of(cluster: Cluster) -> Cluster:
    """Eight devices of a larger node: there is no preset of the B200 board."""
    assert cluster.nic is not None
    return msgspec.structs.replace(
        cluster,
        name="b200x8 (from gb200-nvl72)",
        device=msgspec.structs.replace(cluster.device, per_node=8),
        nic=msgspec.structs.replace(cluster.nic, per_node=8),
    )


def published() -> list[Published]:
    rack = load("gb200-nvl72")
    return [
        Published("A100 x8", load("dgx-a100"), "ring", 200, 236, "nccl-tests#149"),
        Published("H100 x8", load("dgx-h100"), "ring", 370, 370, "nccl-tests#212"),
        Published("H100 x8", load("dgx-h100"), "NVLS", 480, 480, "nccl-tests#212"),
        Published("H200 x8", load("h200x8"), "NVLS", 475, 475, "nccl-tests#272"),
        Published("NVL72", rack, "ring", 835, 847, "coreweave/nccl-tests#43"),
        Published("B200 x8", eight_of(rack), "ring", 830, 830, "nccl#1807 (830 and more)"),
    ]


def calibrate() -> None:
    print(f"All-reduce of {LARGE >> 30} GiB, bus bandwidth in GB/s; simulated against published.\n")
    print("| system | model | simulated | published | error | source |")
    print("|---|---|---|---|---|---|")
    for item in published():
        if item.algorithm == "NVLS":
            seconds = nccl_all_reduce(item.cluster, LARGE, QUICK).seconds
        else:
            timeline = simulate_schedule(nccl_ring(item.cluster), item.cluster, LARGE, instances=24, machine=QUICK)
            seconds = timeline.span
        count = item.cluster.devices
        found = 2 * (count - 1) / count * LARGE / seconds / 1e9
        middle = (item.low + item.high) / 2
        span = f"{item.low:g}" if item.low == item.high else f"{item.low:g} to {item.high:g}"
        kind = "ring, simulated" if item.algorithm == "ring" else "NVLS, closed form"
        print(f"| {item.system} | {kind} | {found:.0f} | {span} | {found / middle - 1:+.1%} | {item.source} |")
    print()


def compiled(names: Iterable[str], cluster: Cluster) -> list[Schedule]:
    return [compile_algorithm(recipe(name).build(cluster.nodes, cluster.device.per_node, Options())) for name in names]


def all_reduces(ranks: int) -> list[Schedule]:
    """In place, as the model of NCCL's ring is."""
    return [
        compile_algorithm(make(ranks, in_place=True))
        for make in (all_pairs_all_reduce, halving_doubling_all_reduce, ring_all_reduce)
    ]


def compare(
    title: str,
    cluster: Cluster,
    baseline: Callable[[Cluster, int, Machine | None], Baseline],
    ours: Sequence[Schedule],
    channels: Sequence[int],
    claim: str,
    machine: Machine = QUICK,
) -> list[float]:
    """Prints a row a size; returns the speed-ups."""
    print(f"### {title}\n\n{claim}\n")
    print("| size | NCCL, modelled | us | best of ours | us | speed-up |")
    print("|---|---|---|---|---|---|")
    ratios = []
    for size in SIZES:
        theirs = baseline(cluster, size, machine)
        best = min((fastest(schedule, cluster, size, channels, machine) for schedule in ours), key=lambda b: b.seconds)
        ratios.append(theirs.seconds / best.seconds)
        print(
            f"| {show(size)} | {theirs} | {theirs.seconds * 1e6:.1f} | {best} | {best.seconds * 1e6:.1f} | {ratios[-1]:.2f}x |"
        )
    top = max(ratios)
    print(f"\nHighest {top:.2f}x at {show(SIZES[ratios.index(top)])}, lowest {min(ratios):.2f}x.\n")
    return ratios


def show(size: int) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:g} {unit}"
    return f"{size} B"


def nic_cost(cluster: Cluster) -> None:
    """The one assumed figure: what it decides."""
    print(f"### The NIC's time a message, {cluster.name}:{cluster.nodes}\n")
    print(
        "Two-step all-to-all over send and receive, speed-up by the microseconds that a NIC is busy with each message:\n"
    )
    print("| size | 0 us | 0.5 us | 1 us | 2 us |")
    print("|---|---|---|---|---|")
    (two_step,) = compiled(["two_step_all_to_all"], cluster)
    for size in (1 << 14, 1 << 18, 1 << 22, 1 << 26):
        cells = []
        for cost in (0.0, 0.5e-6, 1e-6, 2e-6):
            machine = Machine(nic_message=cost, most_tiles=2)
            theirs = nccl_all_to_all(cluster, size, machine)
            ours = fastest(two_step, cluster, size, (1, 2), machine, (Protocol.SIMPLE, Protocol.LL))
            cells.append(f"{theirs.seconds / ours.seconds:.2f}x")
        print(f"| {show(size)} | {' | '.join(cells)} |")
    print()


def claims() -> None:
    columns: dict[str, list[float]] = {}
    counts = (1, 2, 4, 8, 16, 24)
    paper = 'The paper: "up to 48%" over NCCL in its first version, 1.9x in its last.'
    for name in ("ndv4", "dgx2-v100"):
        cluster = load(name)
        columns[f"AllReduce {name}"] = compare(
            f"AllReduce, {name}, {cluster.size}", cluster, nccl_all_reduce, all_reduces(cluster.devices), counts, paper
        )
    exchange = (
        "The paper: 20% over NCCL in its first version, 1.3x over hand-written code in its last; on up to 256 A100."
    )
    for name in ("ndv4:4", "dgx2-v100:2"):
        cluster = load(name)
        ours = compiled(["two_step_all_to_all", "direct_all_to_all"], cluster)
        columns[f"AllToAll {name}"] = compare(
            f"AllToAll, {name}, {cluster.size}", cluster, nccl_all_to_all, ours, (1, 2), exchange
        )
    nic_cost(load("ndv4:4"))
    cluster = load("ndv4:3")
    columns["AllToNext ndv4:3"] = compare(
        f"AllToNext, ndv4:3, {cluster.size}",
        cluster,
        nccl_all_to_next,
        compiled(["spread_all_to_next"], cluster),
        (1, 2, 4, 8),
        "The paper: 14.5x over its baseline. A node has 8 NICs and the baseline uses one, so more than 8x rests on a baseline that "
        "does not fill its NIC.",
        Machine(),  # a chain of hops: few flows, and more tiles overlap them better
    )
    print("### All of them: speed-up over NCCL, both simulated\n")
    print(f"| size | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    for row, size in enumerate(SIZES):
        print(f"| {show(size)} | {' | '.join(f'{column[row]:.2f}x' for column in columns.values())} |")
    print("| the paper, measured | 1.48x, 1.9x | 1.48x, 1.9x | 1.2x, 1.3x | 1.2x, 1.3x | 14.5x |")


def many_devices(names: Sequence[str]) -> None:
    """All-to-all on as many devices as the paper's largest system: one rank stands for all, which is exact here."""
    print("### AllToAll on many devices: speed-up of the best of ours over send and receive, both simulated\n")
    print(f"| size | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    clusters = [load(name) for name in names]
    rows: list[list[str]] = [[] for _ in SIZES]
    took: list[str] = []
    for cluster in clusters:
        started = time.perf_counter()
        direct = direct_all_to_all(cluster.devices)
        (two_step,) = compiled(["two_step_all_to_all"], cluster)
        folds = {schedule.name: fold(schedule, cluster) for schedule in (direct, two_step)}
        assert None not in folds.values(), "these schedules treat all ranks alike"
        for row, size in zip(rows, SIZES, strict=True):
            theirs, ours = (
                fastest(schedule, cluster, size, (1, 2), QUICK, (Protocol.SIMPLE, Protocol.LL), folds[schedule.name])
                for schedule in (direct, two_step)
            )
            row.append(f"{theirs.seconds / min(theirs.seconds, ours.seconds):.2f}x")
        took.append(f"{time.perf_counter() - started:.0f} s")
    for row, size in zip(rows, SIZES, strict=True):
        print(f"| {show(size)} | {' | '.join(row)} |")
    print(f"\nSeconds that the column took, on one core: {', '.join(took)}.\n")


def closed_form(cluster: Cluster, size: int, *algorithms: LibraryAlgorithm) -> float:
    """An all-reduce over all devices, where the vendor's library knows these algorithms alone."""
    topology = Topology.of(msgspec.structs.replace(cluster, algorithms=algorithms))
    return collective(topology, CollectiveKind.ALL_REDUCE, range(cluster.devices), size).seconds(topology)


def in_the_switch(name: str, pieces: Sequence[int]) -> None:
    """Our NVLS programs, step by step, beside the closed form and beside ring and tree."""
    cluster = load(name)
    count = cluster.devices
    programs = {n: compile_one_sided(nvls_all_reduce(count, pieces=n, in_place=True)) for n in pieces}
    print(f"### AllReduce in the switch, {name}, {count} devices\n")
    print(
        "Microseconds, simulated; bus bandwidth in GB/s. The preset's multicast rate is calibrated with the closed form.\n"
    )
    print("| size | ring or tree, closed form | NVLS, closed form | ours, step by step | pieces | bus bandwidth |")
    print("|---|---|---|---|---|---|")
    for size in SIZES:
        plain = closed_form(cluster, size, LibraryAlgorithm.RING, LibraryAlgorithm.TREE)
        switched = closed_form(cluster, size, LibraryAlgorithm.MULTICAST)
        took, best = min(
            (simulate_one_sided(program, cluster, size, instances=instances).span, n)
            for n, program in programs.items()
            for instances in (1, 4)
        )
        bus = 2 * (count - 1) / count * size / took / 1e9
        figures = " | ".join(f"{seconds * 1e6:.1f}" for seconds in (plain, switched, took))
        print(f"| {show(size)} | {figures} | {best} | {bus:.0f} |")
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calibrate", action="store_true", help="only the calibration")
    parser.add_argument("--switch", action="store_true", help="only the multicast switch")
    parser.add_argument("--many", action="store_true", help="only the all-to-all on many devices")
    arguments = parser.parse_args()
    whole = not (arguments.calibrate or arguments.switch or arguments.many)
    if whole or arguments.calibrate:
        calibrate()
    if whole:
        claims()
    if whole or arguments.many:
        many_devices(("ndv4:4", "ndv4:8", "ndv4:16", "ndv4:32"))
    if whole or arguments.switch:
        in_the_switch("dgx-h100", (1, 4, 16))
        in_the_switch("gb200-nvl72", (1, 4))


if __name__ == "__main__":
    main()
