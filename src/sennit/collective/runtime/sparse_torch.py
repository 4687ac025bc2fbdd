"""Sums of sparse tensors (`torch.sparse_coo`), as DDP asks for them where an embedding has sparse gradients.

Ranks hold different numbers of entries, so a sum is two all-gathers: of how many, then of the entries themselves, each
rank's padded to the longest. All ranks add up the same entries in the same order: their results are equal bit for bit.

| | what travels, of each rank |
|---|---|
| `_counts` | entries, sparse and dense dims, sizes: they must agree, but for the first |
| `_gathered` | indices (int64), then values, as bytes |
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from sennit.collective.runtime.communicator_torch import Communicator
from sennit.collective.runtime.tensors_torch import check_reducible
from sennit.errors import CollectiveError

__all__ = ["all_reduce_sparse", "check_sparse", "is_sparse"]

_ALIGNED = 16  # the largest type: a view of bytes as another type begins at a multiple of its size
_SUMS = ("sum", "avg", "premul_sum")
_HALVES = (torch.float16, torch.bfloat16)


def is_sparse(tensor: object) -> bool:
    return isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo


def check_sparse(tensor: Tensor, reduction: str, factor: float | Tensor | None) -> None:
    """Raise on what cannot be summed."""
    if tensor.device.type != "cpu":
        raise CollectiveError(
            f"a sparse tensor on {tensor.device}",
            where="the sennit backend, which runs on CPU memory",
            fix="move it with .cpu()",
        )
    if reduction not in _SUMS:
        raise CollectiveError(
            f"{reduction.upper()} of a sparse tensor",
            where="the sennit backend",
            fix="of sparse tensors there are sums and averages: call .to_dense() before",
        )
    check_reducible(tensor, reduction, factor)


def all_reduce_sparse(
    communicator: Communicator, tensor: Tensor, reduction: str, factor: float | Tensor | None, timeout: float
) -> None:
    """The sum of all ranks' tensors, in place of this one's; coalesced."""
    # not in the mode that calls run in: what a tensor of none is given to hold must be of none either
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        mine = tensor if factor is None else tensor * factor
        mine = mine.coalesce()
        counts = _counts(communicator, mine, timeout)
        indices, values = _gathered(communicator, mine, counts, timeout)
        wide = values.float() if values.dtype in _HALVES else values  # to round once, not at each term
        total = torch.sparse_coo_tensor(indices, wide, mine.shape, check_invariants=False).coalesce()
        summed = total.values()
        if reduction == "avg":
            whole = not (summed.is_floating_point() or summed.is_complex())
            summed = summed.div(communicator.size, rounding_mode="trunc" if whole else None)
        tensor.copy_(
            torch.sparse_coo_tensor(
                total.indices(), summed.to(mine.dtype), mine.shape, is_coalesced=True, check_invariants=False
            )
        )


def _counts(communicator: Communicator, mine: Tensor, timeout: float) -> list[int]:
    """How many entries each rank has."""
    header = torch.tensor([mine.values().shape[0], mine.sparse_dim(), mine.dense_dim(), *mine.shape], dtype=torch.int64)
    headers = torch.empty(communicator.size, header.numel(), dtype=torch.int64)
    communicator.all_gather(headers.view(-1).view(torch.uint8), header.view(torch.uint8), timeout)
    for rank, other in enumerate(headers.tolist()):
        if other[1:] != headers[0, 1:].tolist():
            raise CollectiveError(
                f"all_reduce of sparse tensors of shapes {_described(headers[0])} on rank 0, {_described(headers[rank])} "
                f"on rank {rank}",
                where=f"rank {communicator.rank} of {communicator.size}",
                fix="all ranks pass tensors of one shape, with as many sparse dims",
            )
    return [int(count) for count in headers[:, 0]]


def _described(header: Tensor) -> str:
    _, sparse, dense, *shape = header.tolist()
    return f"{shape} ({sparse} sparse and {dense} dense dims)"


def _gathered(communicator: Communicator, mine: Tensor, counts: Sequence[int], timeout: float) -> tuple[Tensor, Tensor]:
    """The indices and values of all ranks, one behind the other."""
    sparse, inner = mine.sparse_dim(), tuple(mine.shape[mine.sparse_dim() :])
    longest = max(counts)
    if not longest:
        return mine.indices(), mine.values()
    ends = longest * sparse * torch.int64.itemsize, longest * prod(inner) * mine.element_size()
    width, rest = (nbytes + -nbytes % _ALIGNED for nbytes in ends)

    def parts(row: Tensor, count: int) -> tuple[Tensor, Tensor]:
        indices = row[: ends[0]].view(torch.int64).view(sparse, longest)[:, :count]
        return indices, row[width : width + ends[1]].view(mine.dtype).view(longest, *inner)[:count]

    packed = torch.zeros(width + rest, dtype=torch.uint8)
    for place, entries in zip(parts(packed, counts[communicator.rank]), (mine.indices(), mine.values()), strict=True):
        place.copy_(entries)
    everyone = torch.empty(communicator.size, packed.numel(), dtype=torch.uint8)
    communicator.all_gather(everyone.view(-1), packed, timeout)
    indices, values = zip(*map(parts, everyone, counts), strict=True)
    return torch.cat(indices, 1), torch.cat(values)
