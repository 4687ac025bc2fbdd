"""Tensors as c10d passes them, to the flat contiguous ones that a communicator takes, and back.

| c10d passes | becomes |
|---|---|
| a tensor that is contiguous | a flat view of the same memory: nothing is copied |
| any other | a flat copy, copied back when the call is done |
| a list of tensors that lie one behind the other | one flat view |
| any other list | one flat copy, copied back piece by piece |
| complex numbers | pairs of real ones, for sums; bytes where nothing is reduced |
| another device, a sparse tensor (but for `sparse_torch.py`), a type that cannot be reduced, an output whose elements share memory | an error that says so |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from sennit.errors import CollectiveError

__all__ = [
    "Flat",
    "average",
    "check_output",
    "check_place",
    "check_reducible",
    "flat_of",
    "joined",
    "plain_reduction",
    "scale",
    "writable",
]

_BITS = ("band", "bor", "bxor")
_LINEAR = ("sum", "avg", "premul_sum")
_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


class Flat:
    """A flat contiguous tensor for some tensors, in their order; `give_back` copies into them what is not their own
    memory.
    """

    __slots__ = ("_originals", "tensor")

    def __init__(self, tensor: Tensor, originals: Sequence[Tensor]) -> None:
        self.tensor, self._originals = tensor, originals

    def give_back(self) -> None:
        if not self._originals:
            return
        with writable():
            start = 0
            for original in self._originals:
                stop = start + original.numel()
                original.copy_(self.tensor[start:stop].view(original.shape))
                start = stop

    @property
    def bytes(self) -> Tensor:
        return self.tensor.view(torch.uint8)


def writable() -> torch.inference_mode:
    """Where tensors of any kind may be written to: those that were made in `torch.inference_mode`, nowhere else.

    The mode is one of a thread, and calls run on several.
    """
    return torch.inference_mode()


def flat_of(tensor: Tensor) -> Flat:
    """One tensor."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.dim() == 1 and tensor.stride() == (1,):
        return Flat(tensor, ())
    if tensor.is_contiguous():
        return Flat(tensor.as_strided((tensor.numel(),), (1,)), ())  # a view of one element may keep another stride
    return Flat(tensor.contiguous().view(-1), (tensor,))


def joined(tensors: Sequence[Tensor]) -> Flat:
    """Several tensors of one type, one behind the other."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise CollectiveError(
                f"tensors of {tensors[0].dtype} and {tensor.dtype} in one call", fix="pass tensors of one type"
            )
    tensors = [tensor.detach() for tensor in tensors]
    if tensors and tensors[0].is_complex():
        tensors = [torch.view_as_real(tensor.resolve_conj()) for tensor in tensors]
    if _are_neighbours(tensors):
        return Flat(tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,)), ())
    return Flat(torch.cat([tensor.reshape(-1) for tensor in tensors]), tensors)


def _are_neighbours(tensors: Sequence[Tensor]) -> bool:
    size = tensors[0].element_size() if tensors else 0
    return (
        bool(tensors)
        and all(tensor.is_contiguous() for tensor in tensors)
        and all(
            one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
            and one.data_ptr() + one.numel() * size == other.data_ptr()
            for one, other in pairwise(tensors)
        )
    )


def check_place(tensor: Tensor) -> None:
    """Raise on a tensor that is not ordinary memory of the CPU."""
    if tensor.layout is not torch.strided:
        raise CollectiveError(
            f"a tensor of layout {tensor.layout}", where="the sennit backend", fix="call .to_dense() before"
        )
    if tensor.device.type != "cpu":
        raise CollectiveError(
            f"a tensor on {tensor.device}",
            where="the sennit backend, which runs on CPU memory",
            fix='move it with .cpu(), or use a group of another backend for it: dist.new_group(backend="nccl")',
        )


def check_output(tensor: Tensor) -> None:
    """Raise on a tensor whose elements share memory, as those of `expand` do: there is no room for a result."""
    if not tensor.is_contiguous() and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise CollectiveError(
            f"an output of shape {list(tensor.shape)}, strides {list(tensor.stride())}, whose elements share memory",
            where="the sennit backend",
            fix="pass a tensor of its own memory: call .contiguous() before",
        )


def check_reducible(tensor: Tensor, reduction: str, factor: float | Tensor | None = None) -> None:
    """Raise on a reduction that has no meaning for the type of the tensor. `factor` is that of PREMUL_SUM."""
    kind = tensor.dtype
    fault = None
    if kind in _FLOATING and reduction in _LINEAR:
        return
    if kind not in _FLOATING and kind not in _WHOLE:
        fault = "convert it to a type that the CPU computes with"
    elif reduction == "avg" and kind is torch.bool:
        fault = "of bools there is no average: use MAX, or convert them to numbers"
    elif factor is not None and not torch.can_cast(torch.result_type(tensor, factor), kind):
        fault = f"the factor {factor} makes other numbers of them: convert them to floating ones"
    elif reduction in _BITS and kind not in _WHOLE:
        fault = "use integers or bools"
    elif kind.is_complex and reduction not in _LINEAR:
        fault = "of complex numbers there are sums and averages"
    elif reduction not in (*_BITS, *_LINEAR, "product", "min", "max"):
        fault = "use SUM, AVG, PREMUL_SUM, PRODUCT, MIN, MAX, BAND, BOR or BXOR"
    if fault is not None:
        raise CollectiveError(f"{reduction.upper()} of {kind}", where="the sennit backend", fix=fault)


def plain_reduction(reduction: str) -> str:
    """What is reduced between ranks: averages and scaled sums are sums."""
    return {"avg": "sum", "premul_sum": "sum", "product": "prod"}.get(reduction, reduction)


def scale(flat: Flat, factor: float | Tensor | None) -> Flat:
    """For PREMUL_SUM: every rank's values times its factor, in new memory."""
    return flat if factor is None else Flat(flat.tensor * factor, ())


def average(tensor: Tensor, ranks: int) -> None:
    """For AVG: what is left to do after the sum. Whole numbers are cut towards zero."""
    with writable():
        if tensor.is_floating_point():
            tensor.div_(ranks)
        else:
            tensor.copy_(tensor.div(ranks, rounding_mode="trunc"))
