"""The names of torch that are not public and that redistribution uses: all here, each with its reason.

Written for torch 2.13. `dtensor_hooks` fails with a clear message where a torch has moved them; nothing else of
sennit's redistribution depends on them, besides making a DTensor from its parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import _api as dtensor_api
from torch.distributed.tensor import _dispatch as dtensor_dispatch
from torch.distributed.tensor import _redistribute as dtensor_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from sennit.errors import RunError

__all__ = [
    "DTensorSpec",
    "dtensor_hooks",
    "is_plain",
    "local_of",
    "make_dtensor",
    "make_spec",
    "meta_of",
    "spec_of",
    "waited",
]

REDISTRIBUTE = "redistribute_local_tensor"


def dtensor_hooks() -> tuple[ModuleType, ...]:
    """The modules that call `redistribute_local_tensor` by their own name for it: explicit redistributions and their
    backward, gradients of `to_local` and `from_local`, and the operands of operators.
    """
    modules = (dtensor_redistribute, dtensor_api, dtensor_dispatch)
    for module in modules:
        if not callable(getattr(module, REDISTRIBUTE, None)):
            raise RunError(
                f"torch {torch.__version__} has no {module.__name__}.{REDISTRIBUTE}",
                fix="use torch 2.13, or call sennit.redistribute instead of serving DTensor's own calls",
            )
    return modules


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, global shape, stride and dtype in one hashable value, whose hash DTensor caches."""
    return tensor._spec


def make_spec(like: DTensorSpec, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensorSpec:
    return DTensorSpec(mesh, tuple(placements), tensor_meta=like.tensor_meta)


def make_dtensor(local: Tensor, spec: DTensorSpec, *, requires_grad: bool = False) -> DTensor:
    """A DTensor from its parts.

    `DTensor.from_local` is public, and records a node for autograd that is not wanted here.
    """
    made: DTensor = DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[no-untyped-call]
    return made


def local_of(tensor: DTensor) -> Tensor:
    """The piece of this rank, outside of autograd."""
    return waited(tensor._local_tensor)


def waited(local: Tensor) -> Tensor:
    """A result of DTensor's own asynchronous collectives, once it is there."""
    wait: Any = getattr(local, "wait", None)
    return wait() if wait is not None else local


def is_plain(local: Tensor) -> bool:
    """Whether a tensor has values of its own: no fake tensor of a compiler, no wrapper that records operations."""
    return type(local) in (Tensor, torch.nn.Parameter) and not torch.compiler.is_compiling()


def meta_of(spec: DTensorSpec) -> TensorMeta:
    assert spec.tensor_meta is not None
    return spec.tensor_meta
