"""DistributedDataParallel on the sennit backend: the only line that differs from a program on gloo is the name of the
backend.

Run: torchrun --nproc-per-node 4 examples/backend_ddp.py
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sennit.backend


def main() -> None:
    sennit.backend.register()  # not needed where sennit is installed: torch finds it by itself
    dist.init_process_group("sennit")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(1 + rank)  # each rank has its own data
    for step in range(50):
        inputs = torch.randn(32, 64)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()  # gradients are all-reduced meanwhile, on a thread of the group
        optimizer.step()
        if step % 10 == 9:
            mean = loss.detach()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step + 1}: loss {mean.item():.3f}, mean of {size} ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
