"""The command `sennit fuse`: kernels and buckets for data-parallel training of a model on a cluster, simulated, beside
what people run today.

It follows the rules of `cli.py`: a frozen dataclass of options, which tyro reads, and a function that runs it and
imports what it needs when it runs. Ctrl-C ends the search, not the command: the best strategy so far is reported.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sennit.cli_model import load_model
from sennit.errors import ClusterError, PlanError, RunError

if TYPE_CHECKING:
    from sennit.cluster import Cluster
    from sennit.cost.database import Database, Place
    from sennit.fuse.compare import Study, Variant
    from sennit.fuse.costs_torch import Chosen
    from sennit.fuse.model import StepModel
    from sennit.ir.graph import Graph
    from sennit.ir.strategy import Strategy

__all__ = ["Fuse", "FuseResult", "run_fuse"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fuse:
    """Choose kernels and gradient buckets for data-parallel training, and compare them with DDP, compiled DDP and the
    bounds.

    Example: sennit fuse gpt2:layers=4,batch=8 --cluster h200x8 --out fused
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A name (gpt, gpt2, bert-base, vgg19, ...), with sizes as gpt2:layers=2,batch=8; module:function or
    file.py:function.
    """
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """A preset, as dgx-h100 or dgx-h100:4 for four nodes, or a TOML file."""
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many devices of the cluster train, from the first; all without it."""
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 60.0
    """How long to search, all variants together."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """What the search draws from."""
    ablation: bool = True
    """Also search with operators, tensors and waits across steps switched off."""
    across_steps: bool = True
    """Allow waits in the next step."""
    profile: File = None
    """Measured times, as `sennit profile` writes them."""
    measure: bool = False
    """Measure the kernels whose estimate is unsure on this machine, which must be one of the cluster's; into the
    profile too, if one is named.
    """
    measured_channel: bool = False
    """Take the all-reduce that the profile has for so many ranks, in place of the cluster's network."""
    fused_attention: bool = True
    """Take attention as one kernel that stores no scores, as `DataParallel` runs it; --no-fused-attention has the
    mathematical form that was captured.
    """
    strategy: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE")] = ()
    """A saved strategy to time beside the others and to start from; may be given several times."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Write the strategy, the picture of the steps and a page with both to this folder."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class VariantSummary:
    """`exposed_seconds` is how long the compute stream waits in a step; `settled` is false where steps did not come to
    one length.
    """

    name: str
    step_seconds: float
    exposed_seconds: float
    kernels: int
    buckets: int
    settled: bool


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the kernels of the best strategy:

    `full_overlap` is the greater of compute and communication; `tight` holds where all waits are in the same step;
    `structural` holds whatever the buckets.
    """

    full_overlap_seconds: float
    tight_seconds: float
    structural_seconds: float


@dataclass(frozen=True, slots=True)
class FuseResult:
    """`gap` is the step of the last search over the structural bound of its kernels; `over_ddp` the fastest DDP of the
    sweep over the best step.
    """

    schema: str
    origin: str
    model: str
    cluster: str
    devices: int
    operators: int
    gradient_bytes: int
    costs: str
    variants: tuple[VariantSummary, ...]
    best: str
    bounds: Bounds
    gap: float
    over_ddp: float
    over_compiled_ddp: float
    candidates: int
    search_seconds: float
    strategy: str
    out: str | None


def run_fuse(
    command: Fuse,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    import time

    from sennit.fuse.compare import study
    from sennit.fuse.search import SearchOptions

    if command.seconds <= 0:
        raise PlanError(f"{command.seconds} seconds of search", fix="give more than 0")
    with progress(not command.json) as say, _until_interrupted() as stop:
        graph, cluster, count = _subject(command, say)
        model, chosen = _step_model(command, graph, cluster, count)
        costs = chosen.source
        saved = [_read(path) for path in command.strategy]
        if command.measure:
            model, count_measured = _measure(command, model, cluster, say)
            costs = f"{count_measured} kernels measured here, where unsure; else {costs}"
        start = time.monotonic()
        options = SearchOptions(
            seconds=command.seconds, seed=command.seed, across_steps=command.across_steps, operators=chosen.fuses
        )
        found = study(model, options, saved=saved, ablation=command.ablation, say=say, stop=stop)
        spent = time.monotonic() - start
        result = _result(command, graph, model, count, found, costs, spent)
        if command.out is not None:
            say(f"writing {command.out}")
            _write(command.out, result, found)
    if command.json:
        print_json(result)
    else:
        _print(result, found)
    return 0


@contextmanager
def _until_interrupted() -> Iterator[Callable[[], bool]]:
    """A question that is answered with yes once Ctrl-C was pressed. A second one interrupts."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread: there is nobody to interrupt it
        yield lambda: False
        return
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def _subject(command: Fuse, say: Progress) -> tuple[Graph, Cluster, int]:
    from sennit.capture import capture
    from sennit.cluster import load
    from sennit.fuse.costs_torch import data_parallel_graph

    cluster = load(command.cluster)
    count = cluster.devices if command.devices is None else command.devices
    if not 1 <= count <= cluster.devices:
        raise ClusterError(
            f"{count} devices of {command.cluster}, which has {cluster.devices}",
            where="--devices",
            fix="use fewer, or a larger cluster",
        )
    say(f"making {command.model}")
    model, sample = load_model(command.model, memory=False)
    say(f"capturing {command.model}")
    captured = capture(model, sample.args, dict(sample.kwargs))
    return data_parallel_graph(captured, cluster.device, fused_attention=command.fused_attention), cluster, count


def _step_model(command: Fuse, graph: Graph, cluster: Cluster, count: int) -> tuple[StepModel, Chosen]:
    from sennit.fuse.channel import Channel, of_cluster
    from sennit.fuse.clock import Sharing
    from sennit.fuse.costs_torch import choose_cost
    from sennit.fuse.model import StepModel

    device = cluster.device
    # an update reads and writes the parameter and reads the gradient; momentum and the like are for the optimizer to
    # add
    update = 3.0 / (device.bandwidth.value * device.bandwidth_efficiency.value)
    channel = of_cluster(cluster, range(count), update_per_byte=update)
    chosen = choose_cost(graph, device)
    if command.profile is None:
        if command.measured_channel:
            raise PlanError("--measured-channel without --profile", fix="name the profile that has the channel")
        return StepModel(graph, chosen.cost, channel), chosen
    database, place = _measured(command.profile, StepModel(graph, chosen.cost, channel))
    records = database.records(place)
    chosen = choose_cost(graph, device, database.seconds(place), database.seconds(place, compiled=True))
    if command.measured_channel:
        found = next((item for item in records.channels if item.ranks == count), None)
        if found is None:
            have = ", ".join(str(item.ranks) for item in records.channels) or "none"
            raise PlanError(
                f"{command.profile} has no all-reduce of {count} ranks (it has {have})",
                fix=f"run `torchrun --nproc-per-node {count} --no-python sennit profile`, or say --devices",
            )
        sharing = Sharing(found.compute_rate, found.channel_rate, found.queued, found.issued)
        channel = Channel(found.latency, found.per_byte, update, sharing)
    return StepModel(graph, chosen.cost, channel), chosen


def _measure(command: Fuse, model: StepModel, cluster: Cluster, say: Progress) -> tuple[StepModel, int]:
    """The model with what is unsure measured here, and how many kernels that were: of a GPU, those that a short search
    leans on; of a CPU, where a group is its operators one by one, the operators.
    """
    from sennit.cost.database import load_database
    from sennit.fuse.costs_torch import with_operators_measured
    from sennit.fuse.known_cost import KnownCost
    from sennit.fuse.measure_groups_torch import GroupTimer, device_at_hand
    from sennit.fuse.measure_torch import place_of
    from sennit.fuse.measured_search import search_measured
    from sennit.fuse.search import SearchOptions

    device = device_at_hand(cluster.device)
    cost = model.cost
    assert isinstance(cost, KnownCost)
    say("measuring kernels whose estimate is unsure")
    timer = GroupTimer(model.graph, device, compiled=device.type == "cuda")
    if device.type == "cuda":
        options = SearchOptions(seconds=command.seconds / 6, seed=command.seed, across_steps=command.across_steps)
        search_measured(model, cost, timer, options)
    else:
        model = with_operators_measured(model, cost, timer)
    if command.profile is not None:
        load_database(command.profile).with_kernels(place_of(device), timer.measured).save(command.profile)
    return model, len(timer.measured)


def _measured(path: Path, model: StepModel) -> tuple[Database, Place]:
    """A database, and the place of it where most of the model's operators were measured."""
    from sennit.cost.database import load_database
    from sennit.fuse.signature import signature

    database = load_database(path)
    types = model.graph.types()
    asked = {signature(*model.question(single), types) for single in model.single}
    return database, database.place_for(asked)


def _read(path: Path) -> Strategy:
    from sennit.ir.strategy import Strategy

    try:
        return Strategy.parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"cannot read the strategy {path}: {error}", fix="name a file that --out wrote") from error


def _result(
    command: Fuse, graph: Graph, model: StepModel, count: int, found: Study, costs: str, spent: float
) -> FuseResult:
    best = found.best
    return FuseResult(
        schema="sennit.fuse/1",
        origin="simulated",
        model=command.model,
        cluster=command.cluster,
        devices=count,
        operators=len(graph.ops),
        gradient_bytes=sum(model.bytes.values()),
        costs=costs,
        variants=tuple(map(_summary, found.variants)),
        best=best.name,
        bounds=Bounds(found.found.full_overlap, found.found.tight, found.found.structural),
        gap=found.found.gap,
        over_ddp=found.fastest("DDP").seconds / best.seconds,
        over_compiled_ddp=found.fastest("compiled DDP").seconds / best.seconds,
        candidates=found.found.tried,
        search_seconds=round(spent, 2),
        strategy=str(best.strategy),
        out=None if command.out is None else str(command.out),
    )


def _summary(item: Variant) -> VariantSummary:
    return VariantSummary(item.name, item.seconds, item.exposed, item.kernels, len(item.strategy.buckets), item.settled)


def _write(folder: Path, result: FuseResult, found: Study) -> None:
    from sennit.report.file import write_text
    from sennit.report.fuse_page import fusion_page
    from sennit.report.fuse_svg import fusion_svg

    shown = _shown(found)
    try:
        write_text(folder / "strategy.txt", result.strategy)
        write_text(folder / "steps.svg", fusion_svg(shown, found.found.structural))
        title = f"{result.model} on {result.cluster}, {result.devices} devices"
        write_text(folder / "report.html", fusion_page(title, found, shown, result.costs))
    except OSError as error:
        raise RunError(f"cannot write to {folder}: {error.strerror}", fix="name a folder that you may write") from error


def _shown(found: Study) -> list[Variant]:
    """What the picture has: the fastest of each sweep, and ours."""
    names = {found.fastest("DDP").name, found.fastest("compiled DDP").name, "no overlap", "DDP, 25 MB"}
    return [
        item for item in found.variants if item.name in names or not item.name.startswith(("DDP", "compiled", "no"))
    ]


def _print(result: FuseResult, found: Study) -> None:
    from rich.console import Console

    from sennit.report import units
    from sennit.report.fuse_table import fusion_table

    print(
        f"simulated: a training step of {result.model} on {result.cluster}, {result.devices} devices; "
        f"{result.operators} operators, {units.size(result.gradient_bytes)} of gradients"
    )
    print(f"kernels: {result.costs}")
    Console().print(fusion_table(found))
    print(
        f"bounds of these kernels: {units.seconds(result.bounds.full_overlap_seconds)} full overlap, "
        f"{units.seconds(result.bounds.structural_seconds)} with any buckets; the step takes {result.gap:.3f} of the latter"
    )
    print(
        f"{result.over_ddp:.2f} times as fast as the best DDP of the sweep, {result.over_compiled_ddp:.2f} times as the best compiled DDP "
        f"({result.candidates} candidates, {result.search_seconds:.0f} s of search)"
    )
    if result.out is not None:
        print(f"strategy: {result.out}/strategy.txt   picture: {result.out}/steps.svg   page: {result.out}/report.html")
