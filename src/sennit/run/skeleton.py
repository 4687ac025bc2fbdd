"""A model without its values: what is kept to capture it again (for evaluation, for other shapes).

Capture looks at shapes, strides, types and devices of parameters, never at their values. So the copy has every tensor
of the model with all of these and no storage, tied ones tied as before; the user's model is not touched and can be let
go. A skeleton must not be run: its tensors have no memory behind them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.capture.torch_private import storage_key
from sennit.errors import RunError

__all__ = ["Slot", "device_of", "skeleton_of", "slots_of"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or a buffer of a model: every name it goes by, the first one being its path in the graph."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    requires_grad: bool
    persistent: bool

    @property
    def path(self) -> str:
        return self.names[0]


def skeleton_of(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A deep copy without values; floating-point tensors are of `dtype` where one is given."""
    memo: dict[int, object] = {}
    made: dict[tuple[object, ...], Tensor] = {}
    for tensor in _tensors(model):
        if storage_key(tensor) in made:
            memo[id(tensor)] = made[storage_key(tensor)]
            continue
        kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind, device=tensor.device)
        if (
            tensor.device.type != "meta" and tensor.ndim
        ):  # torch 2.15 looks at the value of a single number while it traces
            empty.untyped_storage().resize_(0)
        is_parameter = isinstance(tensor, nn.Parameter)
        made[storage_key(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        memo[id(tensor)] = made[storage_key(tensor)]
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:  # whatever a user's attribute raises when it is copied
        raise RunError(
            f"{type(model).__name__} cannot be copied: {type(error).__name__}: {error}",
            fix="give the modules only attributes that copy.deepcopy takes: no locks, generators or open files",
        ) from error


def slots_of(model: nn.Module) -> tuple[Slot, ...]:
    """Every parameter and buffer, in the order of the model; tied ones once, with all their names."""
    hidden = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    names: dict[tuple[object, ...], list[str]] = {}
    found: dict[tuple[object, ...], tuple[Tensor, bool]] = {}
    for is_parameter, named in (
        (True, model.named_parameters(remove_duplicate=False)),
        (False, model.named_buffers(remove_duplicate=False)),
    ):
        for name, tensor in named:
            names.setdefault(storage_key(tensor), []).append(name)
            found.setdefault(storage_key(tensor), (tensor, is_parameter))
    return tuple(
        Slot(
            tuple(names[key]),
            tuple(tensor.shape),
            tensor.dtype,
            is_parameter,
            tensor.requires_grad,
            names[key][0] not in hidden,
        )
        for key, (tensor, is_parameter) in found.items()
    )


def device_of(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """The one device that a model is on, which the backend can send from; `device` says it for a model on `meta`."""
    places = {tensor.device for tensor in _tensors(model)}
    wanted = None if device is None else torch.device(device)
    if len(places) > 1:
        raise RunError(
            f"the model is on {len(places)} devices: {', '.join(sorted(map(str, places)))}",
            fix="move all of it to this rank's device before parallelize",
        )
    place = places.pop() if places else wanted or torch.device("cpu")
    if place.type == "meta":
        place = wanted or torch.device("cpu")
    elif wanted is not None and (wanted.type, wanted.index or 0) != (place.type, place.index or 0):
        raise RunError(f"the model is on {place}, not on {wanted}", fix=f"move it: model.to({str(wanted)!r})")
    needed = {"nccl": "cuda", "gloo": "cpu"}.get(dist.get_backend())
    if needed == "cuda" and place.type != "cuda":
        raise RunError(
            f"the model is on {place}, and NCCL sends from GPUs",
            fix='move it to this rank\'s GPU first, or start the ranks with dist.init_process_group("gloo")',
        )
    return place


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
