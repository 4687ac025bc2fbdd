"""From a model's source to a simulated step, against the H200: capture, plan on one device, lower, simulate.

    python benchmarks/sim/captured_steps.py [--fused-attention] [NAME ...]

Names choose cases of blocks.py that contain them. What is simulated is compared with the same program run on the GPU
(`run_captured.py`, h200_captured.json): the same operators in the same order, with the same frees. Only the profile
that ships comes from such a GPU; it has seen the operators of the blocks as eager torch runs them, not those that
capture makes of them.

With `--fused-attention`, programs have their attention as one kernel and are compared with the blocks as eager torch
runs them (h200_profile.json), which call one. These still differ in what capture takes apart: losses and RMS norms.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from blocks import CASES, make

from sennit.capture import capture
from sennit.cluster import load
from sennit.ir.mesh import Mesh
from sennit.plan import data_parallel, lower, propagate
from sennit.sim import fuse_attention, simulate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names of cases")
    parser.add_argument("--fused-attention", action="store_true", help="compare with eager torch's fused kernels")
    options = parser.parse_args()
    source = "h200_profile.json" if options.fused_attention else "h200_captured.json"
    measured = json.loads(Path(__file__).with_name(source).read_text(encoding="utf-8"))
    steps = {step["name"]: step for step in measured["steps"]}
    cluster = load("h200x8")
    times: list[float] = []
    sizes: list[float] = []
    print("| block | operators | measured, ms | simulated, ms | off by | memory, MB | simulated, MB | off by |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        module, arguments = make(case, "cpu")
        program = lower(propagate(data_parallel(capture(module, arguments, name=case.name), Mesh.parse("dp=1"))))
        if options.fused_attention:
            program = fuse_attention(program)
        timeline = simulate(program, cluster)
        step = steps[case.name]
        real, most = median(step["graphed"]), step["peak"] - step["before"]
        there = sum(item.nbytes for item in (*module.parameters(), *module.buffers(), *arguments))
        peak = timeline.peak_memory(0) - there
        times.append(timeline.span / real - 1)
        sizes.append(peak / most - 1)
        print(
            f"| {case.name} | {len(program.lanes[0].steps)} | {real * 1e3:.2f} | {timeline.span * 1e3:.2f} | {times[-1]:+.1%} | "
            f"{most / 1e6:.0f} | {peak / 1e6:.0f} | {sizes[-1]:+.1%} |",
            flush=True,
        )
    for what, errors, target in (("time", times, "5%"), ("memory", sizes, "3%")):
        print(f"\n{what}: median {median(map(abs, errors)):.1%} (target {target}), worst {max(errors, key=abs):+.1%}")


if __name__ == "__main__":
    main()
