"""`sennit.DataParallel`: where people write DDP, with kernels and buckets as a strategy says.

    model = sennit.DataParallel(model, optimizer, sample=(tokens, targets))
    for tokens, targets in data:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The model is captured once (`capture/`): forward and backward as one graph. A strategy, given or found by search, says which operators run as one kernel and how
gradients travel. `forward` runs the forward kernels and returns the loss; `backward` runs the backward kernels with the upstream gradient of the loss, and hands
each gradient to its bucket the moment it is made (`channel_torch.py`).

**Waits.** A bucket with `wait=step` is waited for when the backward pass ends: then `parameter.grad` is there, as after DDP's backward. A bucket with
`wait=next` is still on its way then. `optimizer.step()` does not touch its parameters; they are updated in the next forward pass, right before the first kernel
that reads one of them. So the optimizer belongs to this module in that case: its `step` is replaced by one that updates what is there and remembers the rest,
with the hyperparameters of that moment (a scheduler may change them meanwhile). `flush()` waits for everything and updates it; `state_dict`, `eval`, `no_sync` and leaving a
`with model:` block flush by themselves.

**What needs all gradients at once** (clipping by the global norm, a loss scaler's check) cannot be hidden: `clip_grad_norm_` waits for all buckets first. Pass
`across_steps=False` where other code reads `parameter.grad`: everything is then waited for in `backward`, as with DDP.

The order of collectives is fixed by the strategy. All ranks compare a digest of graph and strategy at the start; one that differs is named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MethodType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.capture import capture
from sennit.errors import RunError
from sennit.fuse.channel_torch import GradientChannel, serial_group
from sennit.fuse.kernel_torch import (
    Runnable,
    compile_kernel,
    is_worth_compiling,
    kernel_module,
    sample_inputs,
    signature,
)
from sennit.fuse.model import StepModel
from sennit.fuse.profile_torch import measure_channel, measure_operators
from sennit.fuse.search import SearchOptions, search
from sennit.ir.graph import Graph, OutputKind, Phase, Role
from sennit.ir.strategy import Strategy, WaitAt
from sennit.ir.strategy_check import Kernel, check_strategy, kernels

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """A model whose result is the loss, trained on every rank's own batch with the mean of all gradients."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sample: tuple[Any, ...],
        strategy: Strategy | None = None,
        across_steps: bool = True,
        compile_kernels: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`sample` is a batch like those to come. Without a strategy, this machine and this group are measured and one is searched for, with waits in the next step
        unless `across_steps` is false. `group` must run its collectives in the order in which they are issued (`serial_group`)."""
        super().__init__()
        if not dist.is_initialized():
            raise RunError(
                "there is no process group",
                fix="call torch.distributed.init_process_group first, or run the script under torchrun",
            )
        self.module = model
        self.optimizer = optimizer
        # once: to walk the modules takes longer than an update of a small bucket
        self._trained = {path: p for path, p in model.named_parameters() if p.requires_grad}
        self.graph = capture(model, sample)
        self.group = group or serial_group()
        self._broadcast()
        if strategy is None:
            strategy = self._found(sample, across_steps=across_steps)
        check_strategy(strategy, self.graph)
        self.strategy = strategy
        self._agree()
        self._program = _Program(self.graph, strategy, sample_device(model), compile_kernels=compile_kernels)
        self._channel = GradientChannel(
            strategy.buckets,
            {path: (parameter.shape, parameter.dtype) for path, parameter in self._trained.items()},
            sample_device(model),
            self.group,
        )
        self._names = list(_argument_names(self.graph))
        self._late = {number for number, bucket in enumerate(strategy.buckets) if bucket.wait is WaitAt.NEXT}
        self._owed: dict[int, bool] = {}  # buckets of the last backward pass that were not waited for yet
        self._settings: list[dict[str, Any]] | None = None  # of the optimizer, when its step was asked for
        self._updates: dict[str, set[int]] = {}  # parameter -> buckets that its update still waits for
        self._synchronise = True
        self._sums: dict[str, Tensor] = {}  # gradients of steps without synchronisation
        self._anchor = torch.zeros((), requires_grad=True)
        self._plain_step = optimizer.step
        if self._late:
            # bound to the optimizer: schedulers take a step's function apart from what it is bound to
            optimizer.step = MethodType(lambda _, closure=None: self._deferred_step(closure), optimizer)  # type: ignore[method-assign]

    # ---- set-up ----------------------------------------------------------------------------------------------------------

    def _found(self, sample: tuple[Any, ...], *, across_steps: bool) -> Strategy:
        """The first rank's choice, on measurements of this machine and this group."""
        named = dict(zip(_argument_names(self.graph), sample, strict=True))
        cost = measure_operators(self.graph, self.module, named)
        channel = measure_channel(self.group, device=sample_device(self.module))
        chosen: list[str | None] = [None]
        if self.group.rank() == 0:
            options = SearchOptions(operators=False, across_steps=across_steps)
            found = search(StepModel(self.graph, cost, channel), options, name="measured")
            chosen = [str(found.strategy)]
        dist.broadcast_object_list(chosen, dist.get_global_rank(self.group, 0), group=self.group)
        assert chosen[0] is not None
        return Strategy.parse(chosen[0])

    def _agree(self) -> None:
        text = f"{self.graph}\n{self.strategy}"
        own = hashlib.sha256(text.encode()).hexdigest()
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, own, group=self.group)
        different = [rank for rank, other in enumerate(found) if other != found[0]]
        if different:
            raise RunError(
                f"ranks {different} have another model or strategy than rank 0; nothing was run",
                fix="build the same model with the same sample shapes, and pass the same strategy, on every rank",
            )

    def _broadcast(self) -> None:
        """Every rank starts from the values of the first."""
        first = dist.get_global_rank(self.group, 0)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), first, group=self.group)

    # ---- a step ------------------------------------------------------------------------------------------------------------

    def forward(self, *args: Tensor) -> Tensor:
        """The loss of this rank's batch."""
        if not torch.is_grad_enabled():
            self.flush()
            result: Tensor = self.module(*args)
            return result
        loss: Tensor = _Step.apply(self._anchor, self, *args)  # type: ignore[no-untyped-call]
        return loss

    def _run_forward(self, args: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        values = self._program.start(self.module, dict(zip(self._names, args, strict=True)))
        for place, runnable in enumerate(self._program.forward):
            for number in self._program.needed(place, self._owed):
                self._settle(number)
            self._program.run(runnable, values, place)
        return values[self._program.loss], values

    def _run_backward(self, values: dict[str, Tensor], upstream: Tensor) -> None:
        self.flush()  # parameters that the forward pass did not read
        program = self._program
        values[program.tangent] = upstream
        if self._synchronise:
            self._channel.begin()
        for place, runnable in enumerate(program.backward, start=len(program.forward)):
            program.run(runnable, values, place)
            for path, name in program.made.get(place, ()):
                self._gradient(path, values.pop(name) if name not in program.kept else values[name])
        values.clear()
        if self._synchronise:
            self._owed = dict.fromkeys(range(len(self.strategy.buckets)), True)
            for number in [number for number in self._owed if number not in self._late]:
                self._arrive(number)

    def _gradient(self, path: str, gradient: Tensor) -> None:
        if path in self._sums:
            gradient = self._sums.pop(path) + gradient
        if self._synchronise:
            self._channel.put(path, gradient)
        else:
            self._sums[path] = gradient.clone()

    def _arrive(self, number: int) -> list[str]:
        """A bucket is there: the gradients that it completes are the parameters' now. Their paths."""
        self._channel.wait(number)
        del self._owed[number]
        complete: list[str] = []
        for part in self.strategy.buckets[number].parts:
            if not any(bucket in self._owed for bucket, _ in self._channel.places[part.path]):
                self._trained[part.path].grad = self._channel.gradient(part.path)
                complete.append(part.path)
        return complete

    # ---- the optimizer -----------------------------------------------------------------------------------------------------

    def _deferred_step(self, closure: Any = None) -> None:
        if closure is not None:
            raise RunError("optimizer.step takes no closure here", fix="call model, backward, step in this order")
        self._settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        self._update([path for path, p in self._trained.items() if p.grad is not None])

    def _update(self, paths: Sequence[str]) -> None:
        """Step the optimizer for these parameters only, with the settings of when the step was asked for."""
        assert self._settings is not None
        chosen = {id(self._trained[path]) for path in paths}
        groups = self.optimizer.param_groups
        held = [dict(group) for group in groups]
        for group, settings in zip(groups, self._settings, strict=True):
            group["params"] = [p for p in group["params"] if id(p) in chosen]
            group.update(settings)
        try:
            self._plain_step()
        finally:
            for group, before in zip(groups, held, strict=True):
                group.update(before)
        for path in paths:
            self._trained[path].grad = None

    def _settle(self, number: int) -> None:
        """Wait for a late bucket, and update what it completes if the step was asked for."""
        complete = self._arrive(number)
        if self._settings is not None and complete:
            self._update(complete)

    def flush(self) -> None:
        """Wait for every gradient that is on its way, and do the updates that were asked for."""
        for number in list(self._owed):
            self._settle(number)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, on the mean gradients; waits for all of them."""
        self._settings = None
        self.flush()
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients and communicate nothing; the first one after it sends the sum."""
        self.flush()
        self._synchronise = False
        try:
            yield
        finally:
            self._synchronise = True

    # ---- as a module -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> DataParallel:
        if not mode:
            self.flush()
        super().train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Under DDP's names: `module.` before the model's own."""
        self.flush()
        return super().state_dict(*args, **kwargs)

    def __enter__(self) -> DataParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.flush()


class _Step(torch.autograd.Function):
    """The loss with a backward pass that is ours."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, owner: DataParallel, *args: Tensor) -> Tensor:
        loss, values = owner._run_forward(args)
        ctx.owner, ctx.values = owner, values
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
        if ctx.values is None:
            raise RunError("backward was called twice on one loss", fix="run the model again")
        values, ctx.values = ctx.values, None
        with torch.no_grad():
            ctx.owner._run_backward(values, upstream)
        return (torch.zeros(()), None, *[None] * (len(ctx.needs_input_grad) - 2))


class _Program:
    """The kernels of a strategy, ready to run, and when each value is done with."""

    def __init__(self, graph: Graph, strategy: Strategy, device: torch.device, *, compile_kernels: bool) -> None:
        found = kernels(strategy, graph)
        types = graph.types()
        read_by: dict[str, set[int]] = {}
        for place, kernel in enumerate(found):
            for name in kernel.reads:
                read_by.setdefault(name, set()).add(place)
        outputs = {output.name for output in graph.outputs}
        artifacts: dict[str, Any] = {}
        runnables: list[Runnable] = []
        for place, kernel in enumerate(found):
            made = {value.name for op in kernel.ops for value in op.results}
            written = frozenset(name for name in made if name in outputs or read_by.get(name, set()) - {place})
            module, reads, writes = kernel_module(kernel, written)
            call: Any = module.forward  # not the module: its hooks cost more than a small kernel
            if compile_kernels and is_worth_compiling(kernel):
                key = signature(kernel, written, types)
                if key not in artifacts:
                    artifacts[key] = compile_kernel(module, sample_inputs(reads, types, device))
                call = artifacts[key]
            runnables.append(Runnable(reads, writes, call))
        self.phases = [kernel.ops[0].phase for kernel in found]
        count = self.phases.count(Phase.FORWARD)
        assert all(phase is Phase.FORWARD for phase in self.phases[:count])  # backward reads the tangent of the loss
        self.forward, self.backward = runnables[:count], runnables[count:]
        self._index(graph, found, runnables, strategy)

    def _index(self, graph: Graph, found: Sequence[Kernel], runnables: Sequence[Runnable], strategy: Strategy) -> None:
        last: dict[str, int] = {}
        for place, runnable in enumerate(runnables):
            last.update(dict.fromkeys((*runnable.reads, *runnable.writes), place))
        gradients = {output.name: output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT}
        (self.loss,) = [output.name for output in graph.outputs if output.kind is OutputKind.LOSS]
        (self.tangent,) = [item.value.name for item in graph.inputs if item.role is Role.TANGENT]
        self.inputs = [item for item in graph.inputs if item.role is not Role.TANGENT]
        ends = {place: [] for place in range(len(runnables))}  # type: dict[int, list[str]]
        for name, place in last.items():
            if name not in gradients and name != self.loss:
                ends[place].append(name)
        self.ends = ends
        self.made: dict[int, list[tuple[str, str]]] = {}  # kernel -> gradients that it makes
        for place, runnable in enumerate(runnables):
            own = [(gradients[name], name) for name in runnable.writes if name in gradients]
            if own:
                self.made[place] = own
        self.kept = {name for name in gradients if last[name] > self._maker(runnables, name)}
        self.first_use = self._first_uses(graph, runnables)
        self.bucket_need = {
            number: min(self.first_use.get(part.path, len(self.forward)) for part in bucket.parts)
            for number, bucket in enumerate(strategy.buckets)
        }

    @staticmethod
    def _maker(runnables: Sequence[Runnable], name: str) -> int:
        return next(place for place, runnable in enumerate(runnables) if name in runnable.writes)

    @staticmethod
    def _first_uses(graph: Graph, runnables: Sequence[Runnable]) -> dict[str, int]:
        names = {item.value.name: item.path for item in graph.inputs if item.role is Role.PARAM}
        first: dict[str, int] = {}
        for place, runnable in enumerate(runnables):
            for name in runnable.reads:
                if name in names:
                    first.setdefault(names[name], place)
        return first

    def needed(self, place: int, owed: Mapping[int, bool]) -> list[int]:
        """The buckets on their way that a forward kernel needs."""
        return [number for number in owed if self.bucket_need[number] <= place] if owed else []

    def start(self, model: nn.Module, arguments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        values: dict[str, Tensor] = {}
        for item in self.inputs:
            tensor = arguments[item.path] if item.role is Role.INPUT else state[item.path]
            if tuple(tensor.shape) != item.value.type.shape:
                raise RunError(
                    f"{item.path} has shape {list(tensor.shape)}, and the model was captured with "
                    f"{list(item.value.type.shape)}",
                    fix="run with the sample's shapes",
                )
            values[item.value.name] = tensor.detach()
        return values

    def run(self, runnable: Runnable, values: dict[str, Tensor], place: int) -> None:
        results = runnable.call(*[values[name] for name in runnable.reads])
        values.update(zip(runnable.writes, results, strict=True))
        for name in self.ends[place]:
            values.pop(name, None)


def sample_device(model: nn.Module) -> torch.device:
    parameter = next(iter(model.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device


def _argument_names(graph: Graph) -> Iterator[str]:
    for item in graph.inputs:
        if item.role is Role.INPUT:
            yield item.path
