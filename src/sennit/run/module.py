"""The parallel model: an `nn.Module` with this rank's parameters under their own names, called like the model it was
made from.

    model = sennit.parallelize(model, sample, plan=zoo.data_parallel)
    loss = model(**batch).loss; loss.backward(); optimizer.step()

`named_parameters()` gives the parameters that live on this rank, as DTensors: all of them, or in a pipeline those of
this stage. Tied ones are one. A call runs a whole program: in training mode all micro-batches forward and backward
(`run/step.py`), after `model.eval()` forward alone. Every rank returns the same losses and results. (In training mode
under `torch.no_grad()` the gradients are computed too, and dropped: switch to `eval()` to evaluate.)

Methods that say "all ranks" communicate: a rank that does not call leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sennit.errors import RunError
from sennit.ir.graph import Graph
from sennit.ir.program import Program
from sennit.plan import Decisions, Plan
from sennit.reshard.private_torch import local_of
from sennit.run.clip import clip_grad_norm
from sennit.run.engine import Call, Engine
from sennit.run.executable import Executable
from sennit.run.full import full_state, single_device
from sennit.run.homes import Home, Homes, fill, place, plain
from sennit.run.memory import MemoryReport, StorageMeter, memory_report

__all__ = ["ParallelModule"]


class ParallelModule(nn.Module):
    """Made by `sennit.parallelize`."""

    def __init__(self, engine: Engine, first: Executable, value_of: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._engine, self._first = engine, first
        self._measured: int | None = None
        self._scopes(value_of)
        self.training = engine.skeleton.training

    def _scopes(self, value_of: Callable[[str], Tensor]) -> None:
        """Register what lives on this rank under all its names, in modules that are nothing but names."""
        engine, rank = self._engine, dist.get_rank()
        for slot in engine.slots:
            whole = value_of(slot.path)  # on every rank, whether it lives here or not: this may communicate
            home = self._homes.here(slot.path, self._lane)
            if home is None:
                continue
            tensor: Tensor = place(whole, home, rank, engine.device, engine.groups)
            if slot.is_parameter:
                tensor = nn.Parameter(tensor, requires_grad=slot.requires_grad)
            assert isinstance(tensor, DTensor)
            engine.tensors[slot.path] = tensor
        for position in range(max((len(slot.names) for slot in engine.slots), default=0)):
            for slot in engine.slots:  # first names first: parameters keep the order of the model
                if slot.path in engine.tensors and position < len(slot.names):
                    self._register(slot.names[position], engine.tensors[slot.path], persistent=slot.persistent)

    def _register(self, name: str, tensor: Tensor, *, persistent: bool) -> None:
        *scopes, leaf = name.split(".")
        owner: nn.Module = self
        for scope in scopes:
            # straight into the dict: a name of the model may be that of a method here, and both keep working
            inner = owner._modules.setdefault(scope, _Scope())
            assert inner is not None
            owner = inner
        if isinstance(tensor, nn.Parameter):
            owner._parameters[leaf] = tensor
        else:
            owner._buffers[leaf] = tensor
            if not persistent:
                owner._non_persistent_buffers_set.add(leaf)

    def home(self, name: str) -> Home:
        """Where a parameter or buffer of this rank lives."""
        for slot in self._engine.slots:
            found = self._homes.here(slot.path, self._lane) if name in slot.names else None
            if found is not None:
                return found
        raise RunError(f"{name!r} does not live on rank {dist.get_rank()}", fix="see model.named_parameters()")

    @property
    def _homes(self) -> Homes:
        homes = self._engine.homes
        assert homes is not None
        return homes

    @property
    def _lane(self) -> str:
        return self._first.built.lane

    def __getattr__(self, name: str) -> Any:
        """Plain values of the model (`model.config`) are to be had here too; its methods and tensors are not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            engine = self.__dict__.get("_engine")
            value = getattr(engine.skeleton, name, None) if engine is not None else None
            if value is None or callable(value) or isinstance(value, Tensor):
                raise
            return value

    # ---- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model, on all ranks together."""
        call = Call(args, kwargs)
        return self._engine.train(call) if self.training else self._engine.evaluate(call)

    @property
    def step_count(self) -> int:
        """Training steps so far. It numbers the random numbers of dropout; set it when a run is continued."""
        return self._engine.step

    @step_count.setter
    def step_count(self, step: int) -> None:
        self._engine.step = step

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages so that their norm is at most `max_norm`; returns the norm. All ranks.

        `torch.nn.utils.clip_grad_norm_` sees the parameters of this rank's stage alone: right without pipeline stages.
        """
        return clip_grad_norm(self._engine.tensors, self._homes, max_norm, norm_type, self._engine.device)

    # ---- state -------------------------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module: this rank's parameters and persistent buffers, as DTensors in placements that
        `torch.distributed.checkpoint` can save. All ranks of a stage: what lies strided is moved."""
        state = super().state_dict(*args, **kwargs)
        if kwargs.get("keep_vars", False):
            return state
        prefix = kwargs.get("prefix", "")
        for slot in self._engine.slots:
            home = self._homes.here(slot.path, self._lane)
            found = state.get(prefix + slot.path)
            if home is not None and isinstance(found, DTensor):
                value = plain(found, home.layout)
                for name in slot.names:
                    if prefix + name in state:
                        state[prefix + name] = value
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """From whole tensors (a checkpoint of the single-device model), or from DTensors in any placements.

        Names that live on other ranks are passed over; each rank takes its own. All ranks of a stage where there are
        DTensors.
        """
        if assign:
            raise RunError("assign=True is not possible", fix="load without it: values are copied into the parameters")
        known = {name: slot for slot in self._engine.slots for name in slot.names}
        unexpected = [name for name in state_dict if name not in known]
        missing: list[str] = []
        for slot in self._engine.slots:
            home = self._homes.here(slot.path, self._lane)
            if home is None:
                continue
            name = next((name for name in slot.names if name in state_dict), None)
            if name is not None:
                target = self._engine.tensors[slot.path]
                _check_shape(name, target, state_dict[name])
                with torch.no_grad():
                    fill(target, state_dict[name], home.layout, dist.get_rank())
            elif slot.persistent:
                missing += slot.names
        if strict and (missing or unexpected):
            raise RunError(
                f"missing: {', '.join(missing) or 'nothing'}; unexpected: {', '.join(unexpected) or 'nothing'}",
                where="load_state_dict",
                fix="load a state with the names of the model, or pass strict=False",
            )
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    def full_state_dict(self, *, rank0_only: bool = False) -> dict[str, Tensor]:
        """The state of the single-device model: whole tensors on the CPU, under all names.

        All ranks; with `rank0_only`, the others return an empty dict.
        """
        keep = not rank0_only or dist.get_rank() == 0
        persistent = tuple(slot for slot in self._engine.slots if slot.persistent)
        return full_state(persistent, self._homes, self._engine.tensors, self._engine.device, keep=keep)

    def single_device(self) -> nn.Module:
        """The original model with the values of now, on the CPU: to save, to export, to generate with. All ranks."""
        engine = self._engine
        state = full_state(engine.slots, self._homes, engine.tensors, engine.device, keep=True)
        return single_device(engine.skeleton, state)

    # ---- what was compiled -------------------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """What was captured. This, the plan and the program are kept packed: the first use unpacks them."""
        return self._first.built.stages.value.graph

    @property
    def plan(self) -> Plan:
        return self._first.built.stages.value.plan

    @property
    def decisions(self) -> Decisions:
        return self._first.built.stages.value.decisions

    @property
    def program(self) -> Program:
        """The program of all ranks; it prints, and what it prints parses."""
        return self._first.built.stages.value.program

    @property
    def compile_seconds(self) -> Mapping[str, float]:
        """How long each stage of the compilation took on this rank."""
        return self._first.built.seconds

    def source(self) -> str:
        """The Python that this rank runs in a step."""
        return self._first.built.code.text()

    def memory_report(self, optimizer: torch.optim.Optimizer | None = None) -> MemoryReport:
        """This rank's memory by kind: predicted from the program, and as it is now. Print it."""
        return memory_report(self.program, dist.get_rank(), self._engine.tensors, optimizer, self._measured)

    @contextmanager
    def measuring_memory(self) -> Iterator[None]:
        """Count the memory that training steps make inside this block; `memory_report` shows the peak.

        It slows them down.
        """
        self._engine.meter = meter = StorageMeter()
        try:
            yield
        finally:
            self._engine.meter, self._measured = None, meter.peak

    def extra_repr(self) -> str:
        bytes_here = sum(local_of(tensor).nbytes for tensor in self._engine.tensors.values())
        return (
            f"plan={self._first.built.plan!r}, mesh={self._first.built.mesh!r}, lane={self._lane!r}, "
            f"{len(self._engine.tensors)} tensors, {bytes_here} bytes on this rank"
        )


class _Scope(nn.Module):
    """A name on the way to a parameter."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RunError(
            "a part of a parallel model cannot be called alone",
            fix="call the whole model, or model.single_device() for a model whose parts can",
        )


def _check_shape(name: str, target: DTensor, value: Tensor) -> None:
    if tuple(value.shape) != tuple(target.shape):
        raise RunError(
            f"{name} has shape {list(value.shape)}, and the model's is {list(target.shape)}",
            where="load_state_dict",
            fix="load the state of a model of the same configuration",
        )
