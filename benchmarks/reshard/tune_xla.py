"""Times of every way to reshard, for the cost model of `sennit.reshard.phases_jax`.

    PYTHONPATH=src python benchmarks/reshard/tune_xla.py --devices 8 --limit 120 --json rows.json

Random problems as in `xla.py`, from other seeds, of several sizes in turn, until the time is over. Of each problem
every candidate sequence is compiled (at most `--most`: the first, which keep the target's names, and a sample of the
others), in each way that it is lowered, and timed in turns with XLA's own, which is there twice. A row of the JSON is a
problem: its candidates with their steps, their work (`phases_jax.Work`), the temporaries that the compiler states, and
seconds, XLA's seconds and its collectives. `fit_xla.py` reads it.
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
from xla import MIB, collectives, read_program, take_turns
from xla_problems import FEWEST, MESHES, MOST, Problem, draw, draw_mixed

from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.reshard.fused_jax import sequences
from sennit.reshard.lower_jax import lower
from sennit.reshard.phases_jax import Phase, ways, work
from sennit.reshard.pieces_jax import Position, positions

SIZES = (16, 64, 16, 4, 64, 0.25)


def layouts(problem: Problem) -> tuple[Layout, Layout]:
    mesh = Mesh.make(dict(zip("xyzw", problem.mesh, strict=False)))
    before, after = (
        Layout.block(mesh, problem.shape, dict(enumerate(dims))).refined() for dims in (problem.before, problem.after)
    )
    return before, after


def candidates(problem: Problem, most: int) -> list[tuple[tuple[Phase, ...], tuple[Position, ...]]]:
    """All ways of the first sequences and of a sample of the others, each with the positions of its layouts."""
    source, target = layouts(problem)
    found = list(dict.fromkeys(islice(sequences(source, target), 128)))
    first, others = found[: most // 2], found[most // 2 :]
    chosen = first + random.Random(0).sample(others, min(len(others), most - len(first)))
    every = [positions([source, *(step.result for step in steps)]) for steps in chosen]
    return [(way, known) for steps, known in zip(chosen, every, strict=True) if known for way in ways(steps, known)]


def text(way: tuple[Phase, ...]) -> str:
    return " ".join(
        "+".join(f"{step.kind.value}({','.join(step.axes)})" for step in phase.steps)
        + ("/parts" if phase.in_parts else "")
        for phase in way
    )


def measure(problem: Problem, most: int, seconds: float) -> dict[str, Any]:
    devices = np.array(jax.devices("cpu")[: prod(problem.mesh)]).reshape(problem.mesh)
    mesh = jax.sharding.Mesh(devices, tuple("xyzw"[: len(problem.mesh)]))
    specs = [PartitionSpec(*(axes or None for axes in dims)) for dims in (problem.before, problem.after)]
    source, target = (NamedSharding(mesh, spec) for spec in specs)
    values = np.random.default_rng(0).standard_normal(problem.shape, dtype=np.float32)
    x = jax.device_put(values, source)
    tried = candidates(problem, most)

    def compiled(way: tuple[Phase, ...] | None) -> Callable[[Any], jax.Array]:
        function = lambda a: a  # noqa: E731
        if way is not None:
            function = jax.shard_map(
                lambda piece: lower(way, mesh.axis_names, piece),
                mesh=mesh,
                in_specs=specs[0],
                out_specs=specs[1],
                check_vma=False,
            )
        return jax.jit(function, out_shardings=target).lower(x).compile()

    with ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(compiled, [*(way for way, _ in tried), None]))
    functions = [lambda program=program: program(x) for program in [*programs, programs[-1]]]
    times = take_turns(functions, seconds * len(functions), 40)
    own = programs[-1].as_text()
    return {
        "mesh": problem.mesh,
        "shape": problem.shape,
        "before": problem.before,
        "after": problem.after,
        "problem": str(problem),
        "candidates": [
            {
                "steps": text(way),
                "work": asdict(work(way, 4, every)),
                "seconds": time,
                "temporary": program.memory_analysis().temp_size_in_bytes,
            }
            for (way, every), time, program in zip(tried, times, programs, strict=False)
        ],
        "xla": times[-2],
        "xla_again": times[-1],
        "xla_collectives": collectives(own),
        "xla_largest": read_program(own)[0],
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
        kept = {"jax": jax.__version__, "devices": options.devices, "rows": rows}
        options.json.write_text(json.dumps(kept, indent=1))
    print(f"{len(rows)} problems, {sum(len(row['candidates']) for row in rows)} candidates")


if __name__ == "__main__":
    main()
