"""What a parallel model runs: its programs, compiled when they are first needed, and the tensors they read.

A program is compiled in a process of its own where that is possible (`run/child.py`); `run/built.py` says what a rank
keeps of it.

A model has two programs: one trains, with its modules in training mode, forward and backward; one evaluates, with its
modules in evaluation mode, forward alone. The first one that is compiled decides where parameters live
(`run/homes.py`). Another program may want a parameter elsewhere; then it is moved for that call. With `dynamic`, each
new set of argument shapes has programs of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from sennit.capture.signature import argument_paths
from sennit.errors import PlanError, RunError
from sennit.ir.graph import OutputKind, Role
from sennit.ir.layout import Layout
from sennit.reshard.dtensor_torch import redistribute
from sennit.reshard.private_torch import local_of
from sennit.run.apart import apart
from sennit.run.built import Built, build
from sennit.run.child import CompileIn, compiled_in
from sennit.run.compile import Compiled, Recipe, compile_call
from sennit.run.executable import Executable
from sennit.run.groups import ProcessGroups
from sennit.run.homes import Homes, Move, device_meshes, homes_of, in_space
from sennit.run.memory import StorageMeter
from sennit.run.routes import cut
from sennit.run.skeleton import Slot
from sennit.run.step import StepCall, run_step
from sennit.run.world import together

__all__ = ["Call", "Engine", "Options"]


@dataclass(frozen=True, slots=True)
class Call:
    """Positional and keyword arguments of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def map(self, change: Any) -> Call:
        args, kwargs = pytree.tree_map_only(Tensor, change, (self.args, dict(self.kwargs)))
        return Call(args, kwargs)


@dataclass(frozen=True, slots=True)
class Options:
    """How a parallel model is called: inputs whole or this rank's part; new shapes refused or compiled; the type that
    parameters are cast to for computing; which losses are differentiated (None: all); the seed of dropout; a loss
    scaler; where programs are compiled (None: in a child where that is possible).
    """

    local_inputs: bool = False
    dynamic: bool = False
    dtype: torch.dtype | None = None
    losses: tuple[str, ...] | None = None
    seed: int = 0
    scaler: torch.amp.GradScaler | None = None
    compile_in: CompileIn = None


@dataclass(frozen=True, slots=True)
class _Key:
    """Which program, and with `dynamic` what it is called with."""

    training: bool
    arguments: tuple[tuple[str, str], ...] = ()


class Engine:
    """`tensors` is filled by the module, once the homes are known."""

    def __init__(
        self,
        skeleton: nn.Module,
        slots: tuple[Slot, ...],
        recipe: Recipe,
        options: Options,
        sample: Call,
        device: torch.device,
    ) -> None:
        self.skeleton, self.slots, self.recipe, self.options = skeleton, slots, recipe, options
        self.sample, self.device = sample, device
        self.types = {slot.path: slot.dtype for slot in slots}
        self.groups = ProcessGroups()
        self.programs: dict[_Key, Executable] = {}
        self.tensors: dict[str, DTensor] = {}  # by path: parameters and buffers that live on this rank
        self.homes: Homes | None = None
        self.step = 0  # training steps so far: what makes the dropout of each differ
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.meter: StorageMeter | None = None  # counts what the next steps make, while it is there

    # ---- compiling ---------------------------------------------------------------------------------------------------

    def program(self, training: bool, call: Call) -> Executable:
        """The program for a call, compiled where it is not there yet; all ranks call this alike."""
        key = _Key(training, self._shapes(call) if self.options.dynamic else ())
        if key not in self.programs:
            self.programs[key] = self._compile(key, self.sample if self.options.local_inputs else call)
        return self.programs[key]

    def _shapes(self, call: Call) -> tuple[tuple[str, str], ...]:
        found = argument_paths(self.skeleton, call.args, call.kwargs)
        return tuple(
            (path, f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value))
            for path, value in found.items()
        )

    def _compile(self, key: _Key, call: Call) -> Executable:
        if self.options.dtype is not None:
            call = call.map(self._cast)

        def work() -> Built:
            return compiled_in(self.options.compile_in, self.device, lambda: self._build(key, call), self._given(call))

        built = together(work, lambda made: made.digest, "compile the model")
        built = built.with_forward(inspect.signature(self.skeleton.forward))
        self.skeleton.train(key.training)
        if self.homes is None:
            self.homes = built.homes
            device_meshes(self.homes, self.groups)
        return Executable(built, self.groups, self.device, local_inputs=self.options.local_inputs)

    def _given(self, call: Call) -> list[object]:
        """What is no tensor in a call, defaults of `forward` included: later calls are compared with these very
        objects.
        """
        defaults = [item.default for item in inspect.signature(self.skeleton.forward).parameters.values()]
        leaves: list[object] = pytree.tree_leaves((call.args, dict(call.kwargs), defaults))
        return [leaf for leaf in leaves if not isinstance(leaf, Tensor)]

    def _build(self, key: _Key, call: Call) -> Built:
        """The program and what this rank needs of it."""
        self.skeleton.train(key.training)
        compiled = compile_call(
            self.recipe, self.skeleton, call.args, call.kwargs, self.device.type, training=key.training
        )
        homes = self.homes
        if homes is None:
            shapes = {path: tuple(tensor.shape) for path, tensor in self._skeleton_tensors().items()}
            homes = homes_of(compiled.program, self.slots, shapes)
        moves = _moves(compiled, homes)
        if key.training and moves:
            raise PlanError(
                f"the plan puts {moves[0].path!r} elsewhere for training than for evaluation",
                fix="call parallelize with the model in training mode, which then decides where parameters live",
            )
        ahead, local = dist.get_backend() != "nccl", self.options.local_inputs
        return build(compiled, dist.get_rank(), homes, moves, local_inputs=local, ahead=ahead)

    def _skeleton_tensors(self) -> dict[str, Tensor]:
        named = {**dict(self.skeleton.named_buffers()), **dict(self.skeleton.named_parameters())}
        return {slot.path: named[slot.path] for slot in self.slots}

    # ---- running -----------------------------------------------------------------------------------------------------

    def evaluate(self, call: Call) -> object:
        """A call in evaluation mode."""
        executable = self.program(False, call)
        outputs = executable.run(self._inputs(executable, call, {}))
        self._write_buffers(executable, outputs)
        return self._rebuild(executable, outputs)

    def train(self, call: Call) -> object:
        """A call in training mode: its losses lead back to the parameters."""
        executable = self.program(True, call)
        tangents = self._tangents(executable)
        paths = executable.built.gradients
        inputs = self._inputs(executable, call, tangents)

        def run() -> Mapping[str, Tensor]:
            with self.meter or nullcontext():
                made = executable.run(inputs)
            self._write_buffers(executable, made)
            return made

        step = StepCall(
            run,
            executable.losses,
            executable.results,
            lambda made: self._gradients(paths, made),
            tangents,
        )
        values = run_step(step, self.anchor, [self.tensors[path] for path in paths])
        self.step += 1
        return self._rebuild(executable, values)

    def _rebuild(self, executable: Executable, values: Mapping[str, Tensor]) -> object:
        signature = executable.built.signature
        found: dict[str, Any] = {leaf.path: None for leaf in signature.results if leaf.path is not None}
        return signature.rebuild({**found, **values})

    def _tangents(self, executable: Executable) -> dict[str, float]:
        """What each loss is differentiated with, by key."""
        losses = executable.losses
        wanted = losses if self.options.losses is None else self.options.losses
        for name in wanted:
            if name not in losses:
                raise RunError(f"the model returns no loss {name!r}", fix=f"name some of {', '.join(losses)}")
        scaler = self.options.scaler
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        return {key: scale if key in wanted else 0.0 for key in losses}

    def _inputs(self, executable: Executable, call: Call, tangents: Mapping[str, float]) -> dict[str, Tensor]:
        if self.options.dtype is not None:
            call = call.map(self._cast)
        inputs = {**executable.pieces(call.args, call.kwargs), **executable.constants}
        moved = self._moved(executable)
        for item in executable.built.inputs:
            name, dtype = executable.built.keys[item.buffer.name], _torch(item.buffer.dtype.torch_name)
            match item.role:
                case Role.PARAM | Role.BUFFER if name not in inputs:
                    wanted = in_space(item.buffer.layout)
                    local = moved.get((item.path, wanted))
                    inputs[name] = (self._local(item.path, wanted) if local is None else local).detach().to(dtype)
                case Role.TANGENT:
                    key = item.path.removeprefix("tangent").removeprefix(".") or "loss"
                    inputs[name] = torch.full((), tangents[key], dtype=dtype, device=self.device)
                case Role.SEED:
                    inputs[name] = torch.tensor([self.options.seed, self.step])
                case _:
                    pass  # of the call, or a constant
        return inputs

    def _local(self, path: str, wanted: Layout) -> Tensor:
        """What lives here of a tensor, or the part of it that a layout wants."""
        assert self.homes is not None
        local, rank = local_of(self.tensors[path]), dist.get_rank()
        home = self.homes.at(path, rank)
        assert home is not None
        if home.layout == wanted:
            return local
        part = self.homes.part(path, wanted, rank)
        assert part is not None  # `_moves` has the others
        return cut(local, part)

    def _moved(self, executable: Executable) -> dict[tuple[str, Layout], Tensor]:
        """What this call reads elsewhere than it lives: moved for the call, by all ranks of both meshes together."""
        found: dict[tuple[str, Layout], Tensor] = {}
        for move in executable.built.moves:
            members = {*move.source.mesh.devices, *move.target.mesh.devices}
            if dist.get_rank() not in members:
                continue
            held = self.tensors.get(move.path)
            # the ranks that only receive bring an empty piece of the same type
            empty = torch.empty(0, dtype=self.types[move.path], device=self.device)
            local = local_of(held) if held is not None else empty
            moved = redistribute(local.detach(), move.source, move.target)
            if dist.get_rank() in move.target.mesh.devices:
                found[move.path, move.target] = moved
        return found

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.options.dtype) if tensor.is_floating_point() else tensor

    def _write_buffers(self, executable: Executable, outputs: Mapping[str, Tensor]) -> None:
        for output in executable.built.outputs:
            if output.kind is OutputKind.BUFFER:
                local_of(self.tensors[output.path]).copy_(outputs[output.key])

    def _gradients(self, paths: Sequence[str], outputs: Mapping[str, Tensor]) -> list[DTensor]:
        """The gradients as DTensors, each with memory of its own: autograd keeps them, and optimizers write to them."""
        assert self.homes is not None
        locals_ = [outputs[path].contiguous().to(self.tensors[path].dtype) for path in paths]
        made: list[DTensor] = []
        for path, local in zip(paths, apart(locals_), strict=True):
            parameter = self.tensors[path]
            made.append(
                DTensor.from_local(
                    local,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            )
        return made


def _moves(compiled: Compiled, homes: Homes) -> tuple[Move, ...]:
    """The tensors that a program reads where they do not live, with both layouts; the same list on all ranks.

    What every reader finds in the piece that lives there is cut from it instead (`Engine._local`).
    """
    moves: list[Move] = []
    for lane in compiled.program.lanes:
        for item in lane.inputs:
            if item.role not in (Role.PARAM, Role.BUFFER) or item.path in compiled.constants:
                continue
            wanted = in_space(item.buffer.layout)
            if not homes.serves(item.path, wanted, lane.devices):
                moves.append(Move(item.path, homes.of[item.path][0].layout, wanted))
    return tuple(dict.fromkeys(moves))


def _torch(name: str) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found
