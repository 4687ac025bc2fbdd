"""`sennit.DataParallel` against DDP on a rate-limited network between network namespaces, side by side in one run.

    python benchmarks/fuse/ddp.py [--ranks 2] [--rate 1gbit] [--models gpt conv] [--rounds 4] [--steps 8] [--json out.json]

Each rank is a host of its own with one core (`sennit.testing.network`); run it on a quiet machine with a core a rank. Variants: DDP at several bucket sizes, DDP without overlap (gradients
reduced after the backward pass), ours with waits inside the step, ours with waits across steps. Every round runs all of them in turn, some steps each; the first two steps of a turn
are left out. Printed: median and least milliseconds a step, the bounds by measured compute and communication, predicted times, and ours over the best DDP. Needs root, ip and tc.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

CAPS = (1, 5, 25, 100)  # MB


def build(name: str, rank: int) -> tuple[Any, tuple[Any, ...]]:
    """A model that returns its loss, and this rank's batch."""
    import torch

    torch.manual_seed(0)
    if name == "gpt":
        from sennit.demo.gpt import GPT, GPTConfig, random_batch

        config = GPTConfig(vocabulary=4096, context=64, width=256, heads=8, layers=6, tie_embeddings=False)
        return GPT(config), random_batch(config, 8, seed=rank)
    if name == "conv":
        model = convolutional()
        generator = torch.Generator().manual_seed(rank)
        return model, (
            torch.randn(16, 3, 32, 32, generator=generator),
            torch.randint(100, (16,), generator=generator),
        )
    raise SystemExit(f"there is no model {name!r}: gpt, conv")


def convolutional() -> Any:
    import torch.nn.functional as F  # noqa: N812
    from torch import Tensor, nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = (3, 64, 128, 256, 256)
            self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(widths))
            self.hidden, self.head = nn.Linear(1024, 4096), nn.Linear(4096, 100)

        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            x = images
            for layer in self.layers:
                x = F.relu(layer(x))
            return F.cross_entropy(self.head(F.relu(self.hidden(x.flatten(1)))), labels)

    return Net()


def rank_main(arguments: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.parallel import DistributedDataParallel

    from sennit.fuse.channel_torch import serial_group
    from sennit.fuse.data_parallel_torch import DataParallel

    rank = int(os.environ["RANK"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % len(os.sched_getaffinity(0))]})
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    with sdpa_kernel(SDPBackend.MATH):  # the form that is captured
        for name in arguments.models:
            variants: dict[str, tuple[Any, Any]] = {}
            group = serial_group()
            for cap in CAPS:
                model, batch = build(name, rank)
                variants[f"DDP {cap} MB"] = (DistributedDataParallel(model, bucket_cap_mb=cap), None)
            model, batch = build(name, rank)
            variants["no overlap"] = (model, "after")
            for title, across in (("ours, in the step", False), ("ours, across steps", True)):
                model, batch = build(name, rank)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
                variants[title] = (
                    DataParallel(model, optimizer, sample=batch, across_steps=across, group=group),
                    optimizer,
                )
            results[name] = measure(variants, batch, arguments)
    if rank == 0:
        Path(os.environ["SENNIT_BENCH_OUT"]).write_text(json.dumps(results))
    dist.destroy_process_group()


def measure(variants: dict[str, tuple[Any, Any]], batch: tuple[Any, ...], arguments: argparse.Namespace) -> Any:
    import torch
    import torch.distributed as dist

    times: dict[str, list[float]] = {title: [] for title in variants}
    optimizers = {
        title: optimizer
        if isinstance(optimizer, torch.optim.Optimizer)
        else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for title, (model, optimizer) in variants.items()
    }
    for turn in range(arguments.rounds):
        order = list(variants)
        order = order[turn % len(order) :] + order[: turn % len(order)]
        for title in order:
            model, kind = variants[title]
            dist.barrier()
            for step in range(arguments.steps):
                start = time.perf_counter()
                model(*batch).backward()
                if kind == "after":
                    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                    dist.all_reduce(flat.div_(dist.get_world_size()))
                    at = 0
                    for p in model.parameters():
                        p.grad.copy_(flat[at : at + p.numel()].view_as(p))
                        at += p.numel()
                optimizers[title].step()
                optimizers[title].zero_grad()
                if step >= 2:
                    times[title].append(time.perf_counter() - start)
            if hasattr(model, "flush"):
                model.flush()
    return times


def report(results: dict[str, Any]) -> None:
    for name, times in results.items():
        model, _ = build(name, 0)
        print(f"\n{name}: {sum(p.numel() for p in model.parameters()) * 4 / 1e6:.0f} MB of gradients")
        medians = {title: statistics.median(values) for title, values in times.items()}
        best = min(value for title, value in medians.items() if title.startswith("DDP"))
        for title, value in sorted(medians.items(), key=lambda item: item[1]):
            print(
                f"  {title:20s} {1e3 * value:8.1f} ms median {1e3 * min(times[title]):8.1f} least {best / value:6.2f} x the best DDP"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--models", nargs="*", default=["gpt", "conv"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        rank_main(arguments)
        return
    import tempfile

    from sennit.testing import network

    with tempfile.TemporaryDirectory() as folder, network(hosts=arguments.ranks, rate=arguments.rate) as net:
        out = Path(folder) / "out.json"
        variables = {"WORLD_SIZE": str(arguments.ranks), "MASTER_PORT": "29511", "OMP_NUM_THREADS": "1"}
        ranks = [
            net.run(
                host,
                [sys.executable, *sys.argv],
                env={**variables, "RANK": str(host.index), "SENNIT_BENCH_OUT": str(out)},
            )
            for host in net.hosts
        ]
        if any(process.wait() for process in ranks):
            raise SystemExit("a rank failed")
        results = json.loads(out.read_text())
    report(results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
