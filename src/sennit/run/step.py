"""One training step inside autograd: `loss.backward()` as people write it.

The program computes the gradients together with the loss, all micro-batches and both phases interleaved. So `forward`
runs all of it and keeps the gradients, and `backward` hands them over, scaled by the upstream gradient of the loss.
That is exact: gradients are linear in it. Autograd then adds them to `.grad`, as always, so accumulation over several
calls, hooks and `zero_grad` need nothing of ours.

The tangents that the program was run with need not be 1: with a loss scaler they are its scale, so that gradients in
half precision do not underflow on their way; the upstream gradient is then divided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from sennit.errors import RunError

__all__ = ["StepCall", "run_step"]


class StepCall:
    """One call: how to run it, and its gradients until they are fetched."""

    def __init__(
        self,
        run: Callable[[], Mapping[str, Tensor]],
        losses: Sequence[str],
        results: Sequence[str],
        gradients: Callable[[Mapping[str, Tensor]], list[DTensor]],
        tangents: Mapping[str, float],
    ) -> None:
        self.run, self.losses, self.results, self.gradients = run, tuple(losses), tuple(results), gradients
        self.tangents = tangents
        self.stash: list[DTensor] | None = None


def run_step(call: StepCall, anchor: Tensor, parameters: Sequence[Tensor]) -> dict[str, Tensor]:
    """Losses and results by key; calling `backward` on the losses gives `parameters` their gradients.

    `anchor` makes the losses require gradients on a rank without parameters too.
    """
    outputs: tuple[Tensor, ...] = _Step.apply(call, anchor, *parameters)  # type: ignore[no-untyped-call]
    return dict(zip((*call.losses, *call.results), outputs, strict=True))


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: StepCall, anchor: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        outputs = call.run()
        call.stash = call.gradients(outputs)
        ctx.call = call
        ctx.set_materialize_grads(False)
        results = tuple(outputs[key] for key in call.results)
        ctx.mark_non_differentiable(*results)
        # autograd wants tensors of its own: two losses, or a loss and a buffer, may be one tensor
        return (*(outputs[key].clone() for key in call.losses), *results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call: StepCall = ctx.call
        gradients, call.stash = call.stash, None
        if gradients is None:
            raise RunError(
                "backward was called a second time on one forward call",
                fix="call the model again, or add the losses before one backward; retain_graph keeps nothing here: "
                "the gradients were computed with the loss and are handed over once",
            )
        _scale(gradients, _factor(call, upstream[: len(call.losses)]))
        return (None, None, *gradients)


def _factor(call: StepCall, upstream: Sequence[Tensor | None]) -> Tensor:
    """What the gradients of the run are multiplied by: the same for every loss that was differentiated."""
    factors = [
        None if up is None or call.tangents[key] == 0 else up / call.tangents[key]
        for key, up in zip(call.losses, upstream, strict=True)
    ]
    given = [factor for factor in factors if factor is not None]
    differentiated = [key for key in call.losses if call.tangents[key] != 0]
    if len(given) < len(differentiated) or any(bool(factor != given[0]) for factor in given[1:]):
        shown = ", ".join(
            f"{key}: {0.0 if up is None else float(up):g}" for key, up in zip(call.losses, upstream, strict=True)
        )
        raise RunError(
            f"the losses have different upstream gradients ({shown}), and the step computed the gradient of their sum",
            fix="combine the losses inside the model, or name those to differentiate: parallelize(..., losses=[...])",
        )
    return given[0]


def _scale(gradients: list[DTensor], factor: Tensor) -> None:
    # looking at a value waits for a GPU, so only the CPU skips a multiplication by one
    if gradients and not (factor.device.type == "cpu" and float(factor) == 1.0):
        with torch.no_grad():
            for gradient in gradients:
                local = gradient.to_local()
                local.mul_(factor.to(local.dtype))
