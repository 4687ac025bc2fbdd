"""Serving DTensor's own redistributions: any DTensor program, unchanged, on sennit's plans.

    with sennit.serve_dtensor() as log:
        loss = model(x).sum()          # explicit and implicit redistributions, forward
        loss.backward()                # and backward
    log.served, log.left

Inside the context, the function through which DTensor redistributes (`private_torch.py` names it and its callers) is
replaced by one that plans with sennit and runs on its executor. What sennit has no layout for (a masked Partial, an
uneven `_StridedShard`), and what is traced by a compiler, goes to torch's own function as before; `log.left` counts
these with the reason. That choice depends on the specs alone, so all ranks make the same.

The replacement is of module attributes: it holds for all threads of the process while the context is open, which
backward passes on autograd's own threads need. Contexts nest, and are to be closed in the reverse order of opening;
open and close them while no other thread redistributes. Communication is by isend and irecv or process groups of
`torch.distributed`, not by functional collectives, so `CommDebugMode` does not count it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sennit.errors import LayoutError
from sennit.reshard.dtensor_torch import lower_specs
from sennit.reshard.execute_torch import Executor, current_executor
from sennit.reshard.private_torch import REDISTRIBUTE, DTensorSpec, dtensor_hooks, is_plain, waited

__all__ = ["ServedLog", "serve_dtensor"]


@dataclass(slots=True)
class ServedLog:
    """How many redistributions sennit served, and how many it left to torch, by reason."""

    served: int = 0
    left: Counter[str] = field(default_factory=Counter)


@contextmanager
def serve_dtensor(*, budget: int | None = None, executor: Executor | None = None) -> Iterator[ServedLog]:
    """Serve every redistribution of DTensors by sennit while the context is open."""
    executor = current_executor() if executor is None else executor
    log = ServedLog()
    modules = dtensor_hooks()
    before = [getattr(module, REDISTRIBUTE) for module in modules]
    serving = _serving(executor, budget, log, before[0])
    for module in modules:
        setattr(module, REDISTRIBUTE, serving)
    try:
        yield log
    finally:
        for module, function in zip(modules, before, strict=True):
            setattr(module, REDISTRIBUTE, function)


def _serving(
    executor: Executor, budget: int | None, log: ServedLog, stock: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    refused: dict[tuple[DTensorSpec, DTensorSpec], str] = {}

    def redistribute_local_tensor(
        local_tensor: Tensor, current_spec: DTensorSpec, target_spec: DTensorSpec, **options: Any
    ) -> Tensor:
        def leave(reason: str) -> Tensor:
            log.left[reason] += 1
            return stock(local_tensor, current_spec, target_spec, **options)

        local = waited(local_tensor)
        if not is_plain(local):
            return leave(f"the local tensor is a {type(local).__name__}, or is being traced")
        key = (current_spec, target_spec)
        if key in refused:
            return leave(refused[key])
        try:
            served = lower_specs(executor, current_spec, target_spec, budget)
        except LayoutError as error:
            refused[key] = error.what
            return leave(error.what)
        log.served += 1
        if executor.rank not in served.lowered.participants:
            return local
        result = executor.start_lowered(served.lowered, local).wait()
        return result if served.scale == 1 else result * served.scale

    return redistribute_local_tensor
