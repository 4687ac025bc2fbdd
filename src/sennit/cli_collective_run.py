"""Running `sennit collective ...`: a result type each, printed with --json under the schema names of docs/commands.md.

Errors that the user can fix end with status 2. What a command needs is imported when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sennit.cli_collective import Action, Collective, Compile, Export, List, Run, Simulate, Synthesize, Tune, Verify
from sennit.cli_collective_one_sided import OneSidedSummary, compile_summary, exported, is_one_sided, verify_summary
from sennit.cli_collective_runtime import RunResult, read_size, run_subject, tune
from sennit.errors import CollectiveError, RunError

if TYPE_CHECKING:
    from rich.table import Table

    from sennit.cluster import Cluster
    from sennit.collective.library import Options
    from sennit.collective.verify import Proof
    from sennit.ir.collective import Algorithm
    from sennit.ir.schedule import Schedule
    from sennit.ir.timeline import Timeline

__all__ = ["run_collective"]

Progress = Callable[[str], None]


def run_collective(
    command: Collective,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    """`progress(shown)` gives a function that says what is being done now."""
    action = command.action
    with progress(not action.json) as tell:
        result, shown = _run(action, tell)
    if action.json:
        print_json(result)
    elif isinstance(shown, str):
        print(shown, end="" if shown.endswith("\n") else "\n")
    else:
        from rich.console import Console

        Console().print(shown)
    return 1 if isinstance(result, RunResult) and not result.right else 0


def _run(action: Action, tell: Progress) -> tuple[object, str | Table]:
    match action:
        case Compile():
            return _compile(action, tell)
        case Verify():
            return _verify(action, tell)
        case Synthesize():
            return _synthesize(action, tell)
        case Simulate():
            return _simulate(action, tell)
        case Run():
            return run_subject(action, tell)
        case Tune():
            return tune(action, tell)
        case Export():
            return _export(action, tell)
        case List():
            return _list()


# ---- compile, verify -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ScheduleSummary:
    """What was proved, in numbers. `text` is the schedule, or None where it went to the file `out`."""

    schema: str
    name: str
    collective: str
    ranks: int
    blocks: int
    steps: int
    messages: int
    channels: int
    slots: int
    output_chunks: int
    out: str | None = None
    svg: str | None = None
    text: str | None = None


def _compile(action: Compile, tell: Progress) -> tuple[ScheduleSummary | OneSidedSummary, str]:
    from sennit.collective.compile import compile_algorithm
    from sennit.collective.library import Options
    from sennit.collective.verify import verify_schedule

    tell(f"compiling {action.name} for {action.ranks} ranks")
    options = Options(action.channels, action.instances, action.pieces)
    algorithm = _algorithm(action.name, action.ranks, action.per_node or action.ranks, options)
    if action.one_sided:
        if action.svg is not None:
            raise CollectiveError("a one-sided program has no messages to draw", fix="leave out --svg or --one-sided")
        found, text = compile_summary(algorithm, None if action.out is None else str(action.out))
        _write(action.out, text)
        return found, text if action.out is None else f"{found}\n{action.out}: {found.collective}"
    schedule = compile_algorithm(algorithm)
    tell("verifying the schedule")
    proof = verify_schedule(schedule)
    _write(action.out, str(schedule))
    _draw(action.svg, schedule, action.per_node)
    summary = _summary("sennit.collective.compile/1", schedule, proof, action.out, action.svg, with_text=True)
    if action.out is None:
        return summary, str(schedule)
    channels = "1 channel" if summary.channels == 1 else f"{summary.channels} channels"
    return summary, f"{proof}\n{action.out}: {schedule.collective}, {channels}, {summary.blocks} thread blocks"


def _verify(action: Verify, tell: Progress) -> tuple[ScheduleSummary | OneSidedSummary, str]:
    from sennit.collective.verify import verify_schedule

    tell(f"reading {action.file}")
    text = _text(action.file)
    if is_one_sided(text):
        found = verify_summary(text)
        return found, str(found)
    schedule = _parsed(text)
    tell("verifying the schedule")
    proof = verify_schedule(schedule)
    return _summary("sennit.collective.verify/1", schedule, proof, None, None, with_text=False), str(proof)


def _summary(
    schema: str, schedule: Schedule, proof: Proof, out: Path | None, svg: Path | None, *, with_text: bool
) -> ScheduleSummary:
    return ScheduleSummary(
        schema=schema,
        name=schedule.name,
        collective=str(schedule.collective),
        ranks=proof.ranks,
        blocks=proof.blocks,
        steps=proof.steps,
        messages=proof.messages,
        channels=len({block.channel for rank in schedule.ranks for block in rank.blocks}),
        slots=schedule.slots,
        output_chunks=proof.output_chunks,
        out=None if out is None else str(out),
        svg=None if svg is None else str(svg),
        text=str(schedule) if with_text and out is None else None,
    )


# ---- synthesize ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SynthesizeResult:
    """`algbw` and `bound` in bytes of the collective's array a second; `optimal` where they are equal."""

    schema: str
    cluster: str
    collective: str
    algbw: float
    bound: float
    optimal: bool
    cuts: tuple[str, ...]
    schedule: ScheduleSummary


def _synthesize(action: Synthesize, tell: Progress) -> tuple[SynthesizeResult, str]:
    from sennit.cluster import Topology, load
    from sennit.collective.compile import compile_algorithm
    from sennit.collective.synthesis import synthesize
    from sennit.collective.synthesis_all_to_all import synthesize_all_to_all
    from sennit.collective.synthesis_network import network_of
    from sennit.collective.verify import verify_schedule
    from sennit.ir.collective import CollectiveName

    network = network_of(Topology.of(load(action.cluster)))
    name = CollectiveName(action.collective)
    tell(f"synthesising {action.collective} for {action.cluster}")
    if name is CollectiveName.ALL_TO_ALL:
        made = synthesize_all_to_all(network)
    else:
        made = synthesize(network, name, trees=action.trees)
    tell(f"compiling and verifying {len(made.algorithm.moves)} moves")
    schedule = compile_algorithm(made.algorithm)
    proof = verify_schedule(schedule)
    _write(action.out, str(schedule))
    certificate = made.certificate
    result = SynthesizeResult(
        schema="sennit.collective.synthesize/1",
        cluster=action.cluster,
        collective=action.collective,
        algbw=certificate.algbw,
        bound=certificate.bound,
        optimal=certificate.optimal,
        cuts=certificate.cuts,
        schedule=_summary("sennit.collective.compile/1", schedule, proof, action.out, None, with_text=True),
    )
    written = "" if action.out is None else f"\nschedule: {action.out}"
    return result, f"{certificate}\n{proof}{written}"


# ---- simulate --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NcclEstimate:
    """What NCCL takes on the same machine by our model: its fastest algorithm, protocol and number of channels."""

    algorithm: str
    protocol: str
    channels: int
    seconds: float
    speedup: float


@dataclass(frozen=True, slots=True)
class CollectiveSimulation:
    """`bus_bandwidth` as nccl-tests counts it, in bytes a second; None for a custom collective."""

    schema: str
    origin: str
    schedule: str
    cluster: str
    bytes: int
    protocol: str
    instances: int
    seconds: float
    bus_bandwidth: float | None
    wire_bytes: int
    nccl: NcclEstimate | None
    trace: str | None
    svg: str | None


def _simulate(action: Simulate, tell: Progress) -> tuple[CollectiveSimulation, str]:
    from sennit.cluster import load
    from sennit.collective.protocol import Protocol
    from sennit.collective.simulate import bus_bandwidth, simulate_schedule
    from sennit.ir.collective import CollectiveSpec
    from sennit.report import write_trace

    cluster, size = load(action.cluster), read_size(action.bytes)
    tell(f"reading or compiling {action.schedule}")
    schedule = _named_or_read(action.schedule, cluster)
    tell(f"simulating {schedule.name} on {action.cluster}")
    wanted = [Protocol.named(action.protocol)] if action.protocol else list(Protocol)
    timelines: list[tuple[Timeline, Protocol]] = [
        (simulate_schedule(schedule, cluster, size, protocol=protocol, instances=action.instances), protocol)
        for protocol in wanted
    ]
    timeline, protocol = min(timelines, key=lambda item: item[0].span)
    if action.trace is not None:
        path = action.trace
        _writing(path, lambda: write_trace(path, [timeline]))
    _draw(action.svg, schedule, cluster.device.per_node)
    spec = schedule.collective
    tell("simulating what NCCL would do")
    result = CollectiveSimulation(
        schema="sennit.collective.simulate/1",
        origin=timeline.origin.value,
        schedule=schedule.name,
        cluster=action.cluster,
        bytes=size,
        protocol=protocol.value,
        instances=action.instances,
        seconds=timeline.span,
        bus_bandwidth=bus_bandwidth(spec, size, timeline.span) if isinstance(spec, CollectiveSpec) else None,
        wire_bytes=timeline.wire_bytes(),
        nccl=_nccl(schedule, cluster, size, timeline.span),
        trace=None if action.trace is None else str(action.trace),
        svg=None if action.svg is None else str(action.svg),
    )
    return result, _describe_simulation(result)


def _nccl(schedule: Schedule, cluster: Cluster, size: int, seconds: float) -> NcclEstimate | None:
    from sennit.collective.baseline import nccl_all_reduce, nccl_all_to_all, nccl_all_to_next
    from sennit.collective.simulate import Machine
    from sennit.ir.collective import CollectiveName, CollectiveSpec

    spec = schedule.collective
    if not isinstance(spec, CollectiveSpec) or spec.ranks != cluster.devices:
        return None
    models = {
        CollectiveName.ALL_REDUCE: nccl_all_reduce,
        CollectiveName.ALL_TO_ALL: nccl_all_to_all,
        CollectiveName.ALL_TO_NEXT: nccl_all_to_next,
    }
    if spec.name not in models:
        return None
    best = models[spec.name](cluster, size, Machine(most_tiles=4))  # a quarter of a second, not several
    return NcclEstimate(best.algorithm, best.protocol, best.channels, best.seconds, best.seconds / seconds)


def _describe_simulation(result: CollectiveSimulation) -> str:
    from sennit.report import units

    copies = "" if result.instances == 1 else f", {result.instances} instances"
    lines = [
        f"{result.origin}: {result.schedule!r} on {result.cluster}, {units.size(result.bytes)}, {result.protocol}{copies}",
        f"  time               {units.seconds(result.seconds)}",
    ]
    if result.bus_bandwidth is not None:
        lines.append(f"  bus bandwidth      {result.bus_bandwidth / 1e9:.1f} GB/s")
    lines.append(f"  bytes on the wire  {units.size(result.wire_bytes)} from all ranks")
    if (nccl := result.nccl) is not None:
        how = f"{nccl.algorithm}, {nccl.protocol}, {nccl.channels} channel{'s' if nccl.channels != 1 else ''}"
        lines.append(
            f"  NCCL, modelled     {units.seconds(nccl.seconds)} ({how}); speed-up over it {nccl.speedup:.2f}x"
        )
    if result.trace is not None:
        lines.append(f"trace: {result.trace} (open it in ui.perfetto.dev)")
    return "\n".join(lines)


# ---- export, list ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExportResult:
    """`text` is the export, or None where it went to the file `out`."""

    schema: str
    name: str
    format: str
    bytes: int
    out: str | None
    text: str | None


def _export(action: Export, tell: Progress) -> tuple[ExportResult, str]:
    from sennit.collective.export_json import PlanOptions, mscclpp_json
    from sennit.collective.export_xml import XmlOptions, msccl_xml
    from sennit.collective.import_xml import read_msccl_xml
    from sennit.collective.protocol import Protocol

    tell(f"reading {action.file}")
    given = _text(action.file)
    least, most = read_size(action.min_bytes), read_size(action.max_bytes)
    if is_one_sided(given):
        return _exported(action, *exported(given, action.to, least, most or 2**64 - 1))
    schedule = _parsed(given)
    tell(f"writing and checking {action.to}")
    if action.to == "msccl-xml":
        text = msccl_xml(schedule, XmlOptions(Protocol.named(action.protocol), least, most))
        read_msccl_xml(text, collective=schedule.collective)  # what was written is what is proved
    else:
        text = mscclpp_json(
            schedule,
            PlanOptions(ranks_per_node=action.ranks_per_node, min_bytes=least, max_bytes=most or 2**64 - 1),
        )
    return _exported(action, schedule.name, text)


def _exported(action: Export, name: str, text: str) -> tuple[ExportResult, str]:
    _write(action.out, text)
    result = ExportResult(
        "sennit.collective.export/1",
        name,
        action.to,
        len(text.encode()),
        None if action.out is None else str(action.out),
        text if action.out is None else None,
    )
    return result, text if action.out is None else f"{action.out}: {name!r} as {action.to}"


@dataclass(frozen=True, slots=True)
class AlgorithmSummary:
    """`across_nodes`: only for more than one node."""

    name: str
    collective: str
    summary: str
    across_nodes: bool


@dataclass(frozen=True, slots=True)
class ListResult:
    schema: str
    algorithms: tuple[AlgorithmSummary, ...]


def _list() -> tuple[ListResult, Table]:
    from rich.table import Table

    from sennit.collective.library import recipes

    found = tuple(AlgorithmSummary(r.name, r.collective.value, r.summary, r.across) for r in recipes())
    table = Table("algorithm", "collective", "nodes", "what it does")
    table.columns[0].no_wrap = True
    for entry in found:
        table.add_row(entry.name, entry.collective, "2 or more" if entry.across_nodes else "any", entry.summary)
    return ListResult("sennit.collective.list/1", found), table


# ---- files and sizes -------------------------------------------------------------------------------------------------


def _named_or_read(name: str, cluster: Cluster) -> Schedule:
    from sennit.collective.library import Options

    if name == "-" or Path(name).is_file():
        return _read(Path(name))
    return _built(name, cluster.devices, cluster.device.per_node, Options())


def _built(name: str, ranks: int, per_node: int, options: Options) -> Schedule:
    from sennit.collective.compile import compile_algorithm

    return compile_algorithm(_algorithm(name, ranks, per_node, options))


def _algorithm(name: str, ranks: int, per_node: int, options: Options) -> Algorithm:
    from sennit.collective.library import recipe

    found = recipe(name)
    if ranks < 1 or per_node < 1 or ranks % per_node:
        raise CollectiveError(
            f"{ranks} ranks are no whole number of nodes of {per_node}",
            where=f"algorithm {name!r}",
            fix="let --per-node divide --ranks",
        )
    nodes = ranks // per_node
    if found.across and nodes == 1:
        raise CollectiveError(
            f"{name} is for more than one node, and {ranks} ranks are one",
            where=f"algorithm {name!r}",
            fix="give the ranks of a node with --per-node, or a cluster of several nodes",
        )
    return found.build(nodes, per_node, options)


def _read(path: Path) -> Schedule:
    return _parsed(_text(path))


def _text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CollectiveError(
            f"cannot read {path}: {reason}", fix="name a file with a schedule's text or MSCCL XML, or - for stdin"
        ) from error


def _parsed(text: str) -> Schedule:
    from sennit.collective.import_xml import read_msccl_xml
    from sennit.collective.verify import verify_schedule
    from sennit.ir.schedule import Schedule

    if text.lstrip().startswith("<"):
        return read_msccl_xml(text)
    schedule = Schedule.parse(text)
    verify_schedule(schedule)
    return schedule


def _write(path: Path | None, text: str) -> None:
    from sennit.report import write_text

    if path is not None:
        _writing(path, lambda: write_text(path, text))


def _draw(path: Path | None, schedule: Schedule, per_node: int | None) -> None:
    if path is not None:
        from sennit.report.collective_svg import schedule_svg

        _write(path, schedule_svg(schedule, ranks_per_node=per_node))


def _writing(path: Path, write: Callable[[], None]) -> None:
    try:
        write()
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", fix="name a file that you may write") from error
