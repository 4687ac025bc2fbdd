"""Resharding of JAX arrays on CPU devices: `sennit.jax.reshard` against XLA's own and against `jax.device_put`.

    PYTHONPATH=src python benchmarks/reshard/xla.py --devices 8 --json out.json

Needs JAX and numpy alone. Random even problems from two seeds; every problem is a float32 array of one total size on a
mesh of CPU devices of one process. With `--devices 8` or `16` all sizes are powers of two; `--devices 6-16` draws from
`problems.py`, meshes of 6 to 16 devices with factors 2, 3 and 5. XLA's own is the ahead-of-time compiled jit of the
identity with out_shardings; ours is compiled ahead of time too, once as it is chosen for CPU devices and once by
collectives alone, as on devices with memory of their own. Ours, XLA's own, XLA's own a second time (the A/A control),
ours by collectives, and a plain copy of the result by each device run in turns; a problem's ratio is that of medians.
`jax.device_put`, which goes through host memory, is timed by itself. Results are compared with the input before timing.

A problem is called rematerialising where an array in XLA's compiled program is larger than the larger of the input and
the output piece. The others are told apart by the collectives of XLA's program. Temporaries are what the compiler
states (`temp_size_in_bytes`). Received bytes are counted from the collectives of the compiled programs, those of an
exchange from its table.

Problems are measured in a process of its own, which is replaced where XLA's partitioner ends it (a check of its own
that fails, jax 0.11.2). Such problems are counted and named, have no ratio, and our result for them is checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from math import exp, log, prod
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # one warning for each rematerialisation

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

if find_spec("msgspec") is None:
    # `sennit.reshard` offers the planner, which reads clusters with msgspec; the files for JAX do not need it
    package = types.ModuleType("sennit.reshard")
    package.__path__ = [str(Path(find_spec("sennit").origin).parent / "reshard")]
    sys.modules["sennit.reshard"] = package

from xla_problems import FEWEST, MESHES, MOST, Problem, draw, draw_mixed

from sennit.jax import Resharder, steps_between
from sennit.reshard.pull import pulls
from sennit.reshard.redistribution import Step, StepKind

KIB, MIB = 2**10, 2**20
SEEDS = {"first": 2112, "fresh": 1075}
TARGETS = {256 * KIB: 1.0, 16 * MIB: 1.6, 64 * MIB: 2.0}
REMATERIALISING, BEST, WORST = 3.5, 10.0, 0.95
COLLECTIVES = ("all-to-all", "collective-permute", "all-gather", "all-reduce")


@dataclass(frozen=True, slots=True)
class Row:
    """One problem: seconds, and per program bytes of temporaries, of its largest array, and received per device."""

    problem: str
    steps: str
    piece: int
    ours: float
    xla: float
    xla_again: float
    by_collectives: float
    device_put: float
    ours_again: float | None
    xla_of_again: float | None
    ours_temporary: int
    xla_temporary: int
    ours_largest: int
    xla_largest: int
    ours_received: float
    xla_received: float
    copy: float
    xla_collectives: tuple[str, ...]

    @property
    def ratio(self) -> float:
        return self.xla / self.ours

    @property
    def ratio_by_collectives(self) -> float:
        return self.xla / self.by_collectives

    @property
    def control(self) -> float:
        return self.xla / self.xla_again

    @property
    def rematerialises(self) -> bool:
        return self.xla_largest > self.piece

    @property
    def kind(self) -> str:
        """What XLA does."""
        if self.rematerialises:
            return "rematerialises"
        match tuple(self.xla_collectives):
            case ():
                return "no collective"
            case (one,):
                return f"one {one}"
            case _:
                return "several collectives"


# ---- what a compiled program does ------------------------------------------------------------------------------------

ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]*)\]")
DEFINITION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([a-z-]+)\((.*)$")
PAIRS = re.compile(r"\{(\d+),(\d+)\}")


def array_bytes(text: str) -> list[int]:
    return [
        int(re.sub(r"\D", "", dtype)) // 8 * prod(map(int, filter(None, dims.split(","))))
        for dtype, dims in ARRAY.findall(text)
    ]


def collectives(text: str) -> tuple[str, ...]:
    """The collectives of the program's entry, in order."""
    entry = text[text.index("\nENTRY ") :]
    found = [match.group(3).removesuffix("-start") for match in map(DEFINITION.match, entry.splitlines()) if match]
    return tuple(operation for operation in found if operation in COLLECTIVES)


def read_program(text: str) -> tuple[int, float]:
    """The bytes of the largest array that the program's entry makes, and bytes received per device."""
    entry = text[text.index("\nENTRY ") :]
    sizes: dict[str, int] = {}
    largest, received = 0, 0.0
    for line in entry.splitlines():
        found = DEFINITION.match(line)
        if found is None:
            continue
        name, kind, operation, rest = found.groups()
        parts = array_bytes(kind) or [0]
        sizes[name] = sum(parts)
        largest = max(largest, *parts)
        operands = sum(sizes.get(operand, 0) for operand in re.findall(r"%([^\s,)]+)", rest.split(")")[0]))
        match operation.removesuffix("-start"):
            case "all-gather":
                received += sum(parts) - operands
            case "all-to-all":
                received += sum(parts) * (len(parts) - 1) / len(parts)
            case "all-reduce":
                received += 2 * sum(parts)  # less a part for each member of the group
            case "collective-permute":
                pairs = PAIRS.findall(rest.split("source_target_pairs=")[1])
                received += sum(parts) * sum(a != b for a, b in pairs) / max(1, len(pairs))
    return largest, received


# ---- timing ----------------------------------------------------------------------------------------------------------


def take_turns(functions: list[Callable[[], jax.Array]], seconds: float, most: int) -> list[float]:
    """The median of each function's times.

    The order is drawn anew in each turn: what ran before leaves its traces in the allocator, and each should follow
    each as often.
    """
    rng = random.Random(0)
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function().block_until_ready()
    begin = perf_counter()
    for turn in range(most):
        for index in rng.sample(range(len(functions)), len(functions)):
            start = perf_counter()
            result = functions[index]()
            result.block_until_ready()
            times[index].append(perf_counter() - start)
            del result
        if turn >= 6 and perf_counter() - begin > seconds:
            break
    return [median(column) for column in times]


def time_device_put(x: jax.Array, target: NamedSharding, seconds: float) -> float:
    """With a fresh input each time: an array keeps the copy in host memory that its first `device_put` makes."""
    fresh = jax.jit(lambda a: a.copy())
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 5 or perf_counter() - begin < seconds / 4:
        y = fresh(x).block_until_ready()
        start = perf_counter()
        result = jax.device_put(y, target, may_alias=False)
        result.block_until_ready()
        times.append(perf_counter() - start)
        del result, y
    return median(times[1:])


def placed(problem: Problem) -> tuple[np.ndarray, jax.Array, NamedSharding]:
    """The values, the array in its first place, and the other place."""
    devices = np.array(jax.devices("cpu")[: prod(problem.mesh)]).reshape(problem.mesh)
    mesh = jax.sharding.Mesh(devices, tuple("xyzw"[: len(problem.mesh)]))
    source, target = (
        NamedSharding(mesh, PartitionSpec(*(axes or None for axes in dims))) for dims in (problem.before, problem.after)
    )
    values = np.random.default_rng(0).standard_normal(problem.shape, dtype=np.float32)
    return values, jax.device_put(values, source), target


def is_right(problem: Problem) -> bool:
    values, x, target = placed(problem)
    return np.array_equal(np.asarray(Resharder().function(x, target).lower(x).compile()(x)), values)


def taken_bytes(step: Step) -> float:
    """What a device takes out of the memory of others in an exchange of f32, on average."""
    taken = 0
    found = pulls(step.source, step.result)
    for device, pull in enumerate(found):
        for holder, cuts in zip(pull.holders, product(*pull.cuts), strict=True):
            taken += 4 * prod(cut.length for cut in cuts) * (holder != device)
    return taken / len(found)


def measure(problem: Problem, seconds: float, device_put: bool) -> Row:
    values, x, target = placed(problem)
    xla = jax.jit(lambda a: a, out_shardings=target).lower(x).compile()
    ours, others = (Resharder(direct=direct).function(x, target).lower(x).compile() for direct in (True, False))
    if not all(np.array_equal(np.asarray(function(x)), values) for function in (ours, others)):
        sys.exit(f"a wrong result: {problem}")
    result = ours(x)
    copied = jax.jit(lambda a: a.copy(), out_shardings=target).lower(result).compile()
    functions = [lambda: ours(x), lambda: xla(x), lambda: xla(x), lambda: others(x), lambda: copied(result)]
    most = 41
    *times, copy = take_turns(functions, seconds, most)
    again: list[float | None] = [None, None]
    if times[1] / times[0] < WORST:
        again = list(take_turns(functions[:2], 2 * seconds, 2 * most))
    source = x.sharding
    assert isinstance(source, NamedSharding)
    steps = steps_between(source, target, problem.shape, x.dtype)
    read = [read_program(program.as_text()) for program in (ours, xla)]
    if steps is not None and steps[0].kind is StepKind.EXCHANGE:
        read[0] = read[0][0], taken_bytes(steps[0])
    temporary = [program.memory_analysis().temp_size_in_bytes for program in (ours, xla)]
    return Row(
        str(problem),
        "XLA's own" if steps is None else " ".join(f"{step.kind.value}({','.join(step.axes)})" for step in steps),
        max(4 * prod(sharding.shard_shape(problem.shape)) for sharding in (source, target)),
        *times,
        time_device_put(x, target, seconds) if device_put else float("nan"),
        *again,
        *temporary,
        read[0][0],
        read[1][0],
        read[0][1],
        read[1][1],
        copy,
        collectives(xla.as_text()),
    )


# ---- a process that may be ended -------------------------------------------------------------------------------------


def serve(devices: int, pipe: Connection[object, tuple[Problem, float, bool] | Problem]) -> None:
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_platforms", "cpu")
    while True:
        match pipe.recv():
            case (problem, seconds, device_put):
                pipe.send(measure(problem, seconds, device_put))
            case problem:
                pipe.send(is_right(problem))


class Measurer:
    """Asks a process, and starts another where that one ended."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(self.devices, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, question: object) -> object:
        """None where the process ended by a signal; another error than that ends the benchmark."""
        self.pipe.send(question)
        try:
            return self.pipe.recv()
        except EOFError:
            self.process.join()
            if self.process.exitcode is None or self.process.exitcode >= 0:
                raise SystemExit(f"the measuring process failed, with exit code {self.process.exitcode}") from None
            self.start()
            return None


# ---- the report ------------------------------------------------------------------------------------------------------


def geo(values: list[float]) -> float:
    return exp(sum(map(log, values)) / len(values)) if values else float("nan")


def verdict(value: float, target: float) -> str:
    return f"{value:6.2f}   target {target:<5.4g} {'met' if value >= target else 'MISSED'}"


def report(name: str, size: int, rows: list[Row], *, losses_too: bool = False) -> None:
    ratios = [row.ratio for row in rows]
    heavy = [row for row in rows if row.rematerialises]
    controls = sorted(row.control for row in rows)
    noise = min(controls[0], 1 / controls[-1])
    print(f"\n{name}, {size // KIB} KiB: {len(rows)} problems, {len(heavy)} rematerialising")
    print(f"  over XLA's own, geometric mean          {verdict(geo(ratios), TARGETS.get(size, 1.0))}")
    if heavy:
        print(
            f"  the same, rematerialising problems      {verdict(geo([row.ratio for row in heavy]), REMATERIALISING)}"
        )
    print(f"  best                                    {verdict(max(ratios), BEST)}")
    print(f"  worst                                   {verdict(min(ratios), min(WORST, noise))} (0.95, or the noise)")
    alone = [row.ratio_by_collectives for row in rows]
    heavy_alone = geo([row.ratio_by_collectives for row in heavy])
    print(
        f"  by collectives alone: {geo(alone):.2f}, rematerialising {heavy_alone:.2f}, "
        f"best {max(alone):.1f}, worst {min(alone):.2f}"
    )
    print(f"  A/A control: geo {geo(controls):.3f}, {controls[0]:.2f} to {controls[-1]:.2f}")
    print(f"  over jax.device_put, geometric mean     {geo([row.device_put / row.ours for row in rows]):6.2f}")
    print("  by what XLA does            problems   ratio  worst   best   in copies of the result: ours   XLA")
    for kind in sorted({row.kind for row in rows}):
        those = [row for row in rows if row.kind == kind]
        found = [row.ratio for row in those]
        passes = [geo([getattr(row, who) / row.copy for row in those]) for who in ("ours", "xla")]
        print(
            f"    {kind:24} {len(those):10} {geo(found):7.2f} {min(found):6.2f} {max(found):6.2f}"
            f"                         {passes[0]:11.2f} {passes[1]:5.2f}"
        )
    for label, chosen in (("all", rows), ("rematerialising", heavy)):
        if chosen:
            columns = [
                [getattr(row, f"{who}_{what}") / row.piece for row in chosen]
                for what in ("temporary", "largest")
                for who in ("ours", "xla")
            ]
            tops = [f"{max(column):.2f}" for column in columns]
            print(
                f"  {label}: temporaries over the larger piece at most {tops[0]} (XLA {tops[1]}), "
                f"largest array {tops[2]} (XLA {tops[3]})"
            )
    both = [row for row in rows if row.ours_received and row.xla_received]
    print(
        f"  bytes received, XLA over ours, geo      {geo([row.xla_received / row.ours_received for row in both]):6.2f}"
    )
    if not losses_too:
        return
    losses = sorted((row for row in rows if row.ratio < WORST), key=lambda row: row.ratio)
    print(f"  below {WORST}: {len(losses)}" + ("" if losses else ", none"))
    for row in losses:
        later = row.xla_of_again / row.ours_again if row.ours_again and row.xla_of_again else float("nan")
        print(f"    {row.ratio:.2f} (A/A {row.control:.2f}; timed again {later:.2f}) {row.problem}: {row.steps}")


def run(
    options: argparse.Namespace, size: int, measurer: Measurer, keep: Callable[[dict[str, list[Row]]], None]
) -> dict[str, list[Row]]:
    """The rows of each set. The sets take turns, so that the limit cuts both alike."""
    begin = perf_counter()
    rngs = {name: random.Random(f"{seed} {options.devices} {size}") for name, seed in SEEDS.items()}
    rows: dict[str, list[Row]] = {name: [] for name in SEEDS}
    for _ in range(options.problems):
        for name, rng in rngs.items():
            if perf_counter() - begin < options.limit:
                mixed = options.devices not in map(str, MESHES)
                problem = draw_mixed(rng, size) if mixed else draw(rng, int(options.devices), size)
                row = measurer.ask((problem, options.seconds, not options.no_device_put))
                if isinstance(row, Row):
                    rows[name].append(row)
                    keep(rows)
                    continue
                ours = "right" if measurer.ask(problem) else "WRONG"
                print(f"XLA's compiler ended the process, our result is {ours}: {problem}", flush=True)
    return rows


def read_row(row: dict[str, object]) -> Row:
    return Row(**{**row, "device_put": float("nan") if row["device_put"] is None else row["device_put"]})


def report_sets(size: int, rows: dict[str, list[Row]]) -> None:
    for name, found in rows.items():
        if found:
            report(f"{name} set (seed {SEEDS[name]})", size, found)
    report("both sets", size, [row for found in rows.values() for row in found], losses_too=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=[*map(str, sorted(MESHES)), f"{FEWEST}-{MOST}"], default="8")
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.25, 16, 64], help="MiB of each whole array")
    parser.add_argument("--problems", type=int, default=64, help="of each seed")
    parser.add_argument("--seconds", type=float, default=0.5, help="to spend on the timing of one problem")
    parser.add_argument(
        "--limit", type=float, default=float("inf"), help="seconds after which no problem is begun, a size"
    )
    parser.add_argument("--no-device-put", action="store_true", help="leave jax.device_put out")
    parser.add_argument("--json", type=Path, help="write every row here, as it is measured")
    parser.add_argument(
        "--read",
        type=Path,
        nargs="+",
        help="measure nothing, report what these files hold (one run, or several by name)",
    )
    options = parser.parse_args()
    for path in options.read or ():
        kept = json.loads(path.read_text())
        for run_of in [kept] if "rows" in kept else kept.values():
            print(f"\n{run_of['machine']}")
            for size, sets in run_of["rows"].items():
                report_sets(int(size), {name: [read_row(row) for row in rows] for name, rows in sets.items()})
    if options.read:
        return
    mixed = options.devices not in map(str, MESHES)
    measurer = Measurer(MOST if mixed else int(options.devices))
    machine = (
        f"{options.devices} CPU devices in one process; {os.cpu_count()} cores, {platform.machine()}, "
        f"Python {platform.python_version()}, jax {jax.__version__}"
    )
    print(machine)
    done: dict[int, dict[str, list[dict[str, object]]]] = {}
    for size in (int(size * MIB) for size in options.sizes):

        def keep(rows: dict[str, list[Row]], size: int = size) -> None:
            if options.json is not None:
                done[size] = {name: [asdict(row) for row in found] for name, found in rows.items()}
                options.json.write_text(json.dumps({"machine": machine, "rows": done}, indent=1))

        report_sets(size, run(options, size, measurer, keep))


if __name__ == "__main__":
    main()
