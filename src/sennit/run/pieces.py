"""Whole tensors to the pieces of a device, and pieces back to whole tensors: the edges of a run.

The source of a lane reads its inputs by *key*: the path of the tensor. A lane of two stages may hold two pieces of one
tensor (of the batch, where the stages lie on the lane's devices in different orders); their keys have the buffer's name
too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from sennit.errors import RunError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Point
from sennit.ir.program import Lane, Program

__all__ = ["assemble_outputs", "input_keys", "inputs_of", "piece_of"]


def input_keys(lane: Lane) -> dict[str, str]:
    """The key of each input of a lane, by the name of its buffer."""
    times = Counter(item.path for item in lane.inputs)
    return {
        item.buffer.name: item.path if times[item.path] == 1 else f"{item.path} as {item.buffer.name}"
        for item in lane.inputs
    }


def inputs_of(lane: Lane, device: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The pieces of the whole tensors in `state`, which has them by path, that a device starts with; by key."""
    missing = [item.path for item in lane.inputs if item.path not in state]
    if missing:
        raise RunError(
            f"no value for {', '.join(missing)}", where=f"lane {lane.name}", fix="pass every parameter and input"
        )
    pieces: dict[str, Tensor] = {}
    keys = input_keys(lane)
    for item in lane.inputs:
        whole, buffer = state[item.path], item.buffer
        if tuple(whole.shape) != buffer.layout.shape or str(whole.dtype) != f"torch.{buffer.dtype.torch_name}":
            raise RunError(
                f"{item.path} is {whole.dtype} {list(whole.shape)}, but the program was made for {buffer.type}",
                fix="run with the shapes and types that the model was captured with",
            )
        pieces[keys[buffer.name]] = piece_of(whole, buffer.layout, buffer.point(device)).clone()
    return pieces


def piece_of(whole: Tensor, layout: Layout, point: Point) -> Tensor:
    """The piece at a point: a view where its indices are a range in every dim, else a copy."""
    piece = whole
    for dim in range(len(layout.shape)):
        indices = layout.indices(dim, point)
        if len(indices) == layout.shape[dim]:
            continue
        if len(indices) and int(indices[-1]) - int(indices[0]) + 1 == len(indices):
            piece = piece.narrow(dim, int(indices[0]), len(indices))
        else:
            piece = piece.index_select(dim, torch.from_numpy(indices).to(whole.device))
    return piece


def assemble_outputs(program: Program, pieces: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Whole outputs, where the first piece of each lies, from the pieces that each device returned.

    Replicas must agree to the last bit.
    """
    whole: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for lane in program.lanes:
        buffers = lane.buffers()
        for output in lane.outputs:
            key, buffer = output.key, buffers[output.name]
            for device in lane.devices:
                piece = pieces[device][key]
                if key not in whole:
                    whole[key] = torch.empty(buffer.layout.shape, dtype=piece.dtype, device=piece.device)
                    written[key] = torch.zeros(buffer.layout.shape, dtype=torch.bool, device=piece.device)
                here = piece.to(whole[key].device)
                _write(key, whole[key], written[key], here, buffer.layout, buffer.point(device), device)
    return whole


def _write(key: str, whole: Tensor, written: Tensor, piece: Tensor, layout: Layout, point: Point, device: int) -> None:
    where = tuple(torch.from_numpy(part) for part in np.ix_(*layout.region(point).indices())) if layout.shape else ()
    seen = written[where]
    if tuple(piece.shape) != tuple(seen.shape):
        raise RunError(f"{key} on device {device} has shape {list(piece.shape)}, not {list(seen.shape)}")
    if not torch.equal(whole[where][seen], piece[seen]):
        raise RunError(
            f"{key} on device {device} differs from its replica on another device",
            fix="the reduction order differs between ranks: use a backend that gives all ranks the same bits",
        )
    whole[where] = piece
    written[where] = True
