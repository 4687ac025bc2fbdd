"""The command `sennit simulate`: a program on a cluster, with what-ifs, and where every cost comes from.

It follows the rules of `cli.py`: a frozen dataclass of options, which tyro reads, and a function that runs it and
imports what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sennit.errors import ClusterError, ProgramError, RunError

if TYPE_CHECKING:
    from sennit.cluster import Cluster
    from sennit.cost.measured_torch import MeasuredOperators
    from sennit.ir.program import Program
    from sennit.ir.timeline import Timeline
    from sennit.sim import Simulation

__all__ = ["Simulate", "SimulateResult", "read_text", "run_simulate"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Simulate:
    """Check a program and simulate one step of it on a cluster.

    Example: sennit simulate program.txt --cluster dgx-h100:2 --what-if "node 1 compute x1.1" --trace step.json.gz
    """

    program: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PROGRAM_FILE")]
    """The text of a program (its grammar stands in ir/program.py); - reads stdin."""
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """A preset, as dgx-h100 or dgx-h100:4 for four nodes, or a TOML file."""
    what_if: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="CHANGE")] = ()
    """A change of the cluster, may be given several times: "node 3 compute x1.1", "link nic:3 down",
    "bandwidth fabric x0.5", "latency nvlink x2". The result stands beside that without it."""
    optimizer: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Count the step and the state of an optimizer: sgd, momentum, adam, adamw; -master keeps a copy in f32."""
    iterations: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Play so many steps in a row, and say how long a further one takes."""
    as_written: bool = False
    """Each collective by itself.

    Otherwise as ranks send them: sums of gradients in buckets, parameters in pieces a run ahead.
    """
    fused_attention: bool = False
    """Take attention that was captured in its mathematical form as one kernel that stores no scores, as eager torch on
    a GPU.
    """
    reserved: bool = False
    """Also say what torch's caching allocator takes from a GPU for the step, fragmentation included."""
    profile_here: bool = False
    """Time the program's own operators on this machine first, on one thread: for clusters of CPU ranks."""
    trace: File = None
    """Also write the timeline as a trace for ui.perfetto.dev (gzipped JSON)."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class LaneSummary:
    """The devices of a lane run the same steps; each figure is that of the device for which it is greatest."""

    lane: str
    devices: tuple[int, ...]
    compute_seconds: float
    exposed_seconds: float
    idle_seconds: float
    peak_memory_bytes: int
    memory_bytes: dict[str, int]
    reserved_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Seconds that went to a stream."""

    stream: str
    seconds: float
    longest: str


@dataclass(frozen=True, slots=True)
class CostSource:
    """Compute seconds of a lane's device that rest on one thing: measured, estimated or data sheet."""

    lane: str
    basis: str
    source: str
    seconds: float
    steps: int
    operators: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SimulateResult:
    """`exposed_seconds` is the greatest of all devices; `wire_bytes` counts what all devices send in one step.
    `unchanged_step_seconds` is the step without the what-ifs, `steady_step_seconds` that of a further iteration."""

    schema: str
    origin: str
    program: str
    cluster: str
    devices: int
    step_seconds: float
    exposed_seconds: float
    wire_bytes: int
    lanes: tuple[LaneSummary, ...]
    trace: str | None
    what_if: tuple[str, ...] = ()
    unchanged_step_seconds: float | None = None
    steady_step_seconds: float | None = None
    exposed_by: tuple[Share, ...] = ()
    critical_path: tuple[Share, ...] = ()
    costs: tuple[CostSource, ...] = ()


def run_simulate(
    command: Simulate,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    from sennit.ir.program import Program

    with progress(not command.json) as say:
        say(f"reading {command.program}")
        program = Program.parse(read_text(command.program))
        if command.fused_attention:
            from sennit.sim import fuse_attention

            program = fuse_attention(program)
        simulation, unchanged = _check_and_time(command, program, say)
    result = _simulate_result(command, program, simulation, unchanged)
    if command.json:
        print_json(result)
    else:
        _print_simulation(result)
    return 0


def _check_and_time(command: Simulate, program: Program, say: Progress) -> tuple[Simulation, Timeline | None]:
    from sennit.cluster import load
    from sennit.ir.program_check import check_program
    from sennit.sim import optimizer, parse_what_if, simulate_fully

    if command.iterations < 1:
        raise ProgramError(f"{command.iterations} iterations", fix="play at least one")
    what_if = [parse_what_if(text) for text in command.what_if]
    chosen = optimizer(command.optimizer) if command.optimizer is not None else None
    say("checking the program")
    check_program(program)
    cluster = load(command.cluster)
    operators = _timed_here(command, program, cluster, say) if command.profile_here else None
    if not command.as_written:
        from sennit.kernels import in_buckets

        program = in_buckets(program)
    say(f"simulating {len(program.devices)} devices on {command.cluster}")
    result = simulate_fully(
        program,
        cluster,
        what_if=what_if,
        optimizer=chosen,
        iterations=command.iterations,
        reserved=command.reserved,
        operators=operators,
    )
    unchanged = None
    if what_if:
        unchanged = simulate_fully(program, cluster, optimizer=chosen, operators=operators).timeline
    if command.trace is not None:
        from sennit.report import write_trace

        try:
            write_trace(command.trace, [result.timeline])
        except OSError as error:
            raise RunError(
                f"cannot write {command.trace}: {error.strerror}", fix="name a file that you may write"
            ) from error
    return result, unchanged


def _timed_here(command: Simulate, program: Program, cluster: Cluster, say: Progress) -> MeasuredOperators:
    from sennit.cost.measured_torch import MeasuredOperators

    if cluster.host is None:
        raise ClusterError(
            f"the devices of {command.cluster!r} are no CPU ranks, and this machine's operators say nothing of them",
            fix="simulate on the cluster laptop, or on one that sennit probe wrote; or leave --profile-here out",
        )
    return MeasuredOperators.of(program, say=say)


def _simulate_result(
    command: Simulate, program: Program, simulation: Simulation, unchanged: Timeline | None
) -> SimulateResult:
    from sennit.sim import critical_parts, exposed_parts

    timeline = simulation.timeline
    reserved = dict(simulation.reserved)
    lanes = tuple(_lane_summary(timeline, lane.name, lane.devices, reserved.get(lane.name)) for lane in program.lanes)
    worst = max(timeline.unlike(program.devices), key=timeline.exposed, default=0)
    return SimulateResult(
        schema="sennit.simulate/1",
        origin=timeline.origin.value,
        program=program.name,
        cluster=command.cluster,
        devices=len(program.devices),
        step_seconds=timeline.span,
        exposed_seconds=max((lane.exposed_seconds for lane in lanes), default=0.0),
        wire_bytes=timeline.wire_bytes(),
        lanes=lanes,
        trace=None if command.trace is None else str(command.trace),
        what_if=command.what_if,
        unchanged_step_seconds=unchanged.span if unchanged is not None else None,
        steady_step_seconds=simulation.steady.period if simulation.steady is not None else None,
        exposed_by=tuple(
            Share(part.stream, part.seconds, part.events[0][0]) for part in exposed_parts(timeline, worst)
        ),
        critical_path=tuple(Share(part.stream, part.seconds, part.events[0][0]) for part in critical_parts(timeline)),
        costs=tuple(
            CostSource(lane, line.basis.value, line.source, line.seconds, line.steps, line.operators)
            for lane, lines in simulation.costs
            for line in lines
        ),
    )


def _lane_summary(timeline: Timeline, name: str, devices: tuple[int, ...], reserved: int | None) -> LaneSummary:
    from sennit.ir.event import Category
    from sennit.sim import peak_by_kind

    shown = timeline.unlike(devices)
    fullest = max(shown, key=timeline.peak_memory)
    return LaneSummary(
        lane=name,
        devices=devices,
        compute_seconds=max(timeline.busy(device, Category.COMPUTE) for device in shown),
        exposed_seconds=max(timeline.exposed(device) for device in shown),
        idle_seconds=max(timeline.idle(device) for device in shown),
        peak_memory_bytes=timeline.peak_memory(fullest),
        memory_bytes={kind.value: size for kind, size in peak_by_kind(timeline, fullest).items()},
        reserved_memory_bytes=reserved,
    )


def _print_simulation(result: SimulateResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from sennit.ir.mesh import print_ranges
    from sennit.report import units

    print(f"{result.origin}: one step of {result.program!r} on {result.cluster}, {result.devices} devices")
    print(f"  step time              {units.seconds(result.step_seconds)}")
    if result.unchanged_step_seconds is not None:
        change = result.step_seconds / result.unchanged_step_seconds - 1 if result.unchanged_step_seconds else 0.0
        print(f"  without the what-ifs   {units.seconds(result.unchanged_step_seconds)} ({change:+.1%} with them)")
    if result.steady_step_seconds is not None:
        print(f"  one step after another {units.seconds(result.steady_step_seconds)}")
    print(f"  exposed communication  {units.seconds(result.exposed_seconds)} on the worst device")
    for share in result.exposed_by:
        print(f"    {share.stream:<20} {units.seconds(share.seconds)}, most of it {share.longest!r}")
    print(f"  bytes on the wire      {units.size(result.wire_bytes)} from all devices")
    table = Table(
        "lane", "devices", "compute", "exposed", "idle", "peak memory", "of it", title=f"worst device, {result.origin}"
    )
    for lane in result.lanes:
        spans = (lane.compute_seconds, lane.exposed_seconds, lane.idle_seconds)
        kinds = ", ".join(f"{kind} {units.size(size)}" for kind, size in lane.memory_bytes.items())
        if lane.reserved_memory_bytes is not None:
            kinds += f"; reserved {units.size(lane.reserved_memory_bytes)}"
        ranges = print_ranges(lane.devices)
        table.add_row(lane.lane, ranges, *map(units.seconds, spans), units.size(lane.peak_memory_bytes), kinds)
    Console().print(table)
    costs = Table("lane", "compute", "steps", "rests on", title=f"where the compute times come from, {result.origin}")
    for cost in result.costs:
        costs.add_row(cost.lane, units.seconds(cost.seconds), str(cost.steps), f"{cost.basis}: {cost.source}")
    Console().print(costs)
    if result.trace is not None:
        print(f"trace: {result.trace} (open it in ui.perfetto.dev)")


def read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ProgramError(
            f"cannot read {path}: {reason}", fix="name a file that holds the text of a program, or - for stdin"
        ) from error
