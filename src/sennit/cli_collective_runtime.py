"""`sennit collective run` and `sennit collective tune`: schedules run on this machine, checked and timed.

Options and result types of both commands, as `cli.py` asks. What is run, and how it is timed, stands in
`collective/runtime/measure.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from sennit.errors import CollectiveError, RunError

if TYPE_CHECKING:
    from rich.table import Table

    from sennit.collective.runtime.measure import Runtime, Subject, Times
    from sennit.collective.runtime.measure_torch import Bench
    from sennit.collective.selection import SelectionTable
    from sennit.ir.collective import Algorithm, CollectiveName

__all__ = ["Run", "Tune", "run_subject", "tune"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Number = Annotated[int, tyro.conf.arg(metavar="N")]
Sizes = Annotated[tuple[str, ...], tyro.conf.arg(metavar="SIZE ...")]
RuntimeName = Literal["numpy", "shm", "p2p", "gpu"]
Tell = Callable[[str], None]
ServedName = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"]
SERVED: tuple[ServedName, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


@dataclass(frozen=True, slots=True)
class Run:
    """Run a collective on this machine, check its result and time it.

    Example: sennit collective run ring_all_reduce --ranks 4 --bytes 1M --runtime shm --check
    """

    subject: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME|FILE")]
    """A name of the library, or a file: an algorithm, a schedule or a one-sided program as text, or MSCCL XML; - reads
    stdin.
    """
    ranks: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many ranks; a file says it itself."""
    bytes: Sizes = ("1M",)
    """Of the larger of a rank's input and output, as nccl-tests counts: 64K, 1M, 1G, or numbers. One or several."""
    runtime: RuntimeName = "shm"
    """shm: processes in shared memory. p2p: processes and messages over gloo. gpu: virtual ranks on one GPU. numpy: the
    oracle.
    """
    channels: Number = 1
    """Rings or trees side by side, where the algorithm has them."""
    instances: Number = 1
    """Copies of the algorithm side by side, each with its part of every chunk."""
    pieces: Number = 1
    """Chunks that a pipelined algorithm cuts its data into."""
    repeat: Number = 9
    """How often it is timed."""
    check: bool = False
    """Compare the result with what the collective asks for; exits with 1 where it differs."""
    svg: File = None
    """Also draw bandwidth over size."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Tune:
    """Time the library's algorithms by size on this machine and write the table of the fastest.

    Example: sennit collective tune --ranks 4 --runtime shm --out shm-4.toml
    """

    ranks: Number
    """How many ranks."""
    runtime: RuntimeName = "shm"
    """As of `sennit collective run`."""
    collectives: Annotated[tuple[ServedName, ...], tyro.conf.arg(metavar="NAME ...")] = SERVED
    """Which collectives."""
    sizes: Sizes = ("1K", "8K", "64K", "512K", "4M", "32M")
    """Sizes to try; a row of the table begins at one of them."""
    repeat: Number = 5
    """How often each is timed; the median counts."""
    out: File = None
    """Write the table here (TOML); without it it is printed."""
    svg: File = None
    """Also draw bandwidth over size of all that was timed, of the first collective."""
    json: Json = False
    debug: Debug = False


# ---- run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSize:
    """Seconds: the median and the least of the repetitions, on the slowest rank.

    Bandwidths in bytes a second, of the median.
    """

    bytes: int
    seconds: float
    least_seconds: float
    algorithm_bandwidth: float
    bus_bandwidth: float | None
    wrong: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RunResult:
    """`checked`: whether results were compared; `wrong` of a size then names the ranks whose result is not right."""

    schema: str
    name: str
    collective: str
    ranks: int
    runtime: str
    origin: str
    repeat: int
    checked: bool
    sizes: tuple[RunSize, ...]
    svg: str | None

    @property
    def right(self) -> bool:
        return not any(size.wrong for size in self.sizes)


def run_subject(action: Run, tell: Tell) -> tuple[RunResult, Table]:
    from sennit.collective.runtime.measure import Request, Runtime

    runtime, sizes = Runtime(action.runtime), tuple(read_size(text) for text in action.bytes)
    _check_counts(repeat=action.repeat, sizes=sizes)
    tell(f"reading or building {action.subject}")
    subject = _subject(action)
    ranks = subject.collective.ranks
    tell(f"starting {ranks} ranks on {action.runtime}")
    with _bench(runtime, ranks) as bench:
        tell(f"running {subject.name} on {action.runtime}")
        times = bench.measure(Request(subject, sizes, action.repeat, action.check))
    result = RunResult(
        schema="sennit.collective.run/1",
        name=subject.name,
        collective=str(subject.collective).split("{")[0].strip(),
        ranks=ranks,
        runtime=action.runtime,
        origin="measured",
        repeat=action.repeat,
        checked=action.check,
        sizes=tuple(_run_size(subject, item) for item in times),
        svg=None if action.svg is None else str(action.svg),
    )
    if action.svg is not None:
        from sennit.report.bandwidth_svg import Series, bandwidth_svg

        points = tuple((s.bytes, s.bus_bandwidth or s.algorithm_bandwidth) for s in result.sizes)
        caption = f"measured: {result.collective} on {action.runtime}, {bench.machine}, median of {action.repeat}"
        _write(action.svg, bandwidth_svg(result.name, caption, [Series(result.name, points, main=True)]))
    return result, _run_table(result)


def _subject(action: Run) -> Subject:
    from sennit.collective.library import Options, recipe
    from sennit.collective.runtime.measure import read_subject

    if action.subject == "-" or Path(action.subject).is_file():
        subject = read_subject(_read_text(Path(action.subject)))
        if action.ranks not in (None, subject.collective.ranks):
            raise CollectiveError(
                f"{action.subject} is for {subject.collective.ranks} ranks, and --ranks says {action.ranks}",
                fix="leave --ranks out, or build it for as many",
            )
        return subject
    found = recipe(action.subject)
    if action.ranks is None:
        raise CollectiveError(f"how many ranks is {action.subject} to have?", fix="say --ranks N")
    if found.across:
        raise CollectiveError(
            f"{action.subject} is for more than one node, and one machine is one",
            fix="name another algorithm; `sennit collective list` says which need nodes",
        )
    if action.ranks < 2:
        raise CollectiveError(f"{action.ranks} ranks", fix="use 2 or more")
    options = Options(action.channels, action.instances, action.pieces)
    return found.build(1, action.ranks, options)


def _run_size(subject: Subject, times: Times) -> RunSize:
    from sennit.collective.simulate import bus_bandwidth
    from sennit.ir.collective import CollectiveSpec

    spec, took = subject.collective, times.median
    bus = bus_bandwidth(spec, times.bytes, took) if isinstance(spec, CollectiveSpec) else None
    return RunSize(times.bytes, took, times.least, times.bytes / took, bus, times.wrong)


def _run_table(result: RunResult) -> Table:
    from rich.table import Table

    from sennit.report import units

    what = f"measured: {result.name}, {result.collective}, on {result.runtime}, median of {result.repeat}"
    table = Table("bytes", "time", "least", "algorithm", "bus", "result", title=what, title_justify="left")
    for column in table.columns[:5]:
        column.justify = "right"
    for size in result.sizes:
        verdict = "not checked" if not result.checked else "right"
        if size.wrong:
            verdict = f"[red]wrong on ranks {', '.join(map(str, size.wrong))}[/red]"
        table.add_row(
            units.size(size.bytes),
            units.seconds(size.seconds),
            units.seconds(size.least_seconds),
            _rate(size.algorithm_bandwidth),
            "" if size.bus_bandwidth is None else _rate(size.bus_bandwidth),
            verdict,
        )
    return table


# ---- tune ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """One algorithm at one size; `best`: the fastest there."""

    collective: str
    algorithm: str
    bytes: int
    seconds: float
    best: bool


@dataclass(frozen=True, slots=True)
class TuneResult:
    """`table` is the TOML of the table, or None where it went to the file `out`."""

    schema: str
    runtime: str
    ranks: int
    basis: str
    trials: tuple[Trial, ...]
    out: str | None
    svg: str | None
    table: str | None


def tune(action: Tune, tell: Tell) -> tuple[TuneResult, str]:
    from sennit.collective.library import candidates
    from sennit.collective.runtime.measure import Request, Runtime
    from sennit.collective.selection import fill
    from sennit.ir.collective import CollectiveName

    runtime, sizes = Runtime(action.runtime), tuple(sorted({read_size(text) for text in action.sizes}))
    _check_counts(repeat=action.repeat, sizes=sizes)
    if action.ranks < 2:
        raise CollectiveError(f"{action.ranks} ranks", fix="use 2 or more")
    names = [CollectiveName(name) for name in dict.fromkeys(action.collectives)]
    total = sum(1 for name in names for _ in candidates(name, 1))
    # an algorithm is timed at all sizes at once, when its first size is asked for; `fill` keeps them alive, so an id is
    # a name
    known: dict[int, tuple[Algorithm, dict[int, float]]] = {}
    tell(f"starting {action.ranks} ranks on {action.runtime}")
    with _bench(runtime, action.ranks) as bench:
        basis = f"measured on the {action.runtime} runtime, {bench.machine}, median of {action.repeat}"

        def cost(algorithm: Algorithm, size: int) -> float:
            if id(algorithm) not in known:
                tell(f"{_bar(len(known), total)} {algorithm.name}")
                times = bench.measure(Request(algorithm, sizes, action.repeat, check=True))
                _check_right(algorithm, times)
                known[id(algorithm)] = algorithm, {item.bytes: item.median for item in times}
            return known[id(algorithm)][1][size]

        cluster = f"{action.runtime} on one machine, {action.ranks} ranks"
        table = fill(cluster, 1, action.ranks, cost, basis, collectives=names, sizes=sizes)
    trials = _trials(names, [(algorithm, times) for algorithm, times in known.values()])
    if action.out is not None:
        _write(action.out, str(table))
    if action.svg is not None:
        _write(action.svg, _tune_picture(action, names[0], trials, basis))
    result = TuneResult(
        schema="sennit.collective.tune/1",
        runtime=action.runtime,
        ranks=action.ranks,
        basis=basis,
        trials=trials,
        out=None if action.out is None else str(action.out),
        svg=None if action.svg is None else str(action.svg),
        table=str(table) if action.out is None else None,
    )
    return result, _describe_tuning(result, table)


def _check_right(algorithm: Algorithm, times: Sequence[Times]) -> None:
    for item in times:
        if item.wrong:
            raise RunError(
                f"{algorithm.name} gave a wrong result at {item.bytes} bytes on ranks {', '.join(map(str, item.wrong))}",
                fix="this is a bug of the runtime: please report it",
            )


def _trials(names: Sequence[CollectiveName], known: Sequence[tuple[Algorithm, dict[int, float]]]) -> tuple[Trial, ...]:
    from sennit.collective.library import candidates

    found = []
    timed = iter(known)
    for name in names:
        of_name = [(str(candidate), next(timed)[1]) for candidate in candidates(name, 1)]
        for size in of_name[0][1]:
            best = min(times[size] for _, times in of_name)
            found += [Trial(name.value, title, size, times[size], best=times[size] == best) for title, times in of_name]
    return tuple(found)


def _describe_tuning(result: TuneResult, table: SelectionTable) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.table import Table

    from sennit.report import units

    console = Console(file=StringIO(), width=120, highlight=False)
    for collective in dict.fromkeys(trial.collective for trial in result.trials):
        rows = [trial for trial in result.trials if trial.collective == collective]
        sizes = list(dict.fromkeys(trial.bytes for trial in rows))
        shown = Table("algorithm", *(units.size(size) for size in sizes), title=collective, title_justify="left")
        shown.columns[0].no_wrap = True
        for column in shown.columns[1:]:
            column.justify = "right"
        for name in dict.fromkeys(trial.algorithm for trial in rows):
            own = {trial.bytes: trial for trial in rows if trial.algorithm == name}
            cells = [f"{units.seconds(own[s].seconds)}{' *' if own[s].best else '  '}" for s in sizes]
            shown.add_row(name, *cells)
        console.print(shown)
    console.print(f"* the fastest; {result.basis}")
    if result.out is None:
        console.print(str(table), markup=False, soft_wrap=True)
    else:
        console.print(f"table: {result.out}")
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


def _tune_picture(action: Tune, name: CollectiveName, trials: Sequence[Trial], basis: str) -> str:
    from sennit.collective.simulate import bus_bandwidth
    from sennit.ir.collective import CollectiveName, CollectiveSpec
    from sennit.report.bandwidth_svg import Series, bandwidth_svg

    root = 0 if name is CollectiveName.BROADCAST else None
    spec = CollectiveSpec(name, action.ranks, 1, root)
    own = [trial for trial in trials if trial.collective == name.value]
    series = [
        Series(title, tuple((t.bytes, bus_bandwidth(spec, t.bytes, t.seconds)) for t in own if t.algorithm == title))
        for title in dict.fromkeys(trial.algorithm for trial in own)
    ]
    return bandwidth_svg(f"{name.value}, {action.ranks} ranks, {action.runtime}", basis, series)


def _bar(done: int, total: int, width: int = 24) -> str:
    filled = done * width // max(1, total)
    return f"{'━' * filled}{'╌' * (width - filled)} {done}/{total}"


# ---- what both need --------------------------------------------------------------------------------------------------


def _bench(runtime: Runtime, ranks: int) -> Bench:
    from sennit.collective.runtime.measure_torch import Bench

    return Bench(runtime, ranks)


def _check_counts(*, repeat: int, sizes: Sequence[int]) -> None:
    if repeat < 1 or not sizes or min(sizes) < 4:
        raise CollectiveError(
            f"{repeat} repetitions at sizes of {', '.join(map(str, sizes)) or 'nothing'} bytes",
            fix="use 1 repetition or more, and 4 bytes or more: one element",
        )


def _rate(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value >= 1e7 else f"{value / 1e6:.2f} MB/s"


def read_size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(unit)
    if scale is None:
        number, scale = text, 1
    try:
        size = float(number) * scale
    except ValueError:
        size = -1.0
    if not (size >= 0 and size == int(size)):
        raise CollectiveError(f"{text!r} is no size", fix="write bytes, or a number with K, M or G: 64K, 1M, 1.5G")
    return int(size)


def _read_text(path: Path) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CollectiveError(f"cannot read {path}: {reason}", fix="name a file that holds the text") from error


def _write(path: Path, text: str) -> None:
    from sennit.report import write_text

    try:
        write_text(path, text)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}", fix="name a file that you may write") from error
