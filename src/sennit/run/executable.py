"""A compiled program on this rank: its lane's source, loaded, with the process groups and the communicator it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.capture import Signature
from sennit.errors import RunError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Output, OutputKind, Role
from sennit.ir.program import Buffer
from sennit.plan import Plan
from sennit.run.compile import Compiled
from sennit.run.distributed import ProcessCommunicator
from sennit.run.emit import emit_lane
from sennit.run.groups import ProcessGroups
from sennit.run.homes import Move
from sennit.run.load import load_source
from sennit.run.pieces import input_keys, piece_of
from sennit.run.rank import Rank

__all__ = ["Executable", "notes_of"]


def notes_of(plan: Plan) -> dict[str, str]:
    """What a plan decided of its operators, in words, by their names."""
    notes: dict[str, list[str]] = {}
    for split in plan.splits:
        inside = f" in each of {split.chunks} parts" if split.chunks > 1 else ""
        notes.setdefault(split.op, []).append(f"{split.letter} over {split.axis}{inside}")
    return {op: "the plan splits " + ", ".join(words) for op, words in notes.items()}


class Executable:
    """Made by all ranks alike: making it makes process groups."""

    def __init__(
        self,
        compiled: Compiled,
        groups: ProcessGroups,
        device: torch.device,
        moves: tuple[Move, ...] = (),
        *,
        local_inputs: bool = False,
    ) -> None:
        program = compiled.program
        groups.make_for(program)
        self.compiled, self.moves = compiled, moves
        self.number = dist.get_rank()
        self.device = device
        self.lane = program.lane_of(self.number)
        self.source = emit_lane(program, self.lane, notes_of(compiled.plan))
        self.step = load_source(self.source, f"<{program.name} {self.lane.name}>")
        self.communicator = ProcessCommunicator(groups, device)
        self.rank = Rank(program, self.lane, self.number, self.communicator)
        self.keys = input_keys(self.lane)
        self.local_inputs = local_inputs
        self.signature = self._local_signature() if local_inputs else compiled.signature
        self.types = compiled.graph.types()
        self.constants = {
            self.keys[item.buffer.name]: piece_of(
                compiled.constants[item.path], item.buffer.layout, item.buffer.point(self.number)
            ).to(device)
            for item in self.lane.inputs
            if item.path in compiled.constants
        }
        self.returned = self._returned()

    # ---- what the model is called with -------------------------------------------------------------------------------

    def pieces(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The pieces of a call's tensors that this rank reads, by key. What another stage reads alone is passed over."""
        found: dict[str, Tensor] = {}
        for path, tensor in self.signature.flatten(args, kwargs).items():
            if tensor.device != self.device and (tensor.device.type, tensor.device.index or 0) != (
                self.device.type,
                self.device.index or 0,
            ):
                raise RunError(
                    f"argument {path!r} is on {tensor.device}, and the model on {self.device}",
                    fix=f"move the batch first: batch.to({str(self.device)!r})",
                )
            for item in self.lane.inputs:
                if item.path == path and item.role is Role.INPUT:
                    found[self.keys[item.buffer.name]] = self._piece(item.buffer, tensor)
        return found

    def _piece(self, buffer: Buffer, tensor: Tensor) -> Tensor:
        if self.local_inputs:
            return tensor
        return piece_of(tensor, buffer.layout, buffer.point(self.number))

    def _local_signature(self) -> Signature:
        """The signature of a call with this rank's part of each input. An input that this stage does not read has the shape
        of the part that its reader has at the same place in the mesh."""
        signature = self.compiled.signature
        parts: dict[str, tuple[int, ...]] = {}
        for lane in self.compiled.program.lanes:
            for item in lane.inputs:
                if item.role is Role.INPUT:
                    parts.setdefault(item.path, item.buffer.local_shape(lane.devices[0]))
        arguments = {
            path: TensorType(parts.get(signature.renamed.get(path, path), kind.shape), kind.dtype)
            if isinstance(kind, TensorType)
            else kind
            for path, kind in signature.arguments.items()
        }
        return replace(signature, arguments=arguments)

    # ---- running it --------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step. Losses and results come back on every rank; gradients and buffers where their tensors live."""
        with torch.no_grad():
            outputs = dict(self.step(self.rank, inputs))
            self.communicator.finish()
            for output, makers in self.returned:
                self._share(output, makers, outputs)
        return outputs

    def _returned(self) -> tuple[tuple[Output, tuple[int, ...]], ...]:
        """Losses and results, each with the devices that make it."""
        program = self.compiled.program
        found = []
        for output in self.compiled.graph.outputs:
            if output.kind in (OutputKind.LOSS, OutputKind.RESULT):
                makers = tuple(
                    device
                    for lane in program.lanes
                    if any(other.key == output.key for other in lane.outputs)
                    for device in lane.devices
                )
                found.append((output, makers))
        return tuple(found)

    def _share(self, output: Output, makers: tuple[int, ...], outputs: dict[str, Tensor]) -> None:
        """To the stages that did not make it: every rank sees the same loss."""
        if len(makers) == dist.get_world_size():
            return
        kind = self.types[output.name]
        value = outputs.get(output.key)
        if value is None:
            value = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype.torch_name), device=self.device)
        value = value.contiguous()
        dist.broadcast(value, makers[0])
        outputs[output.key] = value
