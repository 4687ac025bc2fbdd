"""Every plan of the zoo on four gloo ranks: what a step sends, what it holds, and how far its loss is from the serial
one.

    python benchmarks/plan/zoo.py                  # a GPT of four layers
    python benchmarks/plan/zoo.py --model swin     # co-shard on a Swin transformer (needs transformers)

Memory is that of rank 0: what stands between steps (parameters, AdamW's state), and what a step makes at its peak, as
the program predicts and as the storages that were live show. `sent` is what the collectives of a step send from a
device, by ring algorithms. Times are not compared: four ranks on a few cores say nothing about them.
"""

from __future__ import annotations

import argparse
import functools
import platform
from collections import Counter

import torch

import sennit
from sennit.cluster.ranks_torch import GlooRanks
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Phase
from sennit.ir.program import Collective, Program
from sennit.ir.timeline import MemoryKind
from sennit.plan import recompute, zoo

CONFIG = GPTConfig(vocabulary=256, context=128, width=128, heads=8, layers=4)
BATCH = 16
PRELOAD = ("sennit.run.parallelize", "torch.export", "torch._dynamo", "torch._functorch.aot_autograd")


def with_stages(graph, mesh, level):
    layers = tuple(f"blocks.{number}" for number in range(CONFIG.layers))
    return zoo.sharded(zoo.pipeline(graph, mesh, layers=layers), level=level)


def with_tensors(graph, mesh, level):
    return zoo.sharded(zoo.tensor_parallel(graph, mesh, sequence=True), level=level)


def layers_again(graph, mesh):
    plan = zoo.data_parallel(graph, mesh)
    for number in range(CONFIG.layers):
        layer = plan.graph.select(f"blocks.{number}|blocks.{number}.*", phase=Phase.FORWARD)
        plan = recompute(plan, layer)
    return plan


GPT_PLANS = {
    "data parallel": (zoo.data_parallel, "dp=4"),
    "data parallel, 4 micro-batches": (zoo.data_parallel, "dp=4;mb=4"),
    "ZeRO-1": (functools.partial(zoo.zero, level=1), "dp=4;mb=4"),
    "ZeRO-2": (functools.partial(zoo.zero, level=2), "dp=4;mb=4"),
    "ZeRO-3": (functools.partial(zoo.zero, level=3), "dp=4;mb=4"),
    "tensor parallel": (zoo.tensor_parallel, "tp=4"),
    "tensor and sequence parallel": (functools.partial(zoo.tensor_parallel, sequence=True), "tp=4"),
    "context parallel": (zoo.context_parallel, "cp=4"),
    "data parallel, layers computed again": (layers_again, "dp=4"),
    "co-shard in 2": (functools.partial(zoo.co_shard, pieces=2), "dp=4"),
    "co-shard in 4": (functools.partial(zoo.co_shard, pieces=4), "dp=4"),
    "co-shard in 8": (functools.partial(zoo.co_shard, pieces=8), "dp=4"),
    "co-shard in 4, tensor parallel": (functools.partial(zoo.co_shard, pieces=4), "dp=2,tp=2"),
    "pipeline, ZeRO-2": (functools.partial(with_stages, level=2), "pp=2,dp=2;mb=4"),
    "tensor and sequence parallel, ZeRO-3": (functools.partial(with_tensors, level=3), "dp=2,tp=2"),
}
SWIN_PLANS = {
    "data parallel": (zoo.data_parallel, "dp=4"),
    "co-shard in 2": (functools.partial(zoo.co_shard, pieces=2), "dp=4"),
    "co-shard in 4": (functools.partial(zoo.co_shard, pieces=4), "dp=4"),
}


def sample(model: str):
    """A model, and the arguments of a call."""
    torch.manual_seed(0)
    if model == "gpt":
        return GPT(CONFIG), random_batch(CONFIG, BATCH), {}
    from sennit.testing.families_torch import transformers_module

    transformers = transformers_module()
    config = transformers.SwinConfig(
        depths=[2, 2], embed_dim=48, num_heads=[4, 8], window_size=8, image_size=128, patch_size=4, num_labels=10
    )
    kwargs = {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(10, (8,))}
    return transformers.SwinForImageClassification(config).train(), (), kwargs


def loss_of(result) -> torch.Tensor:
    return result if isinstance(result, torch.Tensor) else result["loss"]


def one(rank: int, model: str, name: str) -> dict:
    planner, mesh = (GPT_PLANS if model == "gpt" else SWIN_PLANS)[name]
    module, args, kwargs = sample(model)
    given = sennit.Sample(args, kwargs) if kwargs else args
    parallel = sennit.parallelize(module, given, plan=planner, mesh=mesh)
    optimizer = torch.optim.AdamW(parallel.parameters())
    with parallel.measuring_memory():
        loss = loss_of(parallel(*args, **kwargs))
        loss.backward()
    report = parallel.memory_report(optimizer)
    kinds = (MemoryKind.PARAMETERS, MemoryKind.OPTIMIZER)
    return {
        "mesh": mesh,
        "loss": loss.item(),
        "sent": sent(parallel.program, rank),
        "count": counted(parallel.program, rank),
        "standing": sum(report.at_peak[kind] or 0 for kind in kinds),
        "predicted": report.predicted_step,
        "measured": report.measured_step,
    }


def sent(program: Program, rank: int) -> float:
    total = 0.0
    for step in program.lane_of(rank).steps:
        if isinstance(step, Collective):
            size = step.result.layout.mesh.size(step.axes[0])
            share = step.result.type.bytes * (size - 1) / size
            total += {"all_reduce": 2.0, "all_to_all": 1 / size}.get(step.kind.value, 1.0) * share
    return total


def counted(program: Program, rank: int) -> Counter[str]:
    return Counter(step.kind.value for step in program.lane_of(rank).steps if isinstance(step, Collective))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["gpt", "swin"], default="gpt")
    parser.add_argument("--plans", nargs="+", help="only these")
    options = parser.parse_args()
    torch.set_num_threads(1)
    module, args, kwargs = sample(options.model)
    if options.model == "gpt":
        serial = loss_of(module(*args, **kwargs)).item()
    print(f"torch {torch.__version__}, {platform.machine()}, float32, four gloo ranks")
    print(
        "| plan | mesh | all-reduces | gathers | scatters | sent, MB | standing, MB | step, predicted MB | measured MB | loss |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    with GlooRanks(4, timeout=600.0, preload=PRELOAD) as ranks:
        for name in options.plans or (GPT_PLANS if options.model == "gpt" else SWIN_PLANS):
            row = ranks.call(one, options.model, name)[0]
            count = row["count"]
            off = f"{abs(row['loss'] - serial) / serial:.0e} off" if options.model == "gpt" else f"{row['loss']:.6f}"
            megabytes = " | ".join(f"{row[key] / 1e6:.2f}" for key in ("sent", "standing", "predicted", "measured"))
            print(
                f"| {name} | `{row['mesh']}` | {count['all_reduce']} | {count['all_gather']} | {count['reduce_scatter']} | {megabytes} | {off} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
