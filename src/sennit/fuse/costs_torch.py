"""Which estimator serves which device.

The weights that ship (`fuse/weights/`) were trained on groups that Inductor compiled for one sort of GPU. For that
device the learned estimator answers. For any other the costs are those by stages (`kernel_cost.py`), with the device's
own profile where it has one. On a CPU operators run one by one, as they are: a group takes the sum of its parts
(`Unfused`), by a profile of CPU operators. Times that were measured here (`cost/database.py`) come before all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch

from sennit.cluster import Device
from sennit.cost import OperatorCosts, load_profile
from sennit.fuse.eager_graph_torch import eager_graph
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.kernel_cost import Estimate, KernelCost, Roofline, Staged
from sennit.fuse.known_cost import KnownCost
from sennit.fuse.measured_search import Measure
from sennit.fuse.model import StepModel
from sennit.fuse.signature import signature
from sennit.ir.graph import Graph
from sennit.ir.strategy_check import Kernel

__all__ = ["Chosen", "Unfused", "choose_cost", "data_parallel_graph", "with_operators_measured"]

_LEARNED = {"H200 SXM5 141GB": "estimator_h200.pt"}
_CPU = "cpu-rank"  # fitted by benchmarks/fuse/fit_cpu.py
_CPU_DEVIATION = 0.4  # of the logarithm of an operator's time, on models that the fit did not see


@dataclass(frozen=True, slots=True)
class Unfused:
    """Operators as they are, one after another: what a group takes that no compiler makes one."""

    staged: Staged

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        known = [self.staged.as_measured(op) for op in kernel.body]
        seconds = [self.staged.alone(op) if it is None else it for op, it in zip(kernel.body, known, strict=True)]
        guessed = any(it is None and length > 0 for it, length in zip(known, seconds, strict=True))
        return Estimate(sum(seconds), _CPU_DEVIATION if guessed else 0.0)


@dataclass(frozen=True, slots=True)
class Chosen:
    """A cost, and in words what it rests on.

    `fuses` is false where a group takes what its operators take, so that there is nothing to choose.
    """

    cost: KnownCost
    source: str
    fuses: bool = True


def data_parallel_graph(graph: Graph, device: Device, *, fused_attention: bool = True) -> Graph:
    """The graph as `DataParallel` runs it, with gradients as early as can be: a strategy for it is one for that."""
    where = torch.device("cpu" if device.kind.startswith("CPU") else "cuda")
    return gradients_first(eager_graph(graph, where, fused_attention=fused_attention))


def choose_cost(
    graph: Graph,
    device: Device,
    measured: Mapping[str, float] | None = None,
    lone: Mapping[str, float] | None = None,
) -> Chosen:
    """`measured` are seconds by signature, of kernels as they run; `lone` those of operators, from which groups are
    estimated: compiled, where groups are. By default the same.
    """
    measured = measured or {}
    is_cpu = device.kind.startswith("CPU")
    costs = OperatorCosts(device, load_profile(_CPU), carried=True) if is_cpu else OperatorCosts.of(device)
    staged = Staged(Roofline.of(graph, device), costs, measured if lone is None else lone)
    estimator: KernelCost = staged
    weights = _weights(device)
    if weights is not None:
        from sennit.fuse.estimator_torch import LearnedCost

        estimator = LearnedCost.load(weights, staged)
        source = f"estimator trained on groups measured on {device.kind}"
    elif is_cpu:
        estimator = Unfused(staged)
        source = f"operators one by one, the profile {_CPU} carried over to {device.kind}"
    else:
        source = f"stages with the profile of {device.kind}" if device.profile else f"stages, roofline of {device.kind}"
    if measured:
        source = f"{len(measured)} measured kernels; else {source}"
    return Chosen(KnownCost(graph.types(), estimator, measured), source, not isinstance(estimator, Unfused))


def with_operators_measured(model: StepModel, cost: KnownCost, measure: Measure) -> StepModel:
    """The model with its unsure operators measured, where groups are their operators one by one: what is known of one
    counts in every group that has it.
    """
    estimator = cost.estimator
    assert isinstance(estimator, Unfused)
    asked = [model.question(single) for single in model.single]
    cost.estimate_all(asked)
    unsure = cost.unsure(asked, _CPU_DEVIATION)
    types = model.graph.types()
    known = dict(estimator.staged.measured)
    for question, seconds in zip(unsure, measure(unsure), strict=True):
        if seconds is not None:
            known[signature(*question, types)] = seconds
    staged = estimator.staged.with_measured(known)
    return StepModel(model.graph, KnownCost(types, Unfused(staged), known), model.channel)


def _weights(device: Device) -> Path | None:
    name = _LEARNED.get(device.kind)
    if name is None:
        return None
    path = Path(str(resources.files("sennit.fuse") / "weights" / name))
    return path if path.is_file() else None
