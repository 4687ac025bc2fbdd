"""Train a small GPT on four CPU ranks. The model and the loop are those of one device; one line splits them.

torchrun --nproc-per-node 4 examples/plan_train_gpt.py                 # two pipeline stages, each data parallel
torchrun --nproc-per-node 4 examples/plan_train_gpt.py tensor          # tensor parallel x data parallel
torchrun --nproc-per-node 4 examples/plan_train_gpt.py data
python examples/plan_train_gpt.py single                               # one device, plain torch: the same losses
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist

import sennit
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.plan import zoo

CONFIG = GPTConfig(vocabulary=256, context=32, width=64, heads=4, layers=4)
PLANS = {
    "data": (zoo.data_parallel, "dp=4"),
    "tensor": (
        functools.partial(zoo.tensor_parallel, qkv="*.qkv", column="*.up", row="*.proj|*.down"),
        "dp=2,tp=2",
    ),
    "pipeline": (
        functools.partial(zoo.pipeline, layers=tuple(f"blocks.{i}" for i in range(CONFIG.layers))),
        "pp=2,dp=2;mb=4",
    ),
}


def main(name: str, steps: int = 10) -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(CONFIG)
    if name != "single":
        plan, mesh = PLANS[name]
        model = sennit.parallelize(model, random_batch(CONFIG, 16), plan=plan, mesh=mesh)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        tokens, _ = random_batch(CONFIG, 16, seed=step % 2)
        loss = model(tokens, tokens.roll(-1, dims=1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.5f}")

    if isinstance(model, sennit.ParallelModule) and dist.get_rank() == 0:
        print(model.memory_report(optimizer))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "pipeline")
    if dist.is_initialized():
        dist.destroy_process_group()
