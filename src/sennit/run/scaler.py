"""A gradient scaler whose ranks agree: a gradient that overflowed on one stage skips the step on all of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, with its check for infinities reduced over all ranks.

    DTensor reduces it over a stage's mesh; the ranks of other stages would go on with their step. Give it to
    `parallelize(..., scaler=)` too, so that the program is run with the scale and gradients do not underflow on their
    way.
    """

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        for overflow in found.values():
            dist.all_reduce(overflow, dist.ReduceOp.MAX)
        return found
