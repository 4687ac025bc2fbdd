"""Synthesis on many topologies: time taken, rate reached, and the bound that certifies it.

    python benchmarks/collective/synthesis.py                     the table
    python benchmarks/collective/synthesis.py --random 1000       random networks instead: how many reach the bound
    python benchmarks/collective/synthesis.py --scale             8 to 128 nodes, with and without the quotient by symmetry
    python benchmarks/collective/synthesis.py --schedules         what is synthesised, compiled and verified as a schedule

Rates are of the description of the cluster (simulated in that sense); the seconds of synthesis are measured, the least
of three.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence

from sennit.cluster import Topology, load
from sennit.collective.compile import compile_algorithm
from sennit.collective.synthesis import spanning_forest, synthesize
from sennit.collective.synthesis_all_to_all import synthesize_all_to_all
from sennit.collective.synthesis_network import Arc, Network, network_of
from sennit.collective.synthesis_symmetry import symmetries
from sennit.collective.verify import verify_algorithm, verify_schedule
from sennit.ir.collective import CollectiveName


def topologies() -> list[tuple[str, Network]]:
    def of(name: str, links: Sequence[str] | None = None) -> Network:
        return network_of(Topology.of(load(name)), links)

    cube = of("dgx1-v100", ["nvlink"])
    return [
        ("dgx1-v100, NVLink", cube),
        ("dgx1-v100, NVLink, 0-3 dead", cube.without("device 0", "device 3")),
        ("dgx1-v100, with PCIe", of("dgx1-v100")),
        ("mi300x", of("mi300x")),
        ("mi300x, 0-3 dead", of("mi300x").without("device 0", "device 3")),
        ("dgx-a100:2", of("dgx-a100:2")),
        ("dgx-a100:2, a NIC dead", of("dgx-a100:2").without("node 0 nic 0", "leaf 0")),
        ("dgx2-v100:2", of("dgx2-v100:2")),
        ("random, 12 devices, 4 switches", random_network(random.Random(4), 12, 4, symmetric=True)),
        ("dgx-a100:8", of("dgx-a100:8")),
        ("gb200-nvl72", of("gb200-nvl72")),
    ]


def random_network(draw: random.Random, devices: int, switches: int, *, symmetric: bool) -> Network:
    count = devices + switches
    order = draw.sample(range(count), count)
    links = {(order[i], order[(i + 1) % count]): draw.randint(1, 8) for i in range(count)}
    for _ in range(2 * count):
        ends = tuple(draw.sample(range(count), 2))
        links.setdefault((ends[0], ends[1]), draw.randint(1, 8))
    if symmetric:
        links |= {(head, tail): capacity for (tail, head), capacity in links.items() if tail < head}
        links |= {(head, tail): capacity for (tail, head), capacity in links.items()}
        links = {ends: links[min(ends), max(ends)] for ends in links}
    names = tuple(f"device {v}" if v < devices else f"switch {v}" for v in range(count))
    return Network(names, devices, tuple(Arc(*ends, capacity) for ends, capacity in links.items()), 1e9)


def table() -> None:
    print(
        "| topology | devices | all-gather: synthesis | trees a root | depth | GB/s | bound | all-reduce | all-to-all, of bound |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, network in topologies():
        least = min(_timed(network) for _ in range(3))
        gather = synthesize(network, CollectiveName.ALL_GATHER)
        reduce = synthesize(network, CollectiveName.ALL_REDUCE)
        exchange = synthesize_all_to_all(network, pieces=2 if network.devices <= 16 else 1)
        for result in (gather, reduce, exchange):
            verify_algorithm(result.algorithm)
        forest, proof = gather.forests[0], gather.certificate
        depth = max(tree.depth for tree in forest.trees)
        print(
            f"| {name} | {network.devices} | {least:.3f} s | {forest.share} | {depth} | {proof.algbw / 1e9:.1f} |"
            f" {proof.bound / 1e9:.1f} | {reduce.certificate.ratio:.3f} | {exchange.certificate.ratio:.3f} |",
            flush=True,
        )


def _timed(network: Network) -> float:
    start = time.perf_counter()
    spanning_forest(network)
    return time.perf_counter() - start


def scale(most_general: int) -> None:
    """All-gather trees for growing clusters; the general method up to `most_general` devices."""
    print(
        "| topology | devices | symmetries | by symmetry | depth | trees a root | the general method | depth | trees a root |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name in ("dgx-a100:2", "dgx-a100:8", "gb200-nvl72", *(f"dgx-a100:{nodes}" for nodes in (16, 32, 64, 128))):
        network = network_of(Topology.of(load(name)))
        cells = [name, f"{network.devices}", f"{len(symmetries(network).elements)}"]
        for quotient in (True, False):
            if not quotient and network.devices > most_general:
                cells += ["not run", "", ""]
                continue
            start = time.perf_counter()
            forest = spanning_forest(network, quotient=quotient)
            took = time.perf_counter() - start
            assert forest.rate * forest.cut.ratio == 1, "below the cut bound"
            cells += [f"{took:.2f} s", f"{max(tree.depth for tree in forest.trees)}", f"{forest.share}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def schedules() -> None:
    """The proof on the compiled form, for the largest systems of the table."""
    print("| topology | collective | moves | compile | steps | verify |")
    print("|---|---|---|---|---|---|")
    for name in ("dgx-a100:8", "gb200-nvl72"):
        network = network_of(Topology.of(load(name)))
        for collective in (CollectiveName.ALL_GATHER, CollectiveName.REDUCE_SCATTER, CollectiveName.ALL_REDUCE):
            algorithm = synthesize(network, collective).algorithm
            start = time.perf_counter()
            schedule = compile_algorithm(algorithm)
            compiled = time.perf_counter()
            proof = verify_schedule(schedule)
            done = time.perf_counter()
            print(
                f"| {name} | {collective.value} | {len(algorithm.moves)} | {compiled - start:.2f} s | {proof.steps} |"
                f" {done - compiled:.2f} s |",
                flush=True,
            )


def random_networks(count: int, seed: int) -> None:
    for symmetric in (True, False):
        draw = random.Random(seed)
        ratios = []
        for _ in range(count):
            network = random_network(draw, draw.randint(2, 10), draw.randint(0, 5), symmetric=symmetric)
            result = synthesize(network, CollectiveName.ALL_GATHER)
            verify_algorithm(result.algorithm)
            ratios.append(result.certificate.ratio)
        optimal = sum(ratio > 1 - 1e-9 for ratio in ratios)
        kind = "the same both ways" if symmetric else "one way"
        print(
            f"{count} random networks with links {kind}: {optimal} at the bound, the least at {min(ratios):.3f} of it"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=0, metavar="COUNT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", action="store_true")
    parser.add_argument(
        "--most-general", type=int, default=128, help="devices up to which --scale runs the general method"
    )
    parser.add_argument("--schedules", action="store_true")
    options = parser.parse_args()
    if options.scale:
        scale(options.most_general)
    elif options.schedules:
        schedules()
    elif options.random:
        random_networks(options.random, options.seed)
    else:
        table()
