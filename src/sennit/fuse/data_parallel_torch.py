"""`sennit.DataParallel`: where people write DDP, with kernels and buckets as a strategy says.

    model = sennit.DataParallel(model, optimizer, sample=(tokens, targets))
    for tokens, targets in data:
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The model is captured once (`capture/`): forward and backward as one graph. A strategy, given or found by search, says
which operators run as one kernel and how gradients travel. `forward` runs the forward kernels and returns what the
model returns; `backward` of its loss runs the backward kernels (`program_torch.py`), and hands each gradient to its
bucket the moment it is made (`gradients_torch.py`, `channel_torch.py`).

**Waits.** A bucket with `wait=step` is waited for when the backward pass ends: then `parameter.grad` is there, as after
DDP's backward. A bucket with `wait=next` is still on its way then. `optimizer.step()` does not touch its parameters;
they are updated in the next forward pass, right before the first kernel that reads one of them (`update_torch.py`).
`flush()` waits for everything and updates it; `state_dict` of this module, of the model and of the optimizer,
evaluation, `no_sync` and leaving a `with model:` block flush by themselves.

**What needs all gradients at once** (clipping by the global norm, a loss scaler's check) cannot be hidden: whoever
looks at a gradient that is on its way waits for all buckets first (`awaited_torch.py`), and so do `clip_grad_norm_` and
`synchronize()`, after which `parameter.grad` is what DDP would leave there. `parameters()` completes the updates. With
`across_steps=False` everything is waited for in `backward`.

**As DDP does.** Parameters and buffers start from the first rank's values, and buffers are the first rank's again
before each forward pass that follows a synchronised one. Gradients add to `parameter.grad` where there is one. Inside
`no_sync()` nothing is communicated. A parameter that no gradient comes to is refused, or left alone with
`find_unused_parameters=True`. Random operators draw from torch's generator (`draws_torch.py`).

The order of collectives is fixed by the strategy. All ranks compare a digest of graph and strategy at the start; one
that differs is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sennit.capture.trace import capture_call
from sennit.errors import RunError
from sennit.fuse.channel_torch import GradientChannel
from sennit.fuse.eager_graph_torch import eager_graph
from sennit.fuse.first_rank_torch import Together, agree, broadcast
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.gradients_torch import Gradients
from sennit.fuse.kept_memory import keep_memory
from sennit.fuse.looked_up import ROWS, looked_up, parameter_of, rows_apart
from sennit.fuse.network_threads import Preference, ordinary
from sennit.fuse.network_threads import network_first as prefer_network
from sennit.fuse.program_torch import StepProgram
from sennit.fuse.row_uses import row_uses
from sennit.fuse.serial_group_torch import serial_group
from sennit.fuse.tune_torch import Trial, Tuning, is_preference_worth, tune
from sennit.fuse.update_torch import DeferredStep
from sennit.fuse.wrapped_torch import Asked, Setting, check_inputs, check_wrapped, without_autocast
from sennit.ir.graph import Output, OutputKind, Role
from sennit.ir.strategy import Strategy, WaitAt
from sennit.ir.strategy_check import check_strategy

__all__ = ["DataParallel"]


class DataParallel(nn.Module):
    """A model that computes its loss, trained on every rank's own batch with the mean of all gradients."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        sample: tuple[Any, ...] | Mapping[str, Any],
        strategy: Strategy | None = None,
        across_steps: bool = True,
        compile_kernels: bool = False,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        fused_attention: bool = True,
        group: dist.ProcessGroup | None = None,
        network_first: bool = True,
        keep_freed_memory: bool = True,
        tuning: Tuning | None = None,
    ) -> None:
        """`sample` is a batch like those to come: arguments, or keywords by name.

        Without a strategy, this machine and this group are measured and one is searched for, with waits in the next
        step unless `across_steps` is false or there is no optimizer; `tuning` says how long to look. `fused_attention`
        runs `F.scaled_dot_product_attention` as one kernel, as eager torch does; without it the mathematical form runs,
        as under `sdpa_kernel(SDPBackend.MATH)`. `group` must run its collectives in the order in which they are issued
        (`serial_group`). `network_first` lets gloo's threads run before those that compute (`network_threads.py`);
        `keep_freed_memory` keeps a step's memory with the process (`kept_memory.py`).
        """
        super().__init__()
        check_wrapped(model, sample, strategy, optimizer)
        self.module = model
        self.optimizer = optimizer
        if keep_freed_memory:
            keep_memory()
        self.broadcast_buffers = broadcast_buffers
        self.device = device_of(model)
        self.group = group or serial_group(device=self.device)
        broadcast((*model.parameters(), *model.buffers()), self.group)
        # after each group's first collective: a thread that has just begun is not known to be gloo's yet
        self.preference = prefer_network() if network_first else Preference.NONE
        arguments, keywords = (sample, {}) if isinstance(sample, tuple) else ((), dict(sample))
        captured = capture_call(model, arguments, keywords)
        self.signature, self.constants = captured.signature, dict(captured.constants)
        drawn = eager_graph(captured.graph, self.device, fused_attention=fused_attention)
        ranks = self.group.size() if self.device.type == "cpu" else 1  # how many rows there are is known to the host
        # a strategy that was written for tables in one piece keeps them so
        names = () if strategy is None else [part.path for bucket in strategy.buckets for part in bucket.parts]
        is_apart = strategy is None or any(name.endswith(ROWS) for name in names)
        self.graph = gradients_first(rows_apart(drawn, ranks) if is_apart else drawn)
        self.packed = looked_up(self.graph, ranks)
        self.trained = self._with_gradients(find_unused=find_unused_parameters)
        # by gradient: a table that is also the head has two
        self.sent = {
            output.path: self.trained[parameter_of(output.path)]
            for output in self.graph.outputs
            if output.kind is OutputKind.GRADIENT
        }
        self._setting = Setting.of(model, self.device)
        self._modes = [(module, module.training) for module in model.modules()]
        self._loss_key, self._results, self._new_buffers = self._outputs()
        self._with_gradient = frozenset(leaf.path for leaf in self.signature.results if leaf.requires_grad)
        self._step: DeferredStep | None = DeferredStep(optimizer) if optimizer is not None else None
        in_rows = self.device.type == "cpu" and self._step is not None and self._step.is_by_element
        self.row_uses = row_uses(self.graph) if in_rows else {}
        self.gradients = Gradients(self.trained, self.sent, GradientChannel((), {}, self.device, self.group))
        self._synchronise = True
        self._sent_buffers: Together | None = None  # the first rank's, on their way
        self._are_loaded = False  # others were loaded since
        self._anchor = torch.zeros((), requires_grad=True)
        self._artifacts: dict[Any, Any] = {}  # compiled kernels
        self.tried: tuple[Trial, ...] = ()
        tuning, inputs = tuning or Tuning(), self.signature.flatten(arguments, keywords)
        if strategy is None:
            across = across_steps and optimizer is not None
            with without_autocast(self.device):
                self.tried = tune(self, inputs, across_steps=across, compile_kernels=compile_kernels, tuning=tuning)
            strategy = self.tried[0].strategy
        self.use(strategy, compile_kernels=compile_kernels)
        agree(f"{self.graph}\n{self.strategy}", self.group)
        if self.tried and tuning.turns and self.group.size() > 1 and self.preference is not Preference.NONE:
            if is_preference_worth(self, inputs, tuning):
                prefer_network()
            else:
                ordinary()
                self.preference = Preference.NONE
        self._flush_before_reads()

    # ---- set-up ------------------------------------------------------------------------------------------------------

    def use(self, strategy: Strategy, *, compile_kernels: bool = False) -> None:
        """Run by this strategy from now on. Every rank must pass the same one."""
        self.flush()
        check_strategy(strategy, self.graph)
        late = {number for number, bucket in enumerate(strategy.buckets) if bucket.wait is WaitAt.NEXT}
        if late and self._step is None:
            raise RunError(
                f"{len(late)} buckets of the strategy wait in the next step, and there is no optimizer to do the updates there",
                fix="pass the optimizer, or a strategy whose buckets all have wait=step",
            )
        if named := [bucket.algorithm for bucket in strategy.buckets if bucket.algorithm is not None]:
            raise RunError(
                f"{len(named)} buckets of the strategy name an algorithm ({named[0]!r}), and a process group of torch chooses its own",
                fix="leave `by` out of the strategy; a described cluster's times are those of its fastest algorithm without it",
            )
        self.program = StepProgram(
            self.graph,
            strategy,
            self.device,
            packed=self.packed,
            uses=self.row_uses,
            artifacts=self._artifacts if compile_kernels else None,
        )
        shapes = {path: (parameter.shape, parameter.dtype) for path, parameter in self.sent.items()}
        channel = GradientChannel(strategy.buckets, shapes, self.device, self.group, self.packed)
        blocks, flush = self.program.read_in_blocks, WeakMethod(self.flush)
        self.gradients = Gradients(self.trained, self.sent, channel, blocks, late=late, flush=flush)
        self._state = list(self._places())
        self.strategy, self._late = strategy, late
        if self._step is not None:
            self._step.restore()
            if late:
                self._step.replace(self._ask, before_zero=self._before_zero)

    def _with_gradients(self, *, find_unused: bool) -> dict[str, nn.Parameter]:
        """The trained parameters by path; walked once, since that takes longer than a small bucket's update."""
        reached = {output.path for output in self.graph.outputs if output.kind is OutputKind.GRADIENT}
        trained = {path: p for path, p in self.module.named_parameters() if p.requires_grad}
        unused = [path for path in trained if path not in reached]
        if unused and not find_unused:
            raise RunError(
                f"{len(unused)} of {len(trained)} parameters get no gradient from the loss: {', '.join(unused[:5])}",
                where=f"sennit.DataParallel of {type(self.module).__name__}",
                fix="freeze them with requires_grad_(False), or pass find_unused_parameters=True to leave them alone",
            )
        return {path: trained[path] for path in trained if path in reached}

    def _outputs(self) -> tuple[str, list[Output], list[tuple[str, str]]]:
        of = {kind: [output for output in self.graph.outputs if output.kind is kind] for kind in OutputKind}
        if len(of[OutputKind.LOSS]) != 1:
            names = ", ".join(output.path for output in of[OutputKind.LOSS])
            raise RunError(
                f"the model returns {len(of[OutputKind.LOSS])} losses{': ' * bool(names)}{names}",
                fix="compute the loss in the model's forward and return it, alone or under the name `loss`",
            )
        buffers = [(output.path, output.name) for output in of[OutputKind.BUFFER]]
        return of[OutputKind.LOSS][0].key, of[OutputKind.RESULT], buffers

    def _places(self) -> Iterator[tuple[str, Mapping[str, Any], str]]:
        """For every parameter and buffer: its name in the graph, and the dictionary and key under which the model holds
        it, so that one that is replaced is seen.
        """
        for item in self.program.inputs:
            if item.role is Role.INPUT:
                continue
            if item.path in self.constants:
                yield item.value.name, self.constants, item.path
                continue
            owner, _, key = item.path.rpartition(".")
            module = self.module.get_submodule(owner)
            yield item.value.name, module._parameters if key in module._parameters else module._buffers, key

    def _flush_before_reads(self) -> None:
        """What reads parameters or the optimizer's state from outside sees them complete."""
        flush = Asked(self.flush)
        self.module.register_state_dict_pre_hook(flush)  # type: ignore[no-untyped-call]
        # else the updates would change what was loaded
        self.module.register_load_state_dict_pre_hook(Asked(self._complete))  # type: ignore[no-untyped-call]
        self.module.register_forward_pre_hook(flush)
        if self.optimizer is not None:
            self.optimizer.register_state_dict_pre_hook(flush)
            self.optimizer.register_load_state_dict_pre_hook(flush)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for this rank's batch. Only the loss trains: a backward pass that comes to another
        result which requires a gradient in the model is refused.
        """
        self._take_buffers()
        is_step = torch.is_grad_enabled() and self.module.training
        if not is_step:
            with torch.no_grad():
                return self.module(*args, **kwargs)
        self._check_modes()
        self._setting.check(self.device)
        inputs = self.signature.flatten(args, kwargs)
        check_inputs(inputs)
        loss, *results = _Step.apply(self._anchor, self, inputs)  # type: ignore[no-untyped-call]
        values = {
            output.key: _Untrained.apply(self._anchor, (tensor,), output.key)  # type: ignore[no-untyped-call]
            if output.key in self._with_gradient
            else tensor
            for output, tensor in zip(self._results, results, strict=True)
        }
        return self.signature.rebuild({**values, self._loss_key: loss})

    def _check_modes(self) -> None:
        for module, mode in self._modes:
            if module.training != mode:
                raise RunError(
                    f"{type(module).__name__} is in {'training' if module.training else 'evaluation'} mode and was not when the model was captured",
                    fix="wrap the model in the modes that it is trained in",
                )

    def run_forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The forward kernels. What is left are the results and what the backward pass reads, by name."""
        values = self.values_of(inputs)
        with without_autocast(self.device):
            self.program.forward(values, self._settle)
        self.flush()  # parameters that it did not read, before anything else is sent
        return values

    def values_of(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a step begins with, by name."""
        values = {item.value.name: inputs[item.path] for item in self.program.inputs if item.role is Role.INPUT}
        return values | {name: held[key].detach() for name, held, key in self._state}

    def keep_buffers(self, values: Mapping[str, Tensor]) -> None:
        """The new values of buffers, running means for example, are the model's."""
        held = {name: where[key] for name, where, key in self._state}
        for item in self.program.inputs:
            for path, new in self._new_buffers:
                if item.role is Role.BUFFER and item.path == path:
                    held[item.value.name].copy_(values[new])
        if self.broadcast_buffers and self._synchronise and (buffers := tuple(self.module.buffers())):
            self._sent_buffers = Together(buffers, self.group)

    def _take_buffers(self) -> None:
        if self._are_loaded:
            self._sent_buffers = Together(tuple(self.module.buffers()), self.group)
        if self._sent_buffers is not None:
            self._sent_buffers.arrive()
        self._sent_buffers, self._are_loaded = None, False

    def run_backward(self, values: dict[str, Tensor], upstream: Tensor) -> None:
        self.flush()  # another backward pass may have come since the forward pass
        if self._step is not None:
            self._step.forget()
        values[self.program.tangent] = upstream
        gradients = self.gradients
        with without_autocast(self.device):
            if self._synchronise:
                gradients.begin(values)
                self.program.backward(values, gradients.take, gradients.take_product, gradients.take_rows)
                gradients.end()
            else:
                self.program.backward(values, gradients.keep, gradients.keep_product, gradients.keep_rows)
        values.clear()
        for number in [number for number in gradients.owed if number not in self._late]:
            gradients.arrive(number)

    # ---- updates -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        """`optimizer.step()` was called."""
        assert self._step is not None
        if self._step.has_hooks:
            self.flush()  # they run once a step, when all of it is done
        self._step.ask(self.gradients.ask())

    def _before_zero(self) -> None:
        """Gradients on their way that no step was asked for would come back after they were set to zero."""
        if self._step is not None and not self._step.is_asked:
            self.flush()

    def _settle(self, number: int) -> None:
        """Wait for a bucket that is on its way, and update what it completes if the step was asked for; of weights that
        are read in blocks, the rows that it brings.
        """
        gradients, step = self.gradients, self._step
        complete: list[nn.Parameter] = []
        coming = [number]
        while coming:
            if (bucket := coming.pop()) not in gradients.owed:
                continue
            if step is None or not step.is_asked:
                gradients.arrive(bucket)
                continue
            paths = gradients.in_blocks(bucket)
            in_rows = [path for path in paths if gradients.is_wanted(path) and step.has_state(self.trained[path])]
            complete += gradients.arrive(bucket, in_rows)
            for path in in_rows:
                for rows, gradient, is_last in gradients.rows(bucket, path):
                    step.update_rows(self.trained[path], rows, gradient, is_last=is_last)
            # the first update of a parameter is that of the whole
            coming += [block.bucket for path in paths if path not in in_rows for block in gradients.blocks[path]]
        if complete:
            assert step is not None
            step.update(complete)

    def flush(self) -> None:
        """Wait for every gradient that is on its way, and do the updates that were asked for.

        In the order of the forward pass: shares are gathered as they are waited for, and another rank may be in that
        pass already.
        """
        if not (owed := self.gradients.owed):
            return
        # what the optimizer makes must outlive an evaluation in inference mode
        with torch.inference_mode(False), torch.no_grad():
            for number in [*self.program.settled, *owed]:
                self._settle(number)

    def _complete(self) -> None:
        """Before a state is loaded, on all ranks."""
        self.flush()
        if self._sent_buffers is not None:
            self._take_buffers()
            self._are_loaded = True

    def synchronize(self) -> None:
        """Wait for every gradient of the last backward pass:

        `parameter.grad` is then as after DDP's backward. What reads gradients, such as `GradScaler.unscale_`, does so
        by itself.
        """
        self.flush()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """As torch.nn.utils.clip_grad_norm_, on the mean gradients; waits for all of them."""
        self.synchronize()
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add to the gradients and communicate nothing; the first one after it sends the sum."""
        self.flush()
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    # ---- as a module -------------------------------------------------------------------------------------------------

    @property
    def source(self) -> str:
        """What runs in a step, as Python."""
        return self.program.source

    def train(self, mode: bool = True) -> DataParallel:
        if not mode:
            self.flush()
        super().train(mode)
        return self

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Complete: after `optimizer.step()` they are as under DDP."""
        if self._step is not None and self._step.is_asked:
            self.flush()
        return super().named_parameters(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._before_zero()
        self.module.zero_grad(set_to_none)

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
    """The results with a backward pass that is ours."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, owner: DataParallel, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        values = owner.run_forward(inputs)
        owner.keep_buffers(values)
        ctx.owner, ctx.values = owner, values
        results = tuple(values[output.name].clone() for output in owner._results)
        ctx.mark_non_differentiable(*results)
        return (values[owner.program.loss].clone(), *results)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Any, ...]:
        if ctx.values is None:
            raise RunError("backward was called twice on one loss", fix="run the model again")
        values, ctx.values = ctx.values, None
        with torch.no_grad():
            ctx.owner.run_backward(values, upstream)
        return torch.zeros(()), None, None


class _Untrained(torch.autograd.Function):
    """A result that requires a gradient as it does in the model, and whose gradient leads nowhere.

    A node of its own: who keeps the result keeps nothing of the step. It comes inside a tuple, so that the tensor
    itself is returned, not a view.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, held: tuple[Tensor], path: str) -> Tensor:
        ctx.path = path
        return held[0]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        raise RunError(
            f"the backward pass came to the result {ctx.path!r}, and only the loss that the model returns trains here",
            where="a term that is computed from it outside the model",
            fix="compute that term inside the model's forward and add it to the loss there, or take the result without "
            "its gradient: .detach()",
        )


def device_of(model: nn.Module) -> torch.device:
    parameter = next(iter(model.parameters()), None)
    return torch.device("cpu") if parameter is None else parameter.device
