"""What the order of a step's operators is worth, by the clock: as it was captured, with gradients first, with products
in blocks of rows, and with packed rows of tables.

    python benchmarks/fuse/early_gradients.py [--models gpt conv bert lstm] [--ratio 0.7] [--per-byte 8.38e-9] [--latency 2e-4]

Operators are measured here, one by one, on one thread, by processor time; the channel is the one of the options
(defaults: two gloo ranks at 1 Gbit/s). Then each order is searched for buckets, in the step and across steps. Batches
are such that computing takes `--ratio` of communicating. Printed, in milliseconds: the time from the last first use of
a parameter to the first gradient, in which nothing can travel; the structural bound; the best step found. All of it is
simulated but the operators.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

SLOWER = 1.2  # kernels beside other work; a step that is only just in time suffers most


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["gpt", "conv", "bert", "lstm"])
    parser.add_argument("--ratio", type=float, default=0.7)
    parser.add_argument("--per-byte", type=float, default=8.38e-9)
    parser.add_argument("--latency", type=float, default=2e-4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        study(name, arguments)


def study(name: str, arguments: argparse.Namespace) -> None:
    from sennit.fuse.gradient_order import gradients_first
    from sennit.fuse.looked_up import looked_up, rows_apart
    from sennit.fuse.row_blocks import row_products
    from sennit.fuse.row_uses import row_uses

    small, large = 2, 8
    (low, _, bytes_of), (high, _, _) = measured(name, small), measured(name, large)
    wanted = arguments.ratio * arguments.per_byte * bytes_of
    batch = max(1, round(small + (wanted - low) * (large - small) / max(high - low, 1e-9)))
    compute, (graph, cost), _ = measured(name, batch)
    print(
        f"{name}, batch {batch}: computing {1e3 * compute:.0f} ms, communicating {1e3 * arguments.per_byte * bytes_of:.0f} ms"
    )
    early = gradients_first(graph)
    apart = gradients_first(rows_apart(graph, 2))
    orders: dict[str, tuple[Any, Any, Any, Any]] = {
        "as captured": (graph, {}, {}, {}),
        "gradients first": (early, {}, {}, {}),
        "and in blocks of rows": (early, row_products(early), {}, {}),
        "and rows of tables": (apart, row_products(apart), looked_up(apart, 2), {}),
        "and weights in blocks": (apart, row_products(apart), looked_up(apart, 2), row_uses(apart)),
    }
    for title, (ordered, in_rows, packed, uses) in orders.items():
        gap, bound, in_step, across, slower = simulated(ordered, cost, in_rows, packed, uses, arguments)
        print(
            f"  {title:22s} nothing travels for {1e3 * gap:5.1f}, structural bound {1e3 * bound:6.1f}, best in the step {1e3 * in_step:6.1f}, across steps {1e3 * across:6.1f} ({1e3 * slower:.1f} with kernels {SLOWER} times as long)",
            flush=True,
        )


def measured(name: str, batch: int) -> tuple[float, tuple[Any, Any], int]:
    """Seconds of all operators, the graph with each one's, and the bytes of all gradients."""
    import torch
    from network_models import build

    from sennit.capture.trace import capture_call
    from sennit.fuse.draws_torch import with_torch_draws
    from sennit.fuse.profile_torch import measure_operators

    model, rows = build(name, 0, batch)
    captured = capture_call(model, rows, {})
    graph = with_torch_draws(captured.graph, torch.device("cpu"))
    with torch.no_grad():
        cost = measure_operators(graph, model, {**captured.signature.flatten(rows), **dict(captured.constants)})
    return sum(cost.seconds.values()), (graph, cost), sum(p.nbytes for p in model.parameters())


def simulated(
    graph: Any, cost: Any, in_rows: Any, packed: Any, uses: Any, arguments: argparse.Namespace
) -> tuple[float, float, float, float, float]:
    from sennit.fuse.bounds import structural
    from sennit.fuse.bucket_search import judged
    from sennit.fuse.model import Channel, Grouping, KernelOrder, StepModel
    from sennit.fuse.tune_torch import candidates

    model = StepModel(graph, cost, Channel(arguments.latency, arguments.per_byte), in_rows, packed, uses)
    order = model.order(Grouping())
    assert order is not None
    seconds = model.kernel_seconds(order, Grouping())
    kernels = KernelOrder(model, order, seconds)
    last, first = max(kernels.use.values()), min(kernels.maker.values())
    best = {
        across: min(candidates(model, Grouping(), across_steps=across), key=lambda trial: trial.simulated)
        for across in (False, True)
    }
    slower = judged(kernels, best[True].strategy.buckets, SLOWER)
    return sum(seconds[last : first + 1]), structural(kernels), best[False].simulated, best[True].simulated, slower


if __name__ == "__main__":
    main()
