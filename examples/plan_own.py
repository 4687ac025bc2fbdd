"""A plan of one's own: the batch over `dp`, the attention of each block over heads, the MLP of every second block over
its hidden units, the rest whole. Nobody has a name for it; it is verified and runs like the others.

    torchrun --nproc-per-node 4 examples/plan_own.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import sennit
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, data_inputs, transform

CONFIG = GPTConfig(vocabulary=256, context=32, width=64, heads=4, layers=4)


def every_second(graph: Graph, mesh: Mesh) -> Plan:
    def matmuls(module: str):
        return graph.select(module, "aten.mm.default|aten.addmm.default", Phase.FORWARD)

    plan = Plan("every second MLP", graph, mesh)
    plan = transform(plan, data_inputs(graph), dim=0, axis="dp")
    plan = transform(plan, matmuls("blocks.*.qkv"), dim="n", axis="tp", chunks=3)  # heads, in each of q, k and v
    plan = transform(plan, matmuls("blocks.*.proj"), dim="k", axis="tp")
    plan = transform(plan, matmuls("blocks.[13].up"), dim="n", axis="tp")
    return transform(plan, matmuls("blocks.[13].down"), dim="k", axis="tp")


def main() -> None:
    torch.manual_seed(0)
    batch = random_batch(CONFIG, 16)
    model = sennit.parallelize(GPT(CONFIG), batch, plan=every_second, mesh="dp=2,tp=2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}")
    if dist.get_rank() == 0:
        for name in ("blocks.0.up.weight", "blocks.1.up.weight", "blocks.0.attention.qkv.weight"):
            print(f"{name} lies as {model.home(name).layout}")
        print("\n".join(model.source().splitlines()[:40]))


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
