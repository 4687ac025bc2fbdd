"""From pieces back to the single-device model: whole tensors, one after another, so that a rank holds one of them at a
time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from sennit.reshard.dtensor_torch import redistribute
from sennit.reshard.private_torch import local_of
from sennit.run.homes import Homes
from sennit.run.skeleton import Slot

__all__ = ["full_state", "single_device", "whole"]


def whole(path: str, tensor: DTensor | None, like: Tensor | None, homes: Homes, device: torch.device) -> Tensor:
    """A tensor whole on every rank: its owners gather it, the others get it from there. `like` has the shape and type,
    where the tensor is not here."""
    owners = homes.owners(path)
    if dist.get_rank() in owners:
        assert tensor is not None
        gathered = redistribute(tensor, [Replicate()] * tensor.device_mesh.ndim)
        found = local_of(gathered).detach().contiguous()
    else:
        assert like is not None
        found = torch.empty(like.shape, dtype=like.dtype, device=device)
    if len(owners) < dist.get_world_size():
        dist.broadcast(found, owners[0])
    return found


def full_state(
    slots: tuple[Slot, ...],
    homes: Homes,
    tensors: Mapping[str, DTensor],
    device: torch.device,
    *,
    keep: bool,
) -> dict[str, Tensor]:
    """The tensors of `slots`, whole and on the CPU, under all their names."""
    state: dict[str, Tensor] = {}
    for slot in slots:
        like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
        found = whole(slot.path, tensors.get(slot.path), like, homes, device)
        if keep:
            value = found.cpu()
            state |= dict.fromkeys(slot.names, value.clone() if value is found else value)
    return state


def single_device(skeleton: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """A copy of the skeleton with the values of `state`."""
    memo: dict[int, object] = {}
    for name, tensor in skeleton.named_parameters():
        memo[id(tensor)] = nn.Parameter(state[name].clone(), requires_grad=tensor.requires_grad)
    for name, buffer in skeleton.named_buffers():
        memo[id(buffer)] = state[name].clone()
    return copy.deepcopy(skeleton, memo)
