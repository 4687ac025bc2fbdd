"""Tensors that share no memory: what gradients must be before autograd keeps them and optimizers write to them.

Gradients that were reduced in one bucket are neighbours in its flat tensor, which is as good as memory of their own. A
tensor is cloned where it overlaps with one before it, or where the gradients keep little of the memory that it lies in
(a slice of something large).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

__all__ = ["apart"]

_KEPT = 0.9  # of a storage: below this, what is not kept of it costs more than a copy


def apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors with the same values, no two of which overlap."""
    kept: dict[int, int] = {}  # bytes of each storage that the tensors cover, overlaps left out
    ends: dict[int, list[tuple[int, int]]] = {}
    alone = []
    for tensor in tensors:
        storage, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
        end = start + tensor.nbytes
        alone.append(all(end <= other or start >= last for other, last in ends.setdefault(storage, [])))
        if alone[-1]:
            ends[storage].append((start, end))
            kept[storage] = kept.get(storage, 0) + tensor.nbytes
    result = []
    for tensor, is_alone in zip(tensors, alone, strict=True):
        whole = tensor.untyped_storage()
        enough = kept.get(whole.data_ptr(), 0) >= _KEPT * whole.nbytes()
        result.append(tensor if is_alone and enough else tensor.clone())
    return result
