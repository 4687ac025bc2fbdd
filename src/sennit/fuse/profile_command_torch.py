"""What `sennit profile` measures: the captured step's kernels on one device, and the collectives of the process group
that this process is part of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sennit.capture import capture_call
from sennit.cost.database import MeasuredChannel, MeasuredKernel, Place
from sennit.errors import RunError
from sennit.fuse.eager_graph_torch import eager_graph
from sennit.fuse.measure_torch import measure_step, place_of
from sennit.fuse.profile_torch import measure_channel

__all__ = ["Measured", "measured_here"]


@dataclass(frozen=True, slots=True)
class Measured:
    place: Place
    operators: int
    kernels: tuple[MeasuredKernel, ...]
    channel: MeasuredChannel | None


def measured_here(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device_name: str | None,
    rounds: int,
    *,
    compiled: bool,
    say: Callable[[str], None],
) -> Measured | None:
    """None on every rank but the first."""
    device = _device(device_name)
    channel = _channel(device, rounds, say)
    if channel is not None and dist.get_rank() != 0:
        dist.destroy_process_group()
        return None
    say("capturing")
    captured = capture_call(model, args, dict(kwargs))
    graph = eager_graph(captured.graph, device)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    state.update(captured.signature.flatten(args, kwargs))
    place = place_of(device)
    kernels = measure_step(graph, state, device, rounds=rounds, compiled=compiled, say=say)
    if channel is not None:
        dist.destroy_process_group()
    return Measured(place, len(graph.ops), tuple(kernels), channel)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise RunError(f"{name!r} is no device", where="--device", fix="use cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise RunError("this machine has no GPU that torch can use", where="--device", fix="use --device cpu")
    if device.type not in ("cpu", "cuda"):
        raise RunError(f"{name!r} is not measured", where="--device", fix="use cpu, cuda or cuda:N")
    return device


def _channel(device: torch.device, rounds: int, say: Callable[[str], None]) -> MeasuredChannel | None:
    if not dist.is_torchelastic_launched():
        return None
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend)
    group = dist.group.WORLD
    assert group is not None
    if group.size() == 1:
        return None
    say(f"measuring all-reduces of {group.size()} ranks")
    found = measure_channel(group, rounds=rounds, device=device)
    sharing = found.sharing
    return MeasuredChannel(
        f"{backend}, {group.size()} ranks",
        group.size(),
        found.latency,
        found.per_byte,
        sharing.queued,
        sharing.compute_rate,
        sharing.channel_rate,
        sharing.issued,
    )
