"""What ranks do in the tests of `parallelize`: functions of a module that processes can import."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from stage_plans import STAGE_PLANS
from torch import Tensor

import sennit
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.timeline import MemoryKind
from sennit.plan import Plan, data_parallel, pipeline, tensor_parallel, transform
from sennit.testing.training_torch import Record, adamw, sgd, train_parallel, whole_gradients

CONFIG = GPTConfig(vocabulary=48, context=12, width=32, heads=4, layers=2)
BATCH = 8


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).double()


def batches(count: int = 3) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [(random_batch(CONFIG, BATCH, seed=number), {}) for number in range(count)]


def megatron(graph: Graph, mesh: Mesh) -> Plan:
    return tensor_parallel(graph, mesh, qkv="*.qkv", column="*.up", row="*.proj|*.down")


def staged(graph: Graph, mesh: Mesh) -> Plan:
    return pipeline(graph, mesh, layers=("blocks.0", "blocks.1"))


PLANS: dict[str, tuple[Callable[[Graph, Mesh], Plan], str]] = {
    "data": (data_parallel, "dp=4"),
    "tensor": (megatron, "dp=2,tp=2"),
    "pipeline": (staged, "pp=2,dp=2;mb=4"),
    "two devices, tensor": (megatron, "tp=2"),
    "two devices, pipeline": (staged, "pp=2;mb=2"),
    **STAGE_PLANS,
}


# ---- what ranks run --------------------------------------------------------------------------------------------------


def train_gpt(rank: int, plan: str, optimizer: str) -> tuple[Record, list[str], str]:
    planner, mesh = PLANS[plan]
    model = sennit.parallelize(gpt(), batches()[0][0], plan=planner, mesh=mesh)
    record = train_parallel(model, batches(), {"adamw": adamw, "sgd": sgd}[optimizer](model))
    return record, [name for name, _ in model.named_parameters()], model.source()


@functools.cache
def shared(plan: str) -> sennit.ParallelModule:
    """One parallel GPT per plan and process: compiling costs more than the rest of a test."""
    planner, mesh = PLANS[plan]
    return sennit.parallelize(gpt(), batches()[0][0], plan=planner, mesh=mesh)


def fresh(plan: str) -> sennit.ParallelModule:
    """The shared model as it was when it was made."""
    model = shared(plan)
    model.load_state_dict(gpt().state_dict())
    model.train()
    model.step_count = 0
    model.zero_grad()
    return model


def train_shared(rank: int, plan: str) -> tuple[Record, list[str], str]:
    """Three steps of the shared model."""
    model = fresh(plan)
    record = train_parallel(model, batches(), adamw(model))
    return record, [name for name, _ in model.named_parameters()], model.source()


def accumulate(rank: int, plan: str) -> dict[str, Tensor]:
    """Two halves of the loss, with a `zero_grad` of both kinds before."""
    model = fresh(plan)
    model(*batches()[0][0]).backward()
    model.zero_grad(set_to_none=False)
    assert all(not parameter.grad.to_local().any() for parameter in model.parameters())
    (model(*batches()[0][0]) / 2).backward()
    (model(*batches()[1][0]) / 2).backward()
    return whole_gradients(model)


def message(work: Callable[[], object]) -> str:
    try:
        work()
    except (sennit.SennitError, ZeroDivisionError) as error:
        return str(error)
    return "no error"


def misuse(rank: int) -> dict[str, str]:
    """Mistakes and what is said about them, without a hang: the model works afterwards."""
    model = fresh("data")
    tokens, targets = batches()[0][0]
    loss = model(tokens, targets)
    loss.backward(retain_graph=True)
    said = {"second backward": message(loss.backward)}
    said["changed shape"] = message(lambda: model(tokens[:4], targets[:4]))
    said["changed type"] = message(lambda: model(tokens.int(), targets))
    said["wrong device"] = message(lambda: model(tokens.to("meta"), targets))
    said["part of the model"] = message(lambda: model.get_submodule("blocks.0")(tokens))
    said["unknown name"] = message(lambda: model.load_state_dict({"nonsense": tokens}))
    state = gpt().state_dict()
    said["wrong shape"] = message(lambda: model.load_state_dict({**state, "norm.weight": torch.ones(3)}))
    model(tokens, targets).backward()
    return said


def refused(rank: int) -> dict[str, str]:
    """Calls of `parallelize` that every rank refuses."""
    sample = batches()[0][0]

    def differs(graph: Graph, mesh: Mesh) -> Plan:
        return data_parallel(graph, mesh) if rank < 2 else Plan("another", graph, mesh)

    def fails(graph: Graph, mesh: Mesh) -> Plan:
        if rank == 1:
            transform(Plan("wrong", graph, mesh), graph.inputs[:1], dim=99, axis="dp")
        return data_parallel(graph, mesh)

    def has_a_bug(graph: Graph, mesh: Mesh) -> Plan:
        return Plan(f"bug {1 // (3 - rank)}", graph, mesh) if rank == 3 else data_parallel(graph, mesh)

    half = gpt()
    half.head.to("meta")
    return {
        "world": message(lambda: sennit.parallelize(gpt(), sample, plan=data_parallel, mesh="dp=8")),
        "differs": message(lambda: sennit.parallelize(gpt(), sample, plan=differs)),
        "fails": message(lambda: sennit.parallelize(gpt(), sample, plan=fails)),
        "bug": message(lambda: sennit.parallelize(gpt(), sample, plan=has_a_bug)),
        "devices": message(lambda: sennit.parallelize(half, sample, plan=data_parallel)),
        "result": message(lambda: sennit.parallelize(gpt(), sample, plan=data_parallel, results=["logits"])),
    }


def evaluate(rank: int, plan: str) -> tuple[float, float, dict[str, Tensor], dict[str, Tensor]]:
    """Evaluation before and after a step; the state as a checkpoint of the single-device model, and that model."""
    model = fresh(plan)
    sample = batches()[0][0]
    model.eval()
    with torch.no_grad():
        before = model(*sample).item()
    model.train()
    optimizer = sgd(model)
    model(*sample).backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        after = model(*sample).item()
    single = model.single_device()
    assert isinstance(single, GPT)
    assert single.head.weight is single.tokens.weight
    return before, after, model.full_state_dict(), dict(single.state_dict())


def parts_of_the_batch(rank: int) -> float:
    """The loss of a model that is called with this rank's part alone."""
    tokens, targets = batches()[0][0]
    planner, mesh = PLANS["tensor"]
    model = sennit.parallelize(gpt(), (tokens, targets), plan=planner, mesh=mesh, inputs="local")
    part = slice(0, 4) if rank < 2 else slice(4, 8)
    said = message(lambda: model(tokens, targets))
    assert "argument 'tokens' is i64[8,12]" in said, said
    return float(model(tokens[part], targets[part]))


def save(rank: int, plan: str, folder: str) -> Record:
    """Two steps, a checkpoint, and a third step."""
    model = fresh(plan)
    optimizer = adamw(model)
    train_parallel(model, batches()[:2], optimizer)
    dcp.save({"app": sennit.TrainingState(model, optimizer)}, checkpoint_id=folder)
    return train_parallel(model, batches()[2:], optimizer)


def load(rank: int, plan: str, folder: str) -> tuple[Record, int]:
    """The checkpoint under another plan, and the third step from there."""
    model = fresh(plan)
    optimizer = adamw(model)
    dcp.load({"app": sennit.TrainingState(model, optimizer)}, checkpoint_id=folder)
    steps = model.step_count
    return train_parallel(model, batches()[2:], optimizer), steps


def memory(rank: int, plan: str) -> tuple[str, int, int, int]:
    model = fresh(plan)
    optimizer = adamw(model)
    with model.measuring_memory():
        model(*batches()[0][0]).backward()
    report = model.memory_report(optimizer)
    predicted = report.at_peak[MemoryKind.OPTIMIZER]
    optimizer.step()
    measured = model.memory_report(optimizer).measured[MemoryKind.OPTIMIZER]
    assert predicted == measured, (predicted, measured)
    assert report.measured_step is not None
    parameters = report.at_peak[MemoryKind.PARAMETERS]
    assert parameters is not None
    return str(report), report.predicted_step, report.measured_step, parameters


def pipes() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {target for target in found if target.startswith("pipe:")}


def both_ways(rank: int) -> dict[str, Any]:
    """One step, compiled in a child and here; what each way says of itself, and what is left of the child."""
    sample = batches()[0][0]
    planner, mesh = PLANS["pipeline"]
    found: dict[str, Any] = {}
    for where in ("child", "here"):
        before = pipes()
        model = sennit.parallelize(gpt(), sample, plan=planner, mesh=mesh, compile_in=where)
        left = len(pipes() - before)  # new groups have some
        model(*sample).backward()
        gradients = whole_gradients(model)
        seen = (str(model.program), str(model.graph), model.source(), repr(model), sorted(model.compile_seconds))
        found[where] = (gradients, seen, left)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
    return {**found, "children": len(children)}
