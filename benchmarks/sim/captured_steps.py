"""From a model's source to a simulated step, against the H200: capture, plan on one device, lower, simulate.

    python benchmarks/sim/captured_steps.py [--fused-attention] [NAME ...]

Names choose cases of blocks.py that contain them. Unlike accuracy.py, which costs the operators that ran on the GPU, nothing here
comes from the GPU but the profile that ships, which has seen these blocks: what is compared is the whole way, with the operators
that sennit captures and the order and the frees of its own program. Attention is captured in its mathematical form and
images without their memory format, so blocks that use a fused kernel or channels last are expected to differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from blocks import CASES, make

from sennit.capture import capture
from sennit.cluster import load
from sennit.errors import SennitError
from sennit.ir.mesh import Mesh
from sennit.plan import data_parallel, lower, propagate
from sennit.sim import simulate


def main() -> None:
    measured = json.loads(Path(__file__).with_name("h200_profile.json").read_text(encoding="utf-8"))
    steps = {step["name"]: step for step in measured["steps"]}
    cluster = load("h200x8")
    print("| block | operators | measured, ms | simulated, ms | off by | memory, MB | simulated, MB | off by |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if len(sys.argv) > 1 and not any(name in case.name for name in sys.argv[1:]):
            continue
        module, arguments = make(case, "cpu")
        try:
            graph = capture(module, arguments, name=case.name)
            program = lower(propagate(data_parallel(graph, Mesh.parse("dp=1"))))
        except SennitError as error:
            print(f"| {case.name} | not captured: {error.what} | | | | | | |", flush=True)
            continue
        timeline = simulate(program, cluster)
        step = steps[case.name]
        real, most = median(step["graphed"]), step["peak"] - step["before"]
        there = sum(item.nbytes for item in (*module.parameters(), *module.buffers(), *arguments))
        peak = timeline.peak_memory(0) - there
        print(
            f"| {case.name} | {len(graph.ops)} | {real * 1e3:.2f} | {timeline.span * 1e3:.2f} | {timeline.span / real - 1:+.1%} | "
            f"{most / 1e6:.0f} | {peak / 1e6:.0f} | {peak / most - 1:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
