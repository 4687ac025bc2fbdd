"""A training step of a GPT on one GPU under `sennit.DataParallel` and under DDP, with NCCL.

    python benchmarks/fuse/gpu_data_parallel.py --json benchmarks/fuse/data/gpu_data_parallel.json

One rank has no one to wait for: what is compared is the step itself, with gradients through buckets and NCCL's kernels,
and what driving it costs the host. Attention is torch's own choice of kernel under DDP, and the kernel of
`kernels/attention_kernels.py` under ours. Variants take turns; a step is the time between events at the ends of two
steps, the median of all rounds. Ranks that share a GPU (`--ranks 2`, NCCL 2.30) take turns on it: that is good for bits
and says little of speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sennit.cluster.ranks_torch import NcclRanks

SIZES = {"small": (6, 512, 8), "gpt2": (12, 768, 8)}  # layers, width, batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compilations", type=int, default=0, help="groups that ours may compile, at most")
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    from gpu_data_parallel import measure  # importable by the ranks

    found: dict[str, Any] = {}
    for name in arguments.models:
        with NcclRanks(arguments.ranks, timeout=arguments.timeout) as ranks:
            answers = ranks.call(measure, name, arguments.rounds, arguments.steps, arguments.compilations)
        found[name] = answers[0]
        report(name, answers[0])
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))


def report(name: str, found: dict[str, Any]) -> None:
    print(f"\n{name} on {found['device']}, torch {found['torch']}, {found['ranks']} rank(s)")
    steps = {title: statistics.median(times) for title, times in found["times"].items()}
    best = min(seconds for title, seconds in steps.items() if title.startswith("DDP") and "compiled" not in title)
    for title, seconds in steps.items():
        print(f"  {title:34} {1e3 * seconds:8.2f} ms   {best / seconds:.2f} of the best DDP's speed")
    print(f"  losses after the same steps: {found['losses']}")


def measure(rank: int, name: str, rounds: int, steps: int, compilations: int) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from sennit.demo.gpt import GPT, GPTConfig, random_batch
    from sennit.fuse.data_parallel_torch import DataParallel
    from sennit.fuse.moments_torch import Moments
    from sennit.fuse.tune_torch import Tuning

    layers, width, size = SIZES[name]
    config = GPTConfig(vocabulary=50304, context=512, width=width, heads=width // 64, layers=layers)
    batch = tuple(item.cuda() for item in random_batch(config, size, seed=rank))
    device = torch.device("cuda", torch.cuda.current_device())

    def made(wrap: Callable[[Any, torch.optim.Optimizer], Any]) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = GPT(config).to("cuda", torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        return wrap(model, optimizer), optimizer

    def ddp(cap: int, *, compiled: bool = False) -> Callable[[Any, torch.optim.Optimizer], Any]:
        def wrap(model: Any, _: torch.optim.Optimizer) -> Any:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
            return torch.compile(wrapped) if compiled else wrapped

        return wrap

    def ours(*, compiled: bool = False) -> Callable[[Any, torch.optim.Optimizer], Any]:
        tuning = Tuning(turns=2, compilations=compilations)

        def wrap(model: Any, optimizer: torch.optim.Optimizer) -> Any:
            return DataParallel(model, optimizer, sample=batch, compile_kernels=compiled, tuning=tuning)

        return wrap

    kinds = {f"DDP, {cap} MB": ddp(cap) for cap in (5, 25, 100)}
    kinds |= {"DDP, compiled": ddp(25, compiled=True), "ours": ours()}
    if compilations:
        kinds["ours, compiled groups"] = ours(compiled=True)
    variants = {title: made(wrap) for title, wrap in kinds.items()}
    times: dict[str, list[float]] = {title: [] for title in variants}
    losses: dict[str, float] = {}
    for turn in range(rounds + 1):
        for title, (model, optimizer) in variants.items():
            dist.barrier()
            moments = Moments(device)
            for _ in range(steps + 1):
                loss = model(*batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                moments.note()
            spent = moments.seconds()
            times[title] += spent if turn else []  # compiles, and takes memory for the first time
            losses[title] = float(loss.detach())
    chosen = variants["ours"][0].strategy
    return {
        "device": torch.cuda.get_device_name(),
        "torch": str(torch.__version__),
        "ranks": dist.get_world_size(),
        "times": times,
        "losses": losses,
        "strategy": f"{chosen.name}: {len(chosen.groups)} groups, {len(chosen.buckets)} buckets",
    }


if __name__ == "__main__":
    main()
