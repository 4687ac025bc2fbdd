"""A step whose kernels sleep for the time that they were measured to take, while its buckets travel for real.

On one core the network's threads and the model's take time from each other, and on a machine that does other work so
does everything else. With sleeping kernels what is left is what the strategy decides: the network, the order of the
buckets, the waits, and the driver. Times of such steps say "slept"; they are not times of training. A thread that
sleeps has to wake in time: where it is permitted, it is a real-time one (`stand_apart`), which takes nothing of note
from others.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Event = tuple[float, Any]  # sleep so long, then pass this on


def let_kernels_sleep(owner: Any, seconds: Mapping[str, float]) -> None:
    """From now on, until `owner.use` is called again, forward and backward kernels of a `DataParallel` sleep.

    Gradients are zeros.
    """
    import torch

    from sennit.fuse.program_torch import first_needs
    from sennit.ir.graph import OutputKind, Phase
    from sennit.ir.strategy_check import kernels

    found = kernels(owner.strategy, owner.graph)
    count = [kernel.ops[0].phase for kernel in found].count(Phase.FORWARD)
    needs = first_needs(found[:count], owner.graph, owner.strategy)
    paths: dict[str, list[str]] = {}
    for output in owner.graph.outputs:
        if output.kind is OutputKind.GRADIENT:
            paths.setdefault(output.name, []).append(output.path)
    gradients = {path: torch.zeros_like(parameter) for path, parameter in owner.sent.items()}

    def events(part: Sequence[Any], before: Mapping[int, Sequence[int]]) -> tuple[list[Event], float]:
        made: list[Event] = []
        spent = 0.0
        for place, kernel in enumerate(part):
            for bucket in before.get(place, ()):
                made.append((spent, bucket))
                spent = 0.0
            spent += sum(seconds[op.name] for op in kernel.body)
            for path in [path for op in kernel.ops for value in op.results for path in paths.get(value.name, ())]:
                made.append((spent, path))
                spent = 0.0
        return made, spent

    forward, backward = events(found[:count], needs), events(found[count:], {})
    owner.program.forward = lambda _, settle: _run(*forward, settle)
    owner.program.backward = lambda _, gradient, product, rows: _run(
        *backward, lambda path: gradient(path, gradients[path])
    )


def stand_apart() -> None:
    """Let this thread wake on time on a machine that does other work."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def shortened(owner: Any, inputs: Any, seconds: Mapping[str, float]) -> dict[str, float]:
    """The times of the kernels less what the driver takes beside them (copies of gradients, Python): a step that sleeps
    them and drives for real takes as long as one that computes.
    """
    import torch

    from sennit.fuse.tune_torch import drop_gradients

    let_kernels_sleep(owner, dict.fromkeys(seconds, 0.0))
    spent: list[float] = []
    with owner.no_sync(), torch.no_grad():
        for _ in range(5):
            start = time.perf_counter()
            owner.run_backward(owner.run_forward(inputs), torch.ones(()))
            spent.append(time.perf_counter() - start)
            drop_gradients(owner)
    owner.use(owner.strategy)
    whole = sum(seconds.values())
    return {name: length * max(0.0, 1.0 - min(spent) / whole) for name, length in seconds.items()}


def _run(events: Sequence[Event], rest: float, tell: Callable[[Any], None]) -> None:
    for spent, what in events:
        _sleep(spent)
        tell(what)
    _sleep(rest)


def _sleep(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        time.sleep(max(left - 1e-4, 0.0))  # a sleep ends late; the rest is spent looking at the clock
