"""`sennit reshard`: plan one redistribution, or a file of them. `cli.py` says what all commands have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sennit.errors import LayoutError, ParseError, RunError, SennitError

if TYPE_CHECKING:
    from sennit.ir.dtype import DType
    from sennit.ir.layout import Layout
    from sennit.ir.mesh import Mesh
    from sennit.reshard import Certificate, Redistribution

__all__ = ["Reshard", "reshard"]


@dataclass(frozen=True, slots=True)
class Reshard:
    """Plan how an array goes from one distribution over devices to another, with a certificate of bytes and memory.

    Example: sennit reshard "f32[1024{x},4096{y}]" "f32[1024,4096{x,y}]" --mesh x=4,y=2
    """

    source: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")] = None
    """Element type and layout, the axes of a dim major to minor: f32[1024{x},4096{y}]; {sum:x} behind it for partial
    sums.
    """
    target: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")] = None
    """The layout to reach, written the same way."""
    mesh: Annotated[str | None, tyro.conf.arg(metavar="AXES")] = None
    """The mesh: x=4,y=2, with other devices x=4,y=2@8-15."""
    to_mesh: Annotated[str | None, tyro.conf.arg(metavar="AXES")] = None
    """The mesh of the target, where it is another."""
    mode: Literal["auto", "collective", "direct"] = "auto"
    """All candidates, those in the normal form of collectives, or the point-to-point exchange."""
    budget: Annotated[int | None, tyro.conf.arg(metavar="BYTES")] = None
    """Bytes that a device may use beside its pieces of source and target."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Predict times on a cluster: a preset, as dgx-h100:2, or a TOML file."""
    explain: bool = False
    """Also say why this plan won, and what the others cost."""
    text: bool = False
    """Print the plan in its text form, which parses back."""
    run: bool = False
    """Also run the plan on local gloo ranks, one a device, and check every piece."""
    svg: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Also draw the tiles moving between devices, step by step."""
    batch: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Plan every line of a file of JSON objects instead; docs/commands.md gives their fields. - reads stdin."""
    json: Annotated[bool, tyro.conf.arg(help="Print JSON: one document, or with --batch one line a problem.")] = False
    debug: Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")] = False


def reshard(command: Reshard) -> int:
    if command.batch is not None:
        return _batch(command, command.batch)
    return _one(command)


# ---- one redistribution ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """Elements are per device; `received_elements` is the mean over the devices of the target."""

    candidate: str
    received_elements: float
    received_bound_elements: float
    peak_elements: int
    peak_bound_elements: int
    staging_elements: int
    messages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepResult:
    kind: str
    axes: tuple[str, ...]
    source: str
    result: str
    mesh: str
    region: str | None


@dataclass(frozen=True, slots=True)
class ReshardResult:
    schema: str
    source: str
    target: str
    mesh: str
    to_mesh: str
    item_bytes: int
    steps: tuple[StepResult, ...]
    chosen: CandidateResult
    lost: tuple[CandidateResult, ...]
    why: str
    measured: MeasuredRun | None


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """On gloo ranks of this machine; `seconds` is the median of the slowest rank's, `wrong` the ranks with a wrong
    piece.
    """

    ranks: int
    seconds: float
    wrong: tuple[int, ...]


def _one(command: Reshard) -> int:
    from rich.console import Console

    from sennit.report import units
    from sennit.report.reshard_table import RedistributionView

    planned, dtype = _plan_arguments(command)
    if command.svg is not None:
        _write_svg(command.svg, planned)
    measured = _measure(planned, dtype) if command.run else None
    if command.json:
        _print_document(_document(planned, dtype, measured))
    elif command.text:
        print(planned)
    else:
        timed_on = command.cluster or "links of 10 GB/s and 20 us (no cluster is named)"
        Console().print(RedistributionView(planned, dtype.itemsize, timed_on, command.explain))
    if measured is None:
        return 0
    if not command.json:
        verdict = f"ranks {list(measured.wrong)} have a wrong piece" if measured.wrong else "every piece is right"
        print(f"measured on {measured.ranks} gloo ranks: {units.seconds(measured.seconds)}, the median; {verdict}")
    return 1 if measured.wrong else 0


def _measure(planned: Redistribution, dtype: DType) -> MeasuredRun:
    from sennit.collective.runtime.shm_posts import HostMemory
    from sennit.reshard.ranks_torch import run_on_ranks

    with _status("running on local ranks"):
        found = run_on_ranks(planned, dtype, shared=HostMemory)
    return MeasuredRun(found.ranks, found.median, found.wrong)


@contextmanager
def _status(message: str) -> Iterator[None]:
    """A line on stderr that says what is being done, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def _plan_arguments(command: Reshard) -> tuple[Redistribution, DType]:
    from sennit.cluster import load
    from sennit.ir.mesh import Mesh
    from sennit.reshard import Mode, plan

    if command.source is None or command.target is None or command.mesh is None:
        raise ParseError(
            "a source, a target and a mesh are needed",
            fix='sennit reshard "f32[8{x},8]" "f32[8,8{x}]" --mesh x=4, or --batch FILE',
        )
    mesh = Mesh.parse(command.mesh)
    source, dtype = _typed_layout(command.source, mesh)
    target, other = _typed_layout(command.target, mesh if command.to_mesh is None else Mesh.parse(command.to_mesh))
    if dtype is not other:
        raise LayoutError(
            f"the source has elements of {dtype.value} and the target of {other.value}",
            fix="use one element type: a redistribution does not convert",
        )
    cluster = None if command.cluster is None else load(command.cluster)
    planned = plan(
        source, target, itemsize=dtype.itemsize, budget=command.budget, cluster=cluster, mode=Mode(command.mode)
    )
    return planned, dtype


def _typed_layout(text: str, mesh: Mesh) -> tuple[Layout, DType]:
    from sennit.ir.dtype import DType
    from sennit.ir.layout import Layout
    from sennit.ir.text import Scanner

    def read(scanner: Scanner) -> tuple[Layout, DType]:
        dtype = DType.F32 if scanner.peek("[") else DType.read(scanner)
        return Layout.read(scanner, mesh), dtype

    try:
        return Scanner.whole(text, read)
    except ParseError as error:
        raise ParseError(error.what, where=f"{text!r}, {error.where}", fix=error.fix) from None


def _document(planned: Redistribution, dtype: DType, measured: MeasuredRun | None) -> ReshardResult:
    from sennit.report.reshard_table import why

    return ReshardResult(
        schema="sennit.reshard/1",
        source=str(planned.source),
        target=str(planned.target),
        mesh=str(planned.source.mesh),
        to_mesh=str(planned.target.mesh),
        item_bytes=dtype.itemsize,
        steps=tuple(
            StepResult(
                kind=step.kind.value,
                axes=step.axes,
                source=str(step.source),
                result=str(step.result),
                mesh=str(step.result.mesh),
                region=None if step.region is None else str(step.region),
            )
            for step in planned.steps
        ),
        chosen=_candidate(planned.certificate),
        lost=tuple(map(_candidate, planned.alternatives)),
        why=why(planned),
        measured=measured,
    )


def _candidate(found: Certificate) -> CandidateResult:
    return CandidateResult(
        candidate=found.candidate.value,
        received_elements=found.received,
        received_bound_elements=found.received_bound,
        peak_elements=found.peak,
        peak_bound_elements=found.peak_bound,
        staging_elements=found.staging,
        messages=found.messages,
        seconds=found.seconds,
    )


def _print_document(result: ReshardResult) -> None:
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())


def _write_svg(path: Path, planned: Redistribution) -> None:
    from sennit.report import write_text
    from sennit.report.reshard_svg import redistribution_svg

    try:
        write_text(path, redistribution_svg(planned))
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", fix="name a file that you may write") from error


# ---- a batch ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchProblem:
    """One line of a batch. `src` and `dst` have for each dim its axes, major to minor; axes in `src_partial` and
    `dst_partial` hold partial sums."""

    mesh: list[int]
    axes: list[str]
    shape: list[int]
    src: list[list[str]]
    dst: list[list[str]]
    dtype: str = "f32"
    src_partial: list[str] = field(default_factory=list)
    dst_partial: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BatchResult:
    steps: int
    recv_elements: float
    min_recv_elements: float
    peak_elements: int
    bound_elements: int
    plan_ms: float
    kind: str


def _batch(command: Reshard, path: Path) -> int:
    import msgspec

    results: list[BatchResult] = []
    with _status(f"planning the problems of {path}"):
        for where, problem in _problems(path):
            try:
                result = _plan_problem(problem, command)
            except SennitError as error:
                place = where if error.where is None else f"{where}; {error.where}"
                raise type(error)(error.what, where=place, fix=error.fix) from error
            results.append(result)
            if command.json:
                print(msgspec.json.encode(result).decode())
    if not command.json:
        _print_batch(results)
    return 0


def _problems(path: Path) -> Iterator[tuple[str, BatchProblem]]:
    import msgspec

    try:
        lines = (sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ParseError(f"cannot read {path}: {reason}", fix="name a file of JSON lines, or - for stdin") from error
    decoder = msgspec.json.Decoder(BatchProblem)
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                yield where, decoder.decode(line)
            except msgspec.DecodeError as error:
                fields = '{"mesh": [2,4], "axes": ["x","y"], "shape": [8,8], "src": [["x"],[]], "dst": [[],["y","x"]], "dtype": "f32"}'
                raise ParseError(f"no problem in JSON: {error}", where=where, fix=f"write it like {fields}") from error


def _plan_problem(problem: BatchProblem, command: Reshard) -> BatchResult:
    from sennit.ir.dtype import DType
    from sennit.ir.layout import Layout, Reduction
    from sennit.ir.mesh import Axis, Mesh
    from sennit.ir.text import Scanner
    from sennit.reshard import Mode, plan

    if len(problem.mesh) != len(problem.axes):
        raise LayoutError(
            f"{len(problem.axes)} axes for {len(problem.mesh)} mesh sizes", fix="name one axis for each size"
        )
    axes = tuple(Axis(name, size) for name, size in zip(problem.axes, problem.mesh, strict=True))
    devices = 1
    for axis in axes:
        devices *= axis.size
    mesh = Mesh(axes, tuple(range(devices)))
    source, target = (
        Layout.block(mesh, problem.shape, dict(enumerate(dims)), dict.fromkeys(partial, Reduction.SUM))
        for dims, partial in ((problem.src, problem.src_partial), (problem.dst, problem.dst_partial))
    )
    itemsize = Scanner.whole(problem.dtype, DType.read).itemsize
    begin = perf_counter()
    planned = plan(source, target, itemsize=itemsize, budget=command.budget, mode=Mode(command.mode))
    elapsed = perf_counter() - begin
    found = planned.certificate
    return BatchResult(
        steps=len(planned.steps),
        recv_elements=found.received,
        min_recv_elements=found.received_bound,
        peak_elements=found.peak,
        bound_elements=found.peak_bound,
        plan_ms=elapsed * 1e3,
        kind=found.candidate.value,
    )


def _print_batch(results: list[BatchResult]) -> None:
    from math import exp, log

    if not results:
        print("no problems")
        return
    ratios = [r.recv_elements / r.min_recv_elements for r in results if r.min_recv_elements]
    times = sorted(r.plan_ms for r in results)
    above = sum(r.peak_elements > r.bound_elements for r in results)
    print(f"{len(results)} problems")
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        print(f"  received over the minimum  {mean:.4f} geometric mean, {max(ratios):.3f} at most")
    print(f"  pieces above the bound     {above}")
    print(f"  planning                   {times[len(times) // 2]:.2f} ms median, {times[-1]:.2f} ms at most")
    for kind in sorted({r.kind for r in results}):
        print(f"  {kind:<26} {sum(r.kind == kind for r in results)}")
