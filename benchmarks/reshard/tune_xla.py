"""Times of every way to reshard, for the cost model of `sennit.reshard.fused_jax`.

    PYTHONPATH=src python benchmarks/reshard/tune_xla.py --devices 8 --limit 120 --json rows.json

Random problems as in `xla.py`, from other seeds, of several sizes in turn, until the time is over. Of each problem every
candidate sequence is compiled, in each lowering that it has (at most `--most`: the first, which keep the target's names, and a sample of the others) and
timed in turns with XLA's own, which is there twice. A row of the JSON is a problem: its candidates with their steps, their
work (`fused_jax.Work`) and seconds, XLA's seconds and its collectives. `fit_xla.py` reads it.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import islice
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from xla import FEWEST, MESHES, MIB, MOST, Problem, collectives, draw, draw_mixed, read_program, take_turns

from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.fused_jax import sequences, work
from sennit.reshard.lower_jax import Direct, leads, lower
from sennit.reshard.pieces_jax import positions
from sennit.reshard.redistribution import Step, StepKind

SIZES = (16, 64, 16, 4, 64, 0.25)


def layouts(problem: Problem) -> tuple[Layout, Layout]:
    mesh = Mesh.make(dict(zip("xyzw", problem.mesh, strict=False)))
    before, after = (
        Layout.block(mesh, problem.shape, dict(enumerate(dims))).refined() for dims in (problem.before, problem.after)
    )
    return before, after


def candidates(problem: Problem, most: int) -> list[tuple[Step, ...]]:
    """The first and a sample of the others, each once."""
    found = [steps for steps in dict.fromkeys(islice(sequences(*layouts(problem)), 128)) if steps]
    first, others = found[: most // 2], found[most // 2 :]
    return first + random.Random(0).sample(others, min(len(others), most - len(first)))


def lowerings(steps: tuple[Step, ...]) -> list[Direct]:
    """Nothing in parts, and where a group has two or four members all-to-alls, gathers, or both."""
    every = positions([steps[0].source, *(step.result for step in steps)])
    assert every is not None
    members = {
        kind: {
            prod(step.source.mesh.size(axis) for axis in step.axes)
            for step in steps
            if step.kind is kind and (kind is StepKind.ALL_TO_ALL or not leads(step, every))
        }
        & {2, 3, 4}
        for kind in (StepKind.ALL_TO_ALL, StepKind.ALL_GATHER)
    }
    return [
        Direct(exchange, gather, 0)
        for exchange in sorted({1, *members[StepKind.ALL_TO_ALL]})
        for gather in sorted({1, *members[StepKind.ALL_GATHER]})
    ]


def measure(problem: Problem, most: int, seconds: float) -> dict[str, Any]:
    devices = np.array(jax.devices("cpu")[: prod(problem.mesh)]).reshape(problem.mesh)
    mesh = jax.sharding.Mesh(devices, tuple("xyzw"[: len(problem.mesh)]))
    specs = [PartitionSpec(*(axes or None for axes in dims)) for dims in (problem.before, problem.after)]
    source, target = (NamedSharding(mesh, spec) for spec in specs)
    values = np.random.default_rng(0).standard_normal(problem.shape, dtype=np.float32)
    x = jax.device_put(values, source)
    ways = [(steps, direct) for steps in candidates(problem, most) for direct in lowerings(steps)]

    def compiled(way: tuple[tuple[Step, ...], Direct] | None) -> Callable[[Any], jax.Array]:
        function = lambda a: a  # noqa: E731
        if way is not None:
            function = jax.shard_map(
                lambda piece: lower(way[0], mesh.axis_names, piece, way[1]),
                mesh=mesh,
                in_specs=specs[0],
                out_specs=specs[1],
                check_vma=False,
            )
        return jax.jit(function, out_shardings=target).lower(x).compile()

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, [*ways, None]))
    functions = [lambda program=program: program(x) for program in [*programs, programs[-1]]]
    times = take_turns(functions, seconds * len(functions), 40)
    text = programs[-1].as_text()
    return {
        "mesh": problem.mesh,
        "shape": problem.shape,
        "before": problem.before,
        "after": problem.after,
        "problem": str(problem),
        "candidates": [
            {
                "steps": " ".join(f"{step.kind.value}({','.join(step.axes)})" for step in steps),
                "direct": (direct.exchange, direct.gather),
                "work": asdict(work(steps, 4, direct)),
                "seconds": time,
                "temporary": program.memory_analysis().temp_size_in_bytes,
            }
            for (steps, direct), time, program in zip(ways, times, programs, strict=False)
        ],
        "xla": times[-2],
        "xla_again": times[-1],
        "xla_collectives": collectives(text),
        "xla_largest": read_program(text)[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", choices=[*map(str, sorted(MESHES)), f"{FEWEST}-{MOST}"], default="8")
    parser.add_argument("--limit", type=float, default=120, help="seconds in all")
    parser.add_argument("--most", type=int, default=12, help="candidates of a problem")
    parser.add_argument("--seconds", type=float, default=0.06, help="to spend on the timing of one candidate")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    mixed = options.devices not in map(str, MESHES)
    jax.config.update("jax_num_cpu_devices", MOST if mixed else int(options.devices))
    jax.config.update("jax_platforms", "cpu")
    begin = perf_counter()
    rng = random.Random(f"{options.seed} {options.devices}")
    rows: list[dict[str, Any]] = []
    while perf_counter() - begin < options.limit:
        size = int(SIZES[len(rows) % len(SIZES)] * MIB)
        problem = draw_mixed(rng, size) if mixed else draw(rng, int(options.devices), size)
        if positions(layouts(problem)) is None:
            continue  # there is one way at most
        rows.append(measure(problem, options.most, options.seconds))
        text = json.dumps({"jax": jax.__version__, "devices": options.devices, "rows": rows}, indent=1)
        options.json.write_text(text)
    print(f"{len(rows)} problems, {sum(len(row['candidates']) for row in rows)} candidates")


if __name__ == "__main__":
    main()
