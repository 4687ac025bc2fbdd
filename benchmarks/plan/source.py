"""How long it takes to write and load the source of a step for a thousand ranks: one text per lane, whatever the number
of ranks.

python benchmarks/plan/source.py --layers 8 --mesh "pp=8,dp=16,tp=8;mb=8"
"""

from __future__ import annotations

import argparse
import time

from sennit.capture import capture
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Phase
from sennit.ir.mesh import Mesh
from sennit.plan import lower, propagate, transform, zoo
from sennit.run import emit_lane
from sennit.run.rank import groups_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--mesh", default="pp=8,dp=16,tp=8;mb=8")
    options = parser.parse_args()
    clock = Clock()
    config = GPTConfig(vocabulary=512, context=64, width=256, heads=16, layers=options.layers)
    graph = capture(GPT(config), random_batch(config, 512))
    clock.lap(f"capture, {len(graph.ops)} operators")
    matmuls = "aten.mm.default|aten.addmm.default"
    plan = zoo.pipeline(graph, Mesh.parse(options.mesh), layers=tuple(f"blocks.{i}" for i in range(options.layers)))
    plan = transform(plan, graph.select("*.qkv", matmuls, Phase.FORWARD), dim="n", axis="tp", chunks=3)
    plan = transform(plan, graph.select("*.up", matmuls, Phase.FORWARD), dim="n", axis="tp")
    plan = transform(plan, graph.select("*.proj|*.down", matmuls, Phase.FORWARD), dim="k", axis="tp")
    decisions = propagate(plan)
    clock.lap("propagate")
    program = lower(decisions)
    clock.lap(f"lower, {sum(len(lane.steps) for lane in program.lanes)} steps, {len(program.devices)} devices")
    sources = [emit_lane(program, lane) for lane in program.lanes]
    clock.lap(f"write the source, {len(sources)} lanes, {sum(text.count(chr(10)) for text in sources)} lines")
    for lane, text in zip(program.lanes, sources, strict=True):
        compile(text, lane.name, "exec")
    clock.lap("compile it")
    clock.lap(f"find the groups, {len(groups_of(program))}")


class Clock:
    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self, what: str) -> None:
        now = time.perf_counter()
        print(f"{now - self.last:8.2f} s  {what}", flush=True)
        self.last = time.perf_counter()


if __name__ == "__main__":
    main()
