"""What ranks do in the tests of the zoo: functions of a module that processes can import."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from parallelize_work import batches, gpt

import sennit
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.timeline import MemoryKind
from sennit.plan import Plan, zoo
from sennit.testing.training_torch import Record, adamw, train_parallel


def staged(graph: Graph, mesh: Mesh, level: int) -> Plan:
    return zoo.sharded(zoo.pipeline(graph, mesh, layers=("blocks.0", "blocks.1")), level=level)


def split(graph: Graph, mesh: Mesh, level: int) -> Plan:
    return zoo.sharded(zoo.tensor_parallel(graph, mesh, sequence=True), level=level)


PLANS: dict[str, tuple[Callable[[Graph, Mesh], Plan], str]] = {
    "data": (zoo.data_parallel, "dp=4;mb=2"),
    "ZeRO-1": (partial(zoo.zero, level=1), "dp=4;mb=2"),
    "ZeRO-2": (partial(zoo.zero, level=2), "dp=4;mb=2"),
    "ZeRO-3": (partial(zoo.zero, level=3), "dp=4;mb=2"),
    "pipeline, ZeRO-2": (partial(staged, level=2), "pp=2,dp=2;mb=4"),
    "tensor, ZeRO-3": (partial(split, level=3), "dp=2,tp=2"),
    "co-shard": (partial(zoo.co_shard, pieces=4), "dp=4;mb=2"),
}


def train(rank: int, plan: str) -> Record:
    planner, mesh = PLANS[plan]
    model = sennit.parallelize(gpt(), batches()[0][0], plan=planner, mesh=mesh)
    return train_parallel(model, batches(), adamw(model))


def memory(rank: int, plan: str) -> tuple[int, int, int]:
    """Bytes of a step at its peak, predicted and measured, and of parameters and optimizer state; of a GPT whose
    activations count.
    """
    planner, mesh = PLANS[plan]
    config = GPTConfig(vocabulary=48, context=16, width=64, heads=4, layers=2, tie_embeddings=False)
    torch.manual_seed(0)
    batch = random_batch(config, 16)
    model = sennit.parallelize(GPT(config), batch, plan=planner, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    with model.measuring_memory():
        model(*batch).backward()
    report = model.memory_report(optimizer)
    assert report.measured_step is not None
    standing = sum(report.at_peak[kind] or 0 for kind in (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER))
    return report.predicted_step, report.measured_step, standing
