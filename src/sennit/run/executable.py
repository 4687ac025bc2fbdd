"""One compiled program on this rank: its lane's source, loaded, with the process groups and the communicator it needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.errors import RunError
from sennit.ir.graph import OutputKind, Role
from sennit.ir.program import Buffer
from sennit.run.built import Built, Returned
from sennit.run.distributed import ProcessCommunicator
from sennit.run.groups import ProcessGroups
from sennit.run.load import load_code
from sennit.run.pieces import piece_of
from sennit.run.rank import Rank

__all__ = ["Executable"]


class Executable:
    """Made by all ranks alike: making it makes process groups."""

    def __init__(
        self, built: Built, groups: ProcessGroups, device: torch.device, *, local_inputs: bool = False
    ) -> None:
        groups.make_for(built.groups)
        self.built, self.device, self.local_inputs = built, device, local_inputs
        self.number = dist.get_rank()
        self.step = load_code(built.code)
        self.communicator = ProcessCommunicator(groups, device)
        self.rank = Rank(built.seat, self.communicator)
        self.constants = {key: value.to(device) for key, value in built.constants.items()}

    @property
    def losses(self) -> list[str]:
        return [output.key for output in self.built.returned if output.kind is OutputKind.LOSS]

    @property
    def results(self) -> list[str]:
        return [output.key for output in self.built.returned if output.kind is OutputKind.RESULT]

    # ---- what the model is called with -------------------------------------------------------------------------------

    def pieces(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The pieces of a call's tensors that this rank reads, by key.

        What another stage reads alone is passed over.
        """
        found: dict[str, Tensor] = {}
        for path, tensor in self.built.signature.flatten(args, kwargs).items():
            if tensor.device != self.device and (tensor.device.type, tensor.device.index or 0) != (
                self.device.type,
                self.device.index or 0,
            ):
                raise RunError(
                    f"argument {path!r} is on {tensor.device}, and the model on {self.device}",
                    fix=f"move the batch first: batch.to({str(self.device)!r})",
                )
            for item in self.built.inputs:
                if item.path == path and item.role is Role.INPUT:
                    found[self.built.keys[item.buffer.name]] = self._piece(item.buffer, tensor)
        return found

    def _piece(self, buffer: Buffer, tensor: Tensor) -> Tensor:
        if self.local_inputs:
            return tensor
        return piece_of(tensor, buffer.layout, buffer.point(self.number))

    # ---- running it --------------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step. Losses and results come back on every rank; gradients and buffers where their tensors live."""
        with torch.no_grad():
            outputs = dict(self.step(self.rank, inputs))
            self.communicator.finish()
            for output in self.built.returned:
                self._share(output, outputs)
        return outputs

    def _share(self, output: Returned, outputs: dict[str, Tensor]) -> None:
        """To the stages that did not make it: every rank sees the same loss."""
        if len(output.makers) == dist.get_world_size():
            return
        kind, value = output.type, outputs.get(output.key)
        if value is None:
            value = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype.torch_name), device=self.device)
        value = value.contiguous()
        dist.broadcast(value, output.makers[0])
        outputs[output.key] = value
