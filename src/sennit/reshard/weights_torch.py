"""All weights of a model from one mesh and layout to another: a trainer to an inference server.

    for name, weight in stream_weights(model_weights, server_mesh, lambda name, weight: [Shard(0)], budget=64 << 20):
        server.load(name, weight.to_local())

Weights travel one after the other, the next one being posted while the one before is handed over. Beside the weights
that a rank has and those it ends with, it uses at most `budget` bytes. Every rank of either mesh iterates, over the
same names in the same order; on a rank that is not in a mesh the piece there is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from sennit.reshard.dtensor_torch import RunningDTensor, redistribute
from sennit.reshard.execute_torch import Executor, current_executor

__all__ = ["absent_weight", "stream_weights"]


def absent_weight(
    shape: Sequence[int], dtype: torch.dtype, mesh: DeviceMesh, placements: Sequence[Placement]
) -> DTensor:
    """A weight as a rank sees it that is not in its mesh: everything but values."""
    empty = torch.empty(0, dtype=dtype)
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def stream_weights(
    weights: Mapping[str, DTensor],
    mesh: DeviceMesh,
    placements: Callable[[str, Tensor], Sequence[Placement]],
    *,
    budget: int | None = None,
    executor: Executor | None = None,
) -> Iterator[tuple[str, DTensor]]:
    """The weights on `mesh` under new placements, as they arrive."""
    executor = current_executor() if executor is None else executor
    share = None if budget is None else budget // 2  # two are under way
    under_way: list[tuple[str, RunningDTensor]] = []
    for name in sorted(weights):
        weight = weights[name].detach()
        running = redistribute(weight, placements(name, weight), mesh, budget=share, async_op=True, executor=executor)
        under_way.append((name, running))
        if len(under_way) == 2:
            yield _arrived(*under_way.pop(0))
    for name, running in under_way:
        yield _arrived(name, running)


def _arrived(name: str, running: RunningDTensor) -> tuple[str, DTensor]:
    return name, running.wait()
