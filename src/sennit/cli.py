"""The command line:

`sennit demo | plan | explain | diff | simulate | fuse | profile | reshard | collective | cluster | probe | doctor`.

A command is a frozen dataclass of its options, which tyro reads from the arguments, and a function that runs it. The
functions import what they need when they run: `sennit --help` loads neither torch nor numpy.

    stdout   the result: tables for people, or with --json one document of a type in this file (docs/commands.md)
    stderr   progress (only on a terminal, never with --json), the log (SENNIT_LOG), errors
    status   0 success; 1 the answer is no (doctor: sennit cannot run here), or a bug in sennit, with its traceback;
             2 an error that the user can fix, or wrong arguments; 130 interrupted

Every result carries `schema`, the name and version of its document; a field is added without a new version, and removed
or changed only with one.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

import sennit
from sennit.cli_cluster import Probe, ShowCluster, run_cluster_command
from sennit.cli_collective import Collective
from sennit.cli_collective_run import run_collective
from sennit.cli_fuse import Fuse, run_fuse
from sennit.cli_plan import DiffPlans, Explain, PlanModel, run_plan_command
from sennit.cli_profile import Profile, run_profile
from sennit.cli_reshard import Reshard, reshard
from sennit.cli_simulate import Simulate, run_simulate
from sennit.environment import current_environment
from sennit.errors import SennitError

if TYPE_CHECKING:
    from sennit.doctor import Finding
    from sennit.report import Comparison, PlanResult

__all__ = ["Demo", "Doctor", "main"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]


@dataclass(frozen=True, slots=True)
class Demo:
    """Compare parallel plans of a small GPT: simulate each, run each on CPU ranks of this machine, write a report.

    Example: sennit demo --layers 4 --out my-report
    """

    out: Path = Path("sennit-demo")
    """The folder that the HTML report and the traces are written to."""
    layers: int = 4
    """Transformer layers of the model."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Doctor:
    """Say what this machine has of what sennit can use, and what each missing part costs.

    Example: sennit doctor --json
    """

    json: Json = False
    debug: Debug = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Wrong arguments end in tyro, which exits with status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if list(arguments) == ["--version"]:
        print(f"sennit {sennit.__version__}")
        return 0
    debug = "--debug" in arguments  # known before the environment is read, whose errors it concerns too
    try:
        environment = current_environment()
        debug = debug or environment.debug
        logging.basicConfig(
            level=environment.log_level, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr
        )
        command = tyro.cli(
            Demo
            | Annotated[PlanModel, tyro.conf.subcommand("plan")]
            | Explain
            | Annotated[DiffPlans, tyro.conf.subcommand("diff")]
            | Simulate
            | Fuse
            | Profile
            | Reshard
            | Collective
            | Annotated[ShowCluster, tyro.conf.subcommand("cluster")]
            | Probe
            | Doctor,
            prog="sennit",
            description="Plan, check, simulate and run distributed PyTorch programs. `sennit --version` prints the version.",
            args=arguments,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
        )
        return _run(command)
    except SennitError as error:
        if debug:
            traceback.print_exc()
        else:
            print(f"sennit: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(
    command: Demo
    | PlanModel
    | Explain
    | DiffPlans
    | Simulate
    | Fuse
    | Profile
    | Reshard
    | Collective
    | ShowCluster
    | Probe
    | Doctor,
) -> int:
    match command:
        case Demo():
            return _demo(command)
        case PlanModel() | Explain() | DiffPlans():
            return run_plan_command(command, _print_json, lambda shown: _progress(shown=shown))
        case Simulate():
            return run_simulate(command, _print_json, lambda shown: _progress(shown=shown))
        case Fuse():
            return run_fuse(command, _print_json, lambda shown: _progress(shown=shown))
        case Profile():
            return run_profile(command, _print_json, lambda shown: _progress(shown=shown))
        case Probe() | ShowCluster():
            return run_cluster_command(command, _print_json, lambda shown: _progress(shown=shown))
        case Reshard():
            return reshard(command)
        case Collective():
            return run_collective(command, _print_json, lambda shown: _progress(shown=shown))
        case Doctor():
            return _doctor(command)


# ---- demo ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    cluster: str
    mesh: str
    step_seconds: float
    peak_memory_bytes: int
    wire_bytes: int


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """`max_difference` is the greatest one to the single-device run, in the tensor named `worst`."""

    ranks: int
    backend: str
    step_seconds: float
    max_difference: float
    worst: str
    verdict: str


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """`prediction_error` is signed and relative: 0.1 where the simulation says 10 % longer than was measured."""

    name: str
    summary: str
    simulated: tuple[SimulatedPlan, ...]
    measured: MeasuredPlan | None
    prediction_error: float | None


@dataclass(frozen=True, slots=True)
class DemoResult:
    schema: str
    out: str
    model: str
    reference_seconds: float
    best: str
    why: str
    plans: tuple[PlanSummary, ...]


def _demo(command: Demo) -> int:
    from rich.console import Console

    from sennit.demo.comparison import DemoOptions, run_demo
    from sennit.report import ComparisonView

    with _progress(shown=not command.json) as progress:
        comparison = run_demo(DemoOptions(out=command.out, layers=command.layers), progress)
    if command.json:
        _print_json(_demo_result(command, comparison))
    else:
        Console().print(ComparisonView(comparison))
        print(f"report: {command.out / 'report.html'}   trace for ui.perfetto.dev: {command.out / 'trace.json.gz'}")
        print(f"programs, and the source that each rank runs: {command.out / 'programs'}")
    return 0


def _demo_result(command: Demo, comparison: Comparison) -> DemoResult:
    return DemoResult(
        schema="sennit.demo/1",
        out=str(command.out),
        model=comparison.model,
        reference_seconds=comparison.reference_seconds,
        best=comparison.best.name,
        why=comparison.why(),
        plans=tuple(_plan_summary(result) for result in comparison.results),
    )


def _plan_summary(plan: PlanResult) -> PlanSummary:
    simulated = tuple(
        SimulatedPlan(run.cluster, run.mesh, run.step, run.peak_memory, run.wire_bytes) for run in plan.simulated
    )
    measured = None
    if (run := plan.measured) is not None:
        measured = MeasuredPlan(run.ranks, run.backend, run.step, run.max_difference, run.worst, run.verdict.value)
    return PlanSummary(plan.name, plan.summary, simulated, measured, plan.error)


# ---- doctor ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DoctorResult:
    """`ready` is false where a required part is missing."""

    schema: str
    ready: bool
    findings: tuple[Finding, ...]


def _doctor(command: Doctor) -> int:
    from sennit.doctor import examine

    with _progress(shown=not command.json) as progress:
        progress("looking at this machine")
        diagnosis = examine()
    if command.json:
        _print_json(DoctorResult("sennit.doctor/1", diagnosis.ready, diagnosis.findings))
    else:
        _print_findings(diagnosis.findings)
        print("sennit can run here." if diagnosis.ready else "sennit cannot run here: a required part is missing.")
    return 0 if diagnosis.ready else 1


def _print_findings(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sennit.doctor import Status

    colours = {Status.PRESENT: "green", Status.CAUTION: "yellow", Status.MISSING: "red"}
    table = Table("part", "status", "found", "what it costs")
    for finding in findings:
        colour = "yellow" if finding.status is Status.MISSING and not finding.required else colours[finding.status]
        status = f"[{colour}]{finding.status.value}[/{colour}]"
        table.add_row(finding.part, status, escape(finding.detail), escape(finding.cost))
    Console().print(table)


# ---- output ----------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done now. Nothing where stderr is not a terminal."""
    if not shown or not sys.stderr.isatty():
        yield lambda message: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def _print_json(result: object) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
