"""The commands about machines: `sennit probe` and `sennit cluster`.

They follow the rules of `cli.py`: a frozen dataclass of options each, which tyro reads, and a function that runs it and
imports what it needs when it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sennit.cli_simulate import read_text
from sennit.errors import ClusterError, RunError

if TYPE_CHECKING:
    from sennit.cluster import Cluster
    from sennit.cluster.probe import Probe as ProbeValue

__all__ = ["ClusterResult", "Probe", "ProbeResult", "ShowCluster", "run_cluster_command"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Probe:
    """Measure the links of a running cluster (under torchrun, as torchrun --nproc-per-node 8 --no-python sennit probe),
    or read nvidia-smi's matrix, and write the cluster as TOML.

    Example: sennit probe --topology topo.txt --like h200x8 --out mine.toml
    """

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("cluster.toml")
    """The description to write."""
    like: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What the devices are: a preset or a TOML file. CPU ranks are measured where it is not given."""
    topology: File = None
    """Read this output of `nvidia-smi topo -m` and measure nothing; - reads stdin."""
    nvlink: Annotated[float, tyro.conf.arg(metavar="BYTES_PER_SECOND")] = 25e9
    """With --topology: the rate of one NVLink, one way (NVLink 5: 50e9)."""
    backend: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """gloo or nccl; nccl where a GPU is seen."""
    svg: File = None
    """Also draw the cluster."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class ShowCluster:
    """Show a cluster: its devices, links and nodes, each figure with its source.

    Example: sennit cluster dgx-h100:4 --svg cluster.svg
    """

    cluster: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = None
    """A preset, as dgx-h100 or dgx-h100:4, or a TOML file; without it, the presets are listed."""
    toml: bool = False
    """Print the description itself."""
    svg: File = None
    """Draw it here."""
    json: Json = False
    debug: Debug = False


def run_cluster_command(
    command: Probe | ShowCluster,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    match command:
        case Probe():
            return _probe(command, print_json, progress)
        case ShowCluster():
            return _show(command, print_json)


# ---- probe -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured value with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class PairSummary:
    """`ways` is what all disjoint pairs carry at once, in bandwidths of one pair alone."""

    name: str
    pairs: int
    latency_seconds: Measured
    bandwidth: Measured
    ways: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """`all_reduce_seconds` was measured over all ranks, `simulated_all_reduce_seconds` is what the written cluster
    says.
    """

    schema: str
    out: str
    nodes: int
    per_node: int
    backend: str | None
    pairs: tuple[PairSummary, ...]
    all_reduce_bytes: int | None
    all_reduce_seconds: float | None
    simulated_all_reduce_seconds: float | None


def _probe(
    command: Probe, print_json: Callable[[object], None], progress: Callable[[bool], AbstractContextManager[Progress]]
) -> int:
    with progress(not command.json) as say:
        if command.topology is not None:
            cluster, probe = _from_matrix(command), None
        else:
            found = _from_ranks(command, say)
            if found is None:
                return 0  # a rank that only took part
            cluster, probe = found
    _write(command.out, str(cluster))
    if command.svg is not None:
        from sennit.report.cluster_svg import cluster_svg

        _write(command.svg, cluster_svg(cluster))
    result = _probe_result(command, cluster, probe)
    if command.json:
        print_json(result)
    else:
        _print_probe(result, command)
    return 0


def _from_matrix(command: Probe) -> Cluster:
    from sennit.cluster import load
    from sennit.cluster.smi import cluster_of_matrix, parse_matrix

    assert command.topology is not None
    if command.like is None:
        raise ClusterError(
            "the matrix of nvidia-smi does not say what the devices are",
            fix="name a preset with the same ones: --like h200x8",
        )
    matrix = parse_matrix(read_text(command.topology))
    return cluster_of_matrix(matrix, load(command.like), command.out.stem, command.nvlink)


def _from_ranks(command: Probe, say: Progress) -> tuple[Cluster, ProbeValue] | None:
    from sennit.cluster import load
    from sennit.cluster.probe import cluster_of_probe
    from sennit.cluster.probe_torch import joined_ranks, probe_ranks

    with joined_ranks(command.backend):
        probe = probe_ranks(progress=say)
        if probe is None:
            return None
        if command.like is not None:
            like = load(command.like)
        elif probe.backend == "nccl":
            raise ClusterError("a GPU's own figures are not probed", fix="name a preset with the same: --like h200x8")
        else:
            from sennit.cluster.measure_torch import measure_laptop

            say("this machine's compute and memory")
            like = measure_laptop(probe.per_node)
    return cluster_of_probe(probe, like, command.out.stem), probe


def _probe_result(command: Probe, cluster: Cluster, probe: ProbeValue | None) -> ProbeResult:
    from sennit.cluster import Topology
    from sennit.cost import collective
    from sennit.ir.program import CollectiveKind

    if probe is None:
        return ProbeResult(
            "sennit.probe/1", str(command.out), cluster.nodes, cluster.device.per_node, None, (), None, None, None
        )
    topology = Topology.of(cluster)
    reduce = collective(topology, CollectiveKind.ALL_REDUCE, range(cluster.devices), probe.large_bytes)
    pairs = tuple(
        PairSummary(
            item.name,
            item.pairs,
            Measured(item.latency.value, item.latency.low, item.latency.high),
            Measured(item.bandwidth.value, item.bandwidth.low, item.bandwidth.high),
            item.ways,
        )
        for item in (probe.inside, probe.between)
        if item is not None
    )
    return ProbeResult(
        schema="sennit.probe/1",
        out=str(command.out),
        nodes=probe.nodes,
        per_node=probe.per_node,
        backend=probe.backend,
        pairs=pairs,
        all_reduce_bytes=probe.large_bytes,
        all_reduce_seconds=probe.large_all_reduce,
        simulated_all_reduce_seconds=reduce.seconds(topology),
    )


def _print_probe(result: ProbeResult, command: Probe) -> None:
    from rich.console import Console
    from rich.table import Table

    from sennit.report import units

    if result.pairs:
        table = Table("pairs", "measured", "latency (95%)", "bandwidth, GB/s (95%)", "pairs at once", title="measured")
        for item in result.pairs:
            latency, rate = item.latency_seconds, item.bandwidth
            table.add_row(
                item.name,
                str(item.pairs),
                f"{units.seconds(latency.value)} ({units.seconds(latency.low)} to {units.seconds(latency.high)})",
                f"{rate.value / 1e9:.3g} ({rate.low / 1e9:.3g} to {rate.high / 1e9:.3g})",
                f"carry {item.ways:.2g} times as much",
            )
        Console().print(table)
    if result.all_reduce_seconds is not None and result.simulated_all_reduce_seconds is not None:
        size = units.size(result.all_reduce_bytes or 0)
        print(f"all-reduce of {size} over all: {units.seconds(result.all_reduce_seconds)} measured,", end=" ")
        print(f"{units.seconds(result.simulated_all_reduce_seconds)} simulated with what was written")
    print(
        f"wrote {result.out}: {result.nodes} nodes of {result.per_node}" if result.nodes > 1 else f"wrote {result.out}"
    )
    if command.svg is not None:
        print(f"picture: {command.svg}")


# ---- cluster ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FigureSummary:
    place: str
    value: float
    basis: str
    source: str


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """Without a cluster to show, `presets` names them all and the rest is empty."""

    schema: str
    presets: tuple[str, ...]
    cluster: str | None
    summary: str | None
    devices: int
    nodes: int
    figures: tuple[FigureSummary, ...]


def _show(command: ShowCluster, print_json: Callable[[object], None]) -> int:
    from sennit.cluster import load, presets

    if command.cluster is None:
        if command.json:
            print_json(ClusterResult("sennit.cluster/1", presets(), None, None, 0, 0, ()))
        else:
            for name in presets():
                print(f"{name:<12} {load(name).summary}")
        return 0
    cluster = load(command.cluster)
    if command.svg is not None:
        from sennit.report.cluster_svg import cluster_svg

        _write(command.svg, cluster_svg(cluster))
    if command.json:
        figures = tuple(
            FigureSummary(place, item.value, item.basis.value, item.source) for place, item in cluster.figures()
        )
        shown = (cluster.name, cluster.summary, cluster.devices, cluster.nodes, figures)
        print_json(ClusterResult("sennit.cluster/1", (), *shown))
    elif command.toml:
        print(cluster, end="")
    else:
        _print_cluster(cluster)
        if command.svg is not None:
            print(f"picture: {command.svg}")
    return 0


def _print_cluster(cluster: Cluster) -> None:
    from rich.console import Console
    from rich.table import Table

    print(f"{cluster.name}: {cluster.size}. {cluster.summary}")
    table = Table("figure", "value", "rests on", "source")
    for place, figure in cluster.figures():
        table.add_row(place, f"{figure.value:.4g}", figure.basis.value, figure.source)
    Console().print(table)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    from sennit.report import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", fix="name a file that you may write") from error
