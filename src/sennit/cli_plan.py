"""The commands `sennit plan`, `sennit explain` and `sennit diff`: search for a plan, say why it is as it is, compare
two.

`plan` writes the choice as text (its grammar stands in plan/search/choice.py); `explain` and `diff` read such files.
All times and bytes that they print are simulated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sennit.errors import ParseError, PlanError, RunError

if TYPE_CHECKING:
    from sennit.ir.graph import Graph
    from sennit.plan.search import Choice, Found

__all__ = ["DiffPlans", "Explain", "PlanModel", "PlanResult", "run_plan_command"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
ClusterName = Annotated[str, tyro.conf.arg(metavar="NAME")]
Pin = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GLOB:WORD=VALUE,...")]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PlanModel:
    """Search for the fastest plan of a model on a cluster that fits its memory; all figures are simulated.

    Example: sennit plan gpt2:batch=64,dtype=bf16 --cluster dgx-h100 --pin "*:tp=2" --out gpt2.plan
    """

    model: Model
    """A model: a name, family.NAME, hf.FOLDER or module:function, with :batch=N,layers=N,dtype=bf16 behind it
    (docs/commands.md).
    """
    cluster: ClusterName
    """A preset, as dgx-h100 or dgx-h100:4 for four nodes, or a TOML file."""
    pin: Pin = ()
    """A decision taken beforehand, may be given several times: "*:tp=4,pp=2", "*.h.*:keep=none"."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw-master"
    """Whose state is counted: sgd, momentum, adam, adamw; -master keeps a copy in f32."""
    co_shard: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N")] = ()
    """Also look at units in so many pieces, one after another on a device."""
    interlaced: bool = False
    """Also look at plans with embeddings and head on all devices, between stages of layers."""
    baselines: bool = False
    """Also search what Megatron, DeepSpeed and Alpa could do, in the same simulator."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the choice, for `sennit explain` and `sennit diff`."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Explain:
    """Say how a plan treats the operators of a module, why, and what the alternatives cost.

    Example: sennit explain "*.mlp*" gpt2:batch=64,dtype=bf16 --cluster dgx-h100
    """

    op: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODULE_GLOB")]
    """Modules, by a glob of their paths."""
    model: Model
    """As for `sennit plan`."""
    cluster: ClusterName
    """As for `sennit plan`."""
    pin: Pin = ()
    """As for `sennit plan`."""
    optimizer: Annotated[str, tyro.conf.arg(metavar="NAME")] = "adamw-master"
    """As for `sennit plan`."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class DiffPlans:
    """Compare two plans that `sennit plan --out` wrote. The exit status is 1 where they differ.

    Example: sennit diff old.plan new.plan
    """

    old: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="OLD_FILE")]
    """A plan."""
    new: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="NEW_FILE")]
    """Another."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Alternative:
    title: str
    step_seconds: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class PlanResult:
    """`shares` are the parts of the step, by what they go to; `bound_seconds` is below every plan of the space;
    `search_seconds` are measured.
    """

    schema: str
    origin: str
    model: str
    cluster: str
    title: str
    plan: str
    step_seconds: float
    memory_bytes: int
    bound_seconds: float
    gap: float
    shares: dict[str, float]
    alternatives: tuple[Alternative, ...]
    refused: dict[str, str]
    configs: int
    estimated: int
    probes: int
    capture_seconds: float
    search_seconds: float
    baselines: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One way to treat the units of an item, and what it costs a unit for each micro-batch; the chosen one is marked."""

    way: str
    chosen: bool
    forward_seconds: float
    backward_seconds: float
    collective_seconds: float
    activation_bytes: int
    working_bytes: int
    parameter_bytes: int


@dataclass(frozen=True, slots=True)
class ExplainedItem:
    item: str
    units: int
    stages: tuple[int, ...]
    options: tuple[OptionRow, ...]


@dataclass(frozen=True, slots=True)
class ExplainResult:
    schema: str
    origin: str
    title: str
    why: str
    items: tuple[ExplainedItem, ...]


@dataclass(frozen=True, slots=True)
class Difference:
    name: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class DiffResult:
    schema: str
    differences: tuple[Difference, ...]


def run_plan_command(
    command: PlanModel | Explain | DiffPlans,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    match command:
        case PlanModel():
            return _plan(command, print_json, progress)
        case Explain():
            return _explain(command, print_json, progress)
        case DiffPlans():
            return _diff(command, print_json)


def parse_pins(pins: tuple[str, ...]) -> dict[str, dict[str, object]]:
    """`"*.h.*:keep=none,co=2"` as a mapping."""
    found: dict[str, dict[str, object]] = {}
    for text in pins:
        glob, colon, words = text.rpartition(":")
        if not colon or not glob or not words:
            raise ParseError(f"{text!r} is no pin", fix='write GLOB:WORD=VALUE, as "*:tp=4" or "*.h.*:keep=none"')
        for word in words.split(","):
            name, equals, value = word.partition("=")
            given: object = int(value) if value.isdigit() else {"true": True, "false": False}.get(value, value)
            found.setdefault(glob, {})[name] = True if not equals else given
    return found


# ---- plan ------------------------------------------------------------------------------------------------------------


def _captured(model: str) -> Graph:
    from sennit.capture import capture_call
    from sennit.cli_model import load_model

    made, sample = load_model(model, memory=False)
    return capture_call(made, sample.args, dict(sample.kwargs)).graph


def _plan(
    command: PlanModel,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    from sennit.cluster import load
    from sennit.plan.search import Space, search
    from sennit.plan.search.baselines import baselines

    cluster, pins = load(command.cluster), parse_pins(command.pin)
    with progress(not command.json) as say:
        say(f"capturing {command.model}")
        begin = time.perf_counter()
        graph = _captured(command.model)
        captured = time.perf_counter()
        space = Space(pieces=(1, *command.co_shard), interlaced=command.interlaced)
        found = search(graph, cluster, space=space, optimizer=command.optimizer, pins=pins, say=say)
        searched = time.perf_counter()
        others: list[Alternative] = []
        for baseline in baselines() if command.baselines else ():
            say(f"searching as {baseline.name} would")
            try:
                best = search(graph, cluster, space=baseline, optimizer=command.optimizer, say=say).choice
                others.append(Alternative(f"{baseline.name}: {best.title}", best.step, best.memory))
            except PlanError as error:
                others.append(Alternative(f"{baseline.name}: {error.what}", float("inf"), 0))
    if command.out is not None:
        _write(command.out, str(found.choice))
    result = _plan_result(command, found, captured - begin, searched - captured, tuple(others))
    if command.json:
        print_json(result)
    else:
        _print_plan(result, found, command.out)
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", fix="give a path that can be written") from None


def _plan_result(
    command: PlanModel, found: Found, capture: float, searched: float, others: tuple[Alternative, ...]
) -> PlanResult:
    choice, parts = found.choice, found.breakdown
    return PlanResult(
        schema="sennit.plan/1",
        origin="simulated",
        model=command.model,
        cluster=command.cluster,
        title=choice.title,
        plan=str(choice),
        step_seconds=choice.step,
        memory_bytes=choice.memory,
        bound_seconds=choice.bound,
        gap=choice.gap,
        shares={
            "compute": parts.compute,
            "recompute": parts.recompute,
            "collectives": parts.talk,
            "bubble": parts.bubble,
            "gradients": parts.sync,
            "optimizer": parts.optimizer,
        },
        alternatives=tuple(Alternative(other.title, other.step, other.memory) for other in found.alternatives),
        refused=dict(found.refusals),
        configs=found.configs,
        estimated=found.estimated,
        probes=found.probes,
        capture_seconds=capture,
        search_seconds=searched,
        baselines=others,
    )


def _print_plan(result: PlanResult, found: Found, out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    from sennit.report.units import decimal_size, seconds

    console = Console()
    table = Table("plan (all figures simulated)", "step", "memory")
    table.add_row(f"[bold]{result.title}[/bold]", seconds(result.step_seconds), decimal_size(result.memory_bytes))
    for other in result.alternatives:
        table.add_row(other.title, seconds(other.step_seconds), decimal_size(other.memory_bytes))
    for other in result.baselines:
        fits = other.step_seconds != float("inf")
        table.add_row(
            other.title,
            seconds(other.step_seconds) if fits else "-",
            decimal_size(other.memory_bytes) if fits else "-",
        )
    console.print(table)
    print(f"where the step goes: {found.why()}")
    print(
        f"no plan of this space is faster than {seconds(result.bound_seconds)}: this one is {100 * result.gap:.1f} % above that bound"
    )
    for number, stage in enumerate(found.choice.stages):
        if number < 2 or number == len(found.choice.stages) - 1:
            print(f"stage {number}: {', '.join(map(str, stage))}")
        elif number == 2:
            print("...")
    print(
        f"{result.configs} configurations, {result.probes} probes, {result.estimated} schedules; capture {result.capture_seconds:.1f} s, "
        f"search {result.search_seconds:.1f} s"
    )
    if out is not None:
        print(f"written to {out}")


# ---- explain ---------------------------------------------------------------------------------------------------------


def _explain(
    command: Explain,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    from sennit.cluster import load
    from sennit.plan.search import search
    from sennit.plan.search.explain import explain

    cluster, pins = load(command.cluster), parse_pins(command.pin)
    with progress(not command.json) as say:
        say(f"capturing {command.model}")
        graph = _captured(command.model)
        found = search(graph, cluster, optimizer=command.optimizer, pins=pins, say=say)
        say("costing the alternatives")
        rows = explain(command.op, found.choice, graph, cluster, command.optimizer)
    items = tuple(
        ExplainedItem(
            row.item,
            row.units,
            row.stages,
            tuple(
                OptionRow(
                    str(option.way),
                    option.chosen,
                    option.cost.forward,
                    option.cost.together,
                    option.cost.talk,
                    option.cost.activations,
                    option.cost.working,
                    option.cost.parameters,
                )
                for option in row.options
            ),
        )
        for row in rows
    )
    result = ExplainResult("sennit.explain/1", "simulated", found.choice.title, found.why(), items)
    if command.json:
        print_json(result)
    else:
        _print_explained(result)
    return 0


def _print_explained(result: ExplainResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from sennit.report.units import decimal_size, seconds

    print(f"the plan: {result.title}")
    print(f"where its step goes: {result.why}")
    for item in result.items:
        # a line of its own: names of modules are long, and a terminal may have 80 columns
        print(f"\n{item.item}, {item.units} unit{'s' if item.units > 1 else ''}")
        table = Table("option", "forward", "backward", "on wires", "kept", "working", "weights")
        for option in item.options:
            table.add_row(
                f"[bold]{option.way}\n(chosen)" if option.chosen else option.way,
                seconds(option.forward_seconds),
                seconds(option.backward_seconds),
                seconds(option.collective_seconds),
                *map(decimal_size, (option.activation_bytes, option.working_bytes, option.parameter_bytes)),
            )
        Console().print(table)
    print("simulated, for one unit and one micro-batch on one device")


# ---- diff ------------------------------------------------------------------------------------------------------------


def _diff(command: DiffPlans, print_json: Callable[[object], None]) -> int:
    from sennit.plan.search import differences

    rows = differences(_read(command.old), _read(command.new))
    if command.json:
        print_json(DiffResult("sennit.diff/1", tuple(Difference(*row) for row in rows)))
    elif not rows:
        print("the plans are equal")
    else:
        from rich.console import Console
        from rich.table import Table

        table = Table("", str(command.old), str(command.new))
        for row in rows:
            table.add_row(*row)
        Console().print(table)
    return 1 if rows else 0


def _read(path: Path) -> Choice:
    from sennit.plan.search import Choice

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror}", fix="give a file that `sennit plan --out` wrote"
        ) from None
    return Choice.parse(text)
