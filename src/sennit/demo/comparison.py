"""The demo: one GPT, three plans, simulated on two clusters and run on four real CPU ranks.

`run_demo` is what a user would write with `pipeline.py`, with progress and a report. Every number it gives is simulated
or measured here and now, and says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sennit.capture import capture
from sennit.cluster import Cluster, load
from sennit.cluster.measure_torch import measure_laptop
from sennit.demo.files import write_files
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.pipeline import Compilation, Planner, compile_graph
from sennit.plan import Plan, data_parallel, pipeline, tensor_parallel
from sennit.report import Comparison, MeasuredRun, PlanResult, SimulatedRun
from sennit.run import LocalRanks, RunResult

__all__ = ["DemoOptions", "run_demo"]

RANKS = 4
REPEATS = 5


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Where the report goes, and the size of the model."""

    out: Path
    layers: int = 4

    def __post_init__(self) -> None:
        if self.layers < 2:
            raise PlanError(f"{self.layers} layers for a pipeline of 2 stages", fix="use --layers 2 or more")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A plan, and the meshes it is laid on: 2 x 8 GPUs, and the CPU ranks."""

    name: str
    summary: str
    planner: Planner
    gpus: str
    ranks: str


def run_demo(options: DemoOptions, progress: Callable[[str], None]) -> Comparison:
    """Capture, plan, simulate, run, compare; writes the report to `options.out` and returns what it shows."""
    config = GPTConfig(vocabulary=2048, context=64, width=256, heads=8, layers=options.layers)
    batch = random_batch(config, 32)
    torch.manual_seed(0)
    model = GPT(config)
    progress(f"capturing a GPT of {config.layers} layers")
    graph = capture(model, batch, name="GPT")
    progress("running it on one device, for reference")
    reference, reference_seconds = _reference(model, batch)
    results: list[PlanResult] = []
    with LocalRanks(RANKS) as ranks:
        progress("measuring this machine")
        clusters = (load("dgx-h100:2"), measure_laptop(RANKS, ranks.ranks))
        for entry in _entries(config):
            progress(f"{entry.name}: planning and simulating")
            compiled = _compile(entry, graph, clusters)
            progress(f"{entry.name}: running on {RANKS} CPU ranks")
            result = ranks.run(compiled[1].program, _state(model, batch), repeats=REPEATS)
            results.append(_result(entry, clusters, compiled, _compare(result, reference)))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    summary = (
        f"{config.layers} layers, width {config.width}, {config.heads} heads, {parameters / 1e6:.1f} M parameters, "
        f"batch of {batch[0].shape[0]} x {config.context} tokens, float32"
    )
    comparison = Comparison("GPT", summary, reference_seconds, tuple(results))
    progress("writing the report")
    write_files(options.out, comparison)
    return comparison


def _entries(config: GPTConfig) -> tuple[_Entry, ...]:
    layers = tuple(f"blocks.{number}" for number in range(config.layers))

    def megatron(graph: Graph, mesh: Mesh) -> Plan:
        return tensor_parallel(graph, mesh, qkv="*.qkv", column="*.up", row="*.proj|*.down")

    def staged(graph: Graph, mesh: Mesh) -> Plan:
        return pipeline(graph, mesh, layers=layers)

    return (
        _Entry(
            "data parallel", "each device runs the whole model on its part of the batch", data_parallel, "dp=16", "dp=4"
        ),
        _Entry(
            "tensor parallel",
            "heads and hidden units split inside a node, the batch across",
            megatron,
            "dp=2,tp=8",
            "dp=2,tp=2",
        ),
        _Entry(
            "pipeline 1F1B",
            "two stages, four micro-batches, the batch split as well",
            staged,
            "pp=2,dp=8;mb=4",
            "pp=2,dp=2;mb=4",
        ),
    )


def _compile(entry: _Entry, graph: Graph, clusters: tuple[Cluster, Cluster]) -> tuple[Compilation, Compilation]:
    meshes = (Mesh.parse(entry.gpus), Mesh.parse(entry.ranks))
    gpus, ranks = (
        compile_graph(graph, entry.planner, mesh, cluster) for mesh, cluster in zip(meshes, clusters, strict=True)
    )
    return gpus, ranks


def _reference(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Loss and gradients of the unsplit model in eager torch, and the seconds of a step: the least of a few."""
    seconds: list[float] = []
    loss = torch.zeros(())
    with sdpa_kernel(SDPBackend.MATH):  # the form of attention that is captured, so that bits can be compared
        for _ in range(3):
            model.zero_grad()
            start = time.perf_counter()
            loss = model(*batch)
            loss.backward()
            seconds.append(time.perf_counter() - start)
    gradients = {path: parameter.grad for path, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **gradients}, min(seconds)


def _state(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """Every input of the program by its path; the upstream gradient of the loss is 1."""
    parameters = {path: parameter.detach() for path, parameter in model.named_parameters()}
    return {**parameters, "tokens": batch[0], "targets": batch[1], "tangent": torch.ones(())}


def _compare(result: RunResult, reference: Mapping[str, Tensor]) -> MeasuredRun:
    """Differences are relative to the largest value of each tensor."""
    differences = {
        path: float(
            (result.outputs[path] - whole).abs().max() / whole.abs().max().clamp(min=torch.finfo(whole.dtype).tiny)
        )
        for path, whole in reference.items()
    }
    worst = max(differences, key=lambda path: differences[path])
    return MeasuredRun(
        ranks=RANKS,
        backend="gloo",
        seconds=result.seconds,
        max_difference=differences[worst],
        worst=worst,
        tolerance=256 * torch.finfo(torch.float32).eps,  # sums of a few thousand terms in another order
        bitwise=sum(torch.equal(result.outputs[path], whole) for path, whole in reference.items()),
        compared=len(reference),
    )


def _result(
    entry: _Entry, clusters: tuple[Cluster, Cluster], compiled: tuple[Compilation, Compilation], measured: MeasuredRun
) -> PlanResult:
    simulated = tuple(
        SimulatedRun(_label(cluster), str(one.plan.mesh), one.timeline, one.program)
        for cluster, one in zip(clusters, compiled, strict=True)
    )
    return PlanResult(entry.name, entry.summary, simulated, measured, simulated[1])


def _label(cluster: Cluster) -> str:
    """As a user would name it: `dgx-h100:2`."""
    return f"{cluster.name}:{cluster.nodes}" if cluster.nodes > 1 else cluster.name
