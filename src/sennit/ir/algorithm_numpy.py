"""The reference interpreter of an algorithm: its moves one after another, all ranks in one process, on numpy arrays.

A rank's input is an array of shape (chunks, elements). What nobody wrote is filled with the byte 255: not a number in
floating types, -1 in signed integers. In place the smaller of input and output is a view into the larger one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from sennit.errors import CollectiveError
from sennit.ir.algorithm_check import check_algorithm
from sennit.ir.collective import Algorithm, Chunks, CollectiveSpec, CustomCollective, MoveKind, Scratch
from sennit.ir.layout_numpy import Array

__all__ = ["allocate_buffers", "run_algorithm"]


def run_algorithm(algorithm: Algorithm, inputs: Sequence[Array]) -> list[Array]:
    """The output of every rank, of shape (chunks, elements)."""
    check_algorithm(algorithm)
    buffers = allocate_buffers(algorithm.collective, algorithm.scratch, inputs)
    for move in algorithm.moves:
        source, target = _chunks(buffers, move.source), _chunks(buffers, move.target)
        match move.kind:
            case MoveKind.COPY:
                target[...] = source
            case MoveKind.REDUCE:
                target += source
    return [held["output"].copy() for held in buffers]


def _chunks(buffers: list[dict[str, Array]], place: Chunks) -> Array:
    return buffers[place.rank][place.buffer][place.start : place.start + place.count]


def allocate_buffers(
    collective: CollectiveSpec | CustomCollective, scratch: Iterable[Scratch], inputs: Sequence[Array]
) -> list[dict[str, Array]]:
    """The buffers of every rank by name; the inputs are copied."""
    if len(inputs) != collective.ranks:
        raise CollectiveError(f"{len(inputs)} inputs for {collective.ranks} ranks", fix="pass one array for each rank")
    elements, dtype = inputs[0].shape[-1], inputs[0].dtype
    buffers: list[dict[str, Array]] = []
    for rank, array in enumerate(inputs):
        wanted = (collective.input_chunks(rank), elements)
        if array.shape != wanted or array.dtype != dtype:
            raise CollectiveError(
                f"the input of rank {rank} has shape {array.shape} and type {array.dtype}",
                fix=f"pass {wanted[0]} chunks of {elements} elements of {dtype}, as the other ranks",
            )
        outputs = collective.output_chunks(rank)
        if not collective.in_place:
            held = {"input": array.copy(), "output": _unwritten(outputs, elements, dtype)}
        else:
            held = _aliased(array, outputs, collective.alias_offset(rank))
        buffers.append(held)
    for piece in scratch:
        buffers[piece.rank][piece.name] = _unwritten(piece.chunks, elements, dtype)
    return buffers


def _aliased(array: Array, outputs: int, offset: int) -> dict[str, Array]:
    """In place: one array, and a view of a part of it."""
    if len(array) >= outputs:
        whole = array.copy()
        return {"input": whole, "output": whole[offset : offset + outputs]}
    whole = _unwritten(outputs, array.shape[1], array.dtype)
    part = whole[offset : offset + len(array)]
    part[...] = array
    return {"input": part, "output": whole}


def _unwritten(chunks: int, elements: int, dtype: np.dtype[np.generic]) -> Array:
    return np.full((chunks, elements * dtype.itemsize), 255, dtype=np.uint8).view(dtype)
