"""Loading a torch.distributed.checkpoint under another layout and another number of ranks, within a byte budget.

    load_checkpoint(folder, {"up.weight": dtensor, ...}, budget=256 << 20)

`torch.distributed.checkpoint` lets every rank read what it needs, so a saved chunk is read by each rank that needs a
part of it. Here every chunk is read once, by one rank, and goes from there by an exchange: reading is spread over the
ranks by bytes, and the file system serves each byte once.

In each *wave* every rank reads at most one chunk, sends its parts to the ranks that need them, writes what it receives
into the target, and lets go of the chunk. So beside the targets a rank holds one saved chunk and the staging of the
exchange. The format stores a chunk as one tensor, which its reader loads whole, so no budget can be below the largest
chunk; such a one is refused.

The ranks of the targets' mesh call this together. Targets are DTensors with contiguous local tensors, filled in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from sennit.errors import LayoutError
from sennit.ir.exchange import Transfer
from sennit.ir.region import Region
from sennit.reshard.dtensor_torch import boxes_of
from sennit.reshard.execute_torch import Executor, chunk_of, current_executor, make_lowered
from sennit.reshard.lower_torch import Cut, lower_transfers
from sennit.reshard.private_torch import local_of

__all__ = ["load_checkpoint"]

_LEAST_STAGING = 1 << 12


def load_checkpoint(
    folder: str | Path,
    targets: Mapping[str, DTensor],
    *,
    budget: int | None = None,
    executor: Executor | None = None,
) -> None:
    """Fill `targets` from a checkpoint, by name. `budget` is what a rank may use beside them, in bytes."""
    executor = current_executor() if executor is None else executor
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    chunks = [chunk for name in sorted(targets) for chunk in _chunks_of(metadata, name, targets[name])]
    largest = max((chunk.bytes for chunk in chunks), default=0)
    if budget is not None and budget < largest + _LEAST_STAGING:
        raise LayoutError(
            f"a budget of {budget} bytes is below the least possible, {largest + _LEAST_STAGING}: the largest saved chunk "
            f"has {largest} bytes and is read whole",
            where=f"checkpoint {folder}",
            fix="raise the budget, or save the checkpoint from more ranks",
        )
    staging = executor.staged(None if budget is None else budget - largest)
    participants = sorted({rank for target in targets.values() for rank in target.device_mesh.mesh.flatten().tolist()})
    needed = {name: boxes_of(target) for name, target in targets.items()}
    for wave in _waves(chunks, participants):
        _run_wave(wave, reader, targets, needed, executor, staging)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A saved part of a tensor."""

    name: str
    position: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def region(self) -> Region:
        return Region.box(self.offsets, [a + b for a, b in zip(self.offsets, self.sizes, strict=True)])

    @property
    def bytes(self) -> int:
        return prod(self.sizes) * self.dtype.itemsize


def _chunks_of(metadata: Metadata, name: str, target: DTensor) -> list[_Chunk]:
    saved = metadata.state_dict_metadata.get(name)
    if not isinstance(saved, TensorStorageMetadata):
        known = ", ".join(sorted(metadata.state_dict_metadata)[:8])
        raise LayoutError(f"the checkpoint has no tensor {name!r}", where=f"it has {known}, ...", fix="name one it has")
    if tuple(saved.size) != tuple(target.shape) or saved.properties.dtype != target.dtype:
        raise LayoutError(
            f"{name!r} is saved as {list(saved.size)} of {saved.properties.dtype}, and the target is "
            f"{list(target.shape)} of {target.dtype}",
            fix="make the target with the shape and dtype of the checkpoint",
        )
    return [
        _Chunk(name, position, tuple(chunk.offsets), tuple(chunk.sizes), target.dtype)
        for position, chunk in enumerate(saved.chunks)
        if prod(chunk.sizes)
    ]


def _waves(chunks: Sequence[_Chunk], ranks: Sequence[int]) -> list[dict[int, _Chunk]]:
    """Who reads what, when: chunks in order, each to the rank that reads least so far."""
    reads: dict[int, list[_Chunk]] = {rank: [] for rank in ranks}
    read = dict.fromkeys(ranks, 0)
    for chunk in chunks:
        rank = min(ranks, key=lambda r: (read[r], r))
        reads[rank].append(chunk)
        read[rank] += chunk.bytes
    count = max((len(those) for those in reads.values()), default=0)
    return [{rank: those[wave] for rank, those in reads.items() if wave < len(those)} for wave in range(count)]


def _run_wave(
    wave: Mapping[int, _Chunk],
    reader: FileSystemReader,
    targets: Mapping[str, DTensor],
    needed: Mapping[str, Mapping[int, Region]],
    executor: Executor,
    staging: int,
) -> None:
    """Each rank reads its chunk; the tensors of the wave are filled one after the other."""
    mine = wave.get(executor.rank)
    values = None if mine is None else _read(reader, mine)
    for name in sorted({chunk.name for chunk in wave.values()}):
        held = {rank: chunk.region for rank, chunk in wave.items() if chunk.name == name}
        boxes, target = needed[name], targets[name]
        participants = tuple(sorted({*held, *boxes}))
        if executor.rank not in participants:
            continue
        moved = [
            Transfer(sender, receiver, shared)
            for receiver, box in sorted(boxes.items())
            for sender, part in sorted(held.items())
            if (shared := part.intersect(box)).size
        ]
        cut = Cut(chunk_of(staging, target.dtype.itemsize))
        label = f"checkpoint chunks {sorted((rank, str(region)) for rank, region in held.items())} of {name!r}"
        move = lower_transfers(label, [moved], held, boxes, executor.rank, cut)
        text = f"{label} -> {target.placements} on {sorted(boxes)}, {target.dtype.itemsize} bytes an item, staging {staging}"
        lowered = make_lowered((move,), participants, text, staging, None, None)
        into = local_of(target) if executor.rank in boxes else None
        if into is not None and not into.is_contiguous():
            raise LayoutError(f"the local tensor of {name!r} is not contiguous", fix="make the target contiguous")
        own = values if mine is not None and mine.name == name else None
        piece = torch.empty(0, dtype=target.dtype) if own is None else own
        executor.start_lowered(lowered, piece, into).wait()


def _read(reader: FileSystemReader, chunk: _Chunk) -> Tensor:
    values = torch.empty(chunk.sizes, dtype=chunk.dtype)
    index = MetadataIndex(chunk.name, offset=torch.Size(chunk.offsets), index=chunk.position)
    start = torch.Size([0] * len(chunk.sizes))
    item = ReadItem(LoadItemType.TENSOR, index, start, index, start, torch.Size(chunk.sizes))
    reader.read_data(LoadPlan([item]), _Into(values)).wait()
    return values


class _Into(LoadPlanner):
    """A load planner with one destination; plans are made here, not by it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return self.values

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        assert tensor.data_ptr() == self.values.data_ptr()

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        raise AssertionError("nothing is planned through it")

    def create_local_plan(self) -> LoadPlan:
        raise AssertionError("nothing is planned through it")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise AssertionError("nothing is planned through it")

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise AssertionError("nothing is planned through it")

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("nothing is planned through it")
