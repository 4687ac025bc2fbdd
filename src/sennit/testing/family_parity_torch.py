"""A family under a plan on real ranks, against the unsplit model in eager torch: three optimizer steps in float64,
dropout on.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.run.parallelize import parallelize
from sennit.testing.eager_torch import Float64, comparable
from sennit.testing.families_torch import Sample, families
from sennit.testing.family_plans import family_mesh, family_plan
from sennit.testing.training_torch import Calls, Record, sgd, train_eager, train_parallel

__all__ = ["FamilyRun", "batched", "build", "calls_of", "family_reference", "family_run"]

BATCH = 4


@dataclass(frozen=True, slots=True)
class FamilyRun:
    """What a rank saw: the training, seconds of compiling by stage and of three steps, operators, steps of its lane."""

    record: Record
    compile_seconds: Mapping[str, float]
    step_seconds: float
    operators: int
    lane_steps: int


def build(name: str, device: str = "cpu") -> Sample:
    """A family with a batch of four; its model alike on every call."""
    family = families()[name]
    sample = batched(family.build(family.layers))
    kwargs = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in sample.kwargs.items()}
    return Sample(sample.model.to(device), kwargs)


def batched(sample: Sample) -> Sample:
    """The sample with a batch of four."""
    return Sample(sample.model, {key: _batched(value) for key, value in sample.kwargs.items()})


def _batched(value: Any) -> Any:
    return torch.cat([value] * (BATCH // value.shape[0])) if isinstance(value, Tensor) else value


def calls_of(sample: Sample, steps: int = 3) -> Calls:
    """The sample, its rows in another order each time."""
    return [
        ((), {key: v.roll(step, 0) if isinstance(v, Tensor) else v for key, v in sample.kwargs.items()})
        for step in range(steps)
    ]


@contextmanager
def _as_captured(step: int) -> Iterator[None]:
    with Float64(), comparable(0, step):
        yield


def family_reference(name: str, device: str = "cpu") -> Record:
    """The unsplit model."""
    sample = build(name, device)
    model = copy.deepcopy(sample.model)
    return train_eager(model, calls_of(sample), sgd(model), _as_captured).cpu()


def family_run(rank: int, name: str, how: str) -> FamilyRun:
    """What each rank does; on its GPU where the group is of NCCL."""
    sample = build(name, "cuda" if dist.get_backend() == "nccl" else "cpu")
    mesh = family_mesh(name, how, dist.get_world_size())
    with Float64():
        model = parallelize(sample.model, dict(sample.kwargs), plan=family_plan(name, how), mesh=mesh)
    start = time.perf_counter()
    record = train_parallel(model, calls_of(sample), sgd(model))
    seconds = time.perf_counter() - start
    lane = model.program.lane_of(rank)
    return FamilyRun(record.cpu(), model.compile_seconds, seconds, len(model.graph.ops), len(lane.steps))
