"""Element types between torch and `ir/`."""

from __future__ import annotations

import torch

from sennit.errors import CaptureError
from sennit.ir.dtype import DType

__all__ = ["dtype_of", "torch_dtype"]


def dtype_of(dtype: torch.dtype) -> DType:
    for name in DType:
        if torch_dtype(name) is dtype:
            return name
    known = ", ".join(name.value for name in DType)
    raise CaptureError(f"element type {dtype} has no name here", fix=f"use one of {known}")


def torch_dtype(dtype: DType) -> torch.dtype:
    found: torch.dtype = getattr(torch, dtype.torch_name)
    return found
