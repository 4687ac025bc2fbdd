"""Torch's tests of GPUs on the CPU, to test DDP and what stands on it: most of torch's tests of these ask for two GPUs.

`move` takes off the conditions and lets what is called on a GPU be called on the CPU; under `Moved`, in the process of a
rank, tensors that a test makes on a GPU, or moves there, are on the CPU. What torch has on GPUs alone fails like this on
every backend: `only_on_gpus` tells such a failure.
"""

from __future__ import annotations

import unittest
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

__all__ = ["Moved", "asks_for_gpu", "move", "only_on_gpus"]

# how torch says that something is for GPUs; of the tests of which device a module is on, the names
_ONLY_ON_GPUS = (
    "SyncBatchNorm layers only work with GPU modules",
    "Distributed package doesn't have NCCL built in",
    "Cannot access accelerator device when none is available",
    "cpu backend doesn't support events",
    "in test_ddp_device",
    "in test_ddp_logging_data_gpu",
)
_WITHOUT_EFFECT = ("set_device", "synchronize", "manual_seed", "empty_cache", "_sleep")
_MARK = "asks_for_gpu"


def asks_for_gpu(test: Any) -> bool:
    return getattr(test, _MARK, False)


def only_on_gpus(failure: str) -> str | None:
    """What of a failure says so."""
    return next((said for said in _ONLY_ON_GPUS if said in failure), None)


def _marked(test: Any) -> Any:
    setattr(test, _MARK, True)
    return test


def _is_gpu(value: object) -> bool:
    match value:
        case bool():
            return False
        case int():  # its number
            return True
        case str():
            return value.startswith("cuda")
        case torch.device():
            return value.type == "cuda"
    return False


def _on_cpu(value: Any) -> Any:
    return "cpu" if _is_gpu(value) else value


class Moved(TorchFunctionMode):
    """Where functions of torch that name a GPU get the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if "device" in named:
            named["device"] = _on_cpu(named["device"])
        match getattr(function, "__name__", ""):
            case "cuda":
                return args[0]
            case "to":
                args = tuple(map(_on_cpu, args))
        return function(*args, **named)


def move(common: Any, ranks: int) -> None:
    """Before torch's tests are loaded; `common` is their `common_distributed`. For this process and those it forks.

    There seem to be as many GPUs as ranks.
    """

    def at_least(gpus: int, **_: Any) -> Any:
        return _marked if gpus <= ranks else unittest.skip(f"Need at least {gpus} CUDA devices")

    common.skip_if_lt_x_gpu = at_least
    common.skip_if_no_gpu = _marked
    cuda: Any = torch.cuda
    cuda.device_count = lambda: ranks
    cuda.current_device = lambda: 0
    for name in _WITHOUT_EFFECT:
        setattr(cuda, name, lambda *_, **__: None)

    module: Any = torch.nn.Module
    to, make = module.to, DistributedDataParallel.__init__

    def moved_to(self: Any, *args: Any, **named: Any) -> Any:
        return to(self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in named.items()})

    def made(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **named: Any
    ) -> None:
        make(self, module, None, None, *args, **named)

    module.cuda = lambda self, device=None: self
    module.to = moved_to
    DistributedDataParallel.__init__ = made  # type: ignore[method-assign]
