"""Small models for the tests of `parallelize`, and what ranks do with them: nested arguments, several losses, other
types.
"""

from __future__ import annotations

from typing import Any

import parallelize_work as work
import torch
from torch import Tensor, nn

import sennit
from sennit.ir.graph import Graph, Phase
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, data_inputs, data_parallel, pipeline, place, transform
from sennit.testing.training_torch import whole_gradients

WIDTH = 16


class TwoLosses(nn.Module):
    """A dict in, a dict out: two losses and the prediction. A name of its is that of a method of the parallel model."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH, dtype=torch.float64))
        self.register_buffer("mask", torch.arange(WIDTH) % 3 != 0, persistent=False)

    def forward(self, batch: dict[str, Tensor], *, weight: float = 1.0) -> dict[str, Tensor]:
        hidden = torch.relu(self.source(batch["x"])) * self.scale + self.shift.to(batch["x"].dtype)
        one, two = self.first(hidden) * self.mask, self.second(hidden)
        count = batch["y"].numel()
        losses = {
            "one": ((one - batch["y"]) ** 2).sum() / count,
            "two": weight * (two - batch["y"]).abs().sum() / count,
        }
        return {**losses, "prediction": one}


def two_losses() -> TwoLosses:
    torch.manual_seed(1)
    return TwoLosses().double()


def batch(rows: int = 8, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"x": x.to(dtype), "y": y.to(dtype)}


def structures(rank: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, str]]:
    """Losses, results and gradients of the model with two losses, on two ranks."""
    sample = sennit.Sample((batch(),), {"weight": 0.5})
    model = sennit.parallelize(two_losses(), sample, plan=data_parallel, results=["prediction"])
    made = model(batch(), weight=0.5)
    assert isinstance(model.source(), str)  # the method
    assert "source.weight" in dict(model.named_parameters())  # the parameter
    assert "mask" not in model.state_dict()
    assert model.get_submodule("unused").weight.grad is None
    said = {"unequal": work.message(lambda: (made["one"] + 2 * made["two"]).backward())}
    said["number"] = work.message(lambda: model(batch(), weight=0.25))
    made = model(batch(), weight=0.5)
    (3 * (made["one"] + made["two"])).backward()
    assert not made["prediction"].requires_grad
    gradients = whole_gradients(model)
    return {key: value.detach() for key, value in made.items()}, gradients, said


def one_of_two_losses(rank: int) -> dict[str, Tensor]:
    model = sennit.parallelize(two_losses(), sennit.Sample((batch(),)), plan=data_parallel, losses=["two"])
    made = model(batch())
    assert made["prediction"] is None
    made["two"].backward()
    return whole_gradients(model)


def master_weights(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Computing in bfloat16 with parameters in float32."""
    torch.manual_seed(1)
    model = sennit.parallelize(
        TwoLosses(), sennit.Sample((batch(dtype=torch.float32),)), plan=data_parallel, dtype=torch.bfloat16
    )
    made = model(batch(dtype=torch.float32))
    assert made["one"].dtype is torch.bfloat16
    (made["one"] + made["two"]).backward()
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())
    assert all(p.grad.dtype is torch.float32 for p in model.parameters() if p.grad is not None)
    return made["one"].detach(), whole_gradients(model)


def autocast(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    sample = sennit.Sample((batch(dtype=torch.float32),))
    model = sennit.parallelize(TwoLosses(), sample, plan=data_parallel, autocast=torch.bfloat16)
    made = model(batch(dtype=torch.float32))
    (made["one"] + made["two"]).backward()
    return made["one"].detach(), whole_gradients(model)


def two_stages(graph: Graph, mesh: Mesh) -> Plan:
    return pipeline(graph, mesh, layers=("source", "first"))


def scaled(rank: int) -> tuple[list[float], list[bool], dict[str, Tensor]]:
    """A loss scaler over two stages: an overflow on one of them skips the step on both."""
    scaler = sennit.GradScaler("cpu", init_scale=2.0**10, growth_interval=100)
    model = sennit.parallelize(
        two_losses(), sennit.Sample((batch(),)), plan=two_stages, mesh="pp=2;mb=2", scaler=scaler
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, moved = [], []
    for step in range(3):
        made = model(batch())
        scaler.scale(made["one"] + made["two"]).backward()
        if step == 1 and rank == 1:
            next(model.parameters()).grad.to_local().fill_(float("inf"))
        before = model.full_state_dict()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(any(not torch.equal(before[name], value) for name, value in model.full_state_dict().items()))
        scales.append(scaler.get_scale())
    return scales, moved, model.full_state_dict()


def without_values(rank: int) -> dict[str, Tensor]:
    """A model on meta, which gets its values from a state dict."""
    with torch.device("meta"):
        model = TwoLosses().double()
    parallel = sennit.parallelize(model, sennit.Sample((_on_meta(batch()),)), plan=data_parallel, device="cpu")
    parallel.load_state_dict(two_losses().state_dict(), strict=False)
    return parallel.full_state_dict()


def _on_meta(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in tensors.items()}


def other_shapes(rank: int) -> list[float]:
    model = sennit.parallelize(two_losses(), sennit.Sample((batch(),)), plan=data_parallel, dynamic=True)
    return [model(batch(rows))["one"].item() for rows in (8, 4, 8)]


def moved_for_evaluation(rank: int) -> tuple[float, float]:
    """A plan that splits a weight for training and not for evaluation, where its stages are the other way round too."""

    def planner(graph: Graph, mesh: Mesh) -> Plan:
        trains = any(op.phase is Phase.BACKWARD for op in graph.ops)
        plan = transform(Plan("moves", graph, mesh), data_inputs(graph), dim=0, axis="mb")
        if not trains:
            plan = place(plan, graph.select("source", phase=Phase.FORWARD), mesh.at(pp=1))
            return place(plan, graph.select("first|second", phase=Phase.FORWARD), mesh.at(pp=0))
        plan = place(plan, graph.select("source", phase=Phase.FORWARD), mesh.at(pp=0))
        plan = place(plan, graph.select("first|second", phase=Phase.FORWARD), mesh.at(pp=1))
        return transform(plan, graph.select("first", "aten.addmm.default", Phase.FORWARD), dim="n", axis="tp")

    model = sennit.parallelize(two_losses(), sennit.Sample((batch(),)), plan=planner, mesh="pp=2,tp=2;mb=2")
    trained = model(batch())["one"].item()
    model.eval()
    return trained, model(batch())["one"].item()


def alone(rows: int = 8) -> tuple[float, dict[str, Any]]:
    """In one process, which starts its own group of one."""
    model = sennit.parallelize(two_losses(), sennit.Sample((batch(rows),)), plan=data_parallel)
    made = model(batch(rows))
    (made["one"] + made["two"]).backward()
    return made["one"].item(), model.full_state_dict()


def results_of_microbatches(rank: int, mesh: str) -> Tensor:
    """The prediction that a training step of two micro-batches returns beside its losses."""
    planner = two_stages if "pp" in mesh else data_parallel
    model = sennit.parallelize(
        two_losses(), sennit.Sample((batch(),)), plan=planner, mesh=mesh, results=["prediction"], certify=False
    )
    made = model(batch())
    (made["one"] + made["two"]).backward()
    found: Tensor = made["prediction"].detach()
    return found
