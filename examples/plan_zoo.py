"""The plans of the zoo side by side, without a single rank: what each would send and hold for a GPT on four GPUs of a
DGX A100, simulated.

python examples/plan_zoo.py
"""

from __future__ import annotations

from functools import partial

import torch

from sennit.capture import capture
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective
from sennit.plan import lower, propagate, zoo
from sennit.plan.verify import verify
from sennit.sim import simulate

CONFIG = GPTConfig(vocabulary=128, context=128, width=128, heads=8, layers=2, tie_embeddings=False)
PLANS = {
    "data parallel": (zoo.data_parallel, "dp=4"),
    "ZeRO-1": (partial(zoo.zero, level=1), "dp=4;mb=2"),
    "ZeRO-2": (partial(zoo.zero, level=2), "dp=4;mb=2"),
    "ZeRO-3": (partial(zoo.zero, level=3), "dp=4;mb=2"),
    "tensor parallel": (zoo.tensor_parallel, "tp=4"),
    "tensor and sequence parallel": (partial(zoo.tensor_parallel, sequence=True), "tp=4"),
    "context parallel": (zoo.context_parallel, "cp=4"),
    "pipeline": (partial(zoo.pipeline, layers=("blocks.0", "blocks.1")), "pp=2,dp=2;mb=4"),
    "co-shard in 4": (partial(zoo.co_shard, pieces=4), "dp=4"),
    "co-shard in 2, tensor parallel": (partial(zoo.co_shard, pieces=2), "dp=2,tp=2"),
}


def main() -> None:
    with torch.device("meta"):  # shapes are all that planning needs
        graph = capture(GPT(CONFIG), random_batch(CONFIG, 8), name="GPT")
    cluster = load("dgx-a100")
    print(f"{'plan':32s} {'mesh':16s} {'collectives':>11s} {'MB held':>9s} {'simulated ms':>13s}")
    for name, (plan_of, mesh) in PLANS.items():
        plan = plan_of(graph, Mesh.parse(mesh))
        program = lower(propagate(plan))
        verify(program, plan.graph)
        timeline = simulate(program, cluster)
        collectives = sum(isinstance(step, Collective) for step in program.lanes[0].steps)
        held = timeline.peak_memory(0) / 1e6
        print(f"{name:32s} {mesh:16s} {collectives:11d} {held:9.2f} {timeline.span * 1e3:13.3f}")


if __name__ == "__main__":
    main()
