"""Work that ranks run for the tests of `DataParallel`: an importable module, since ranks are processes."""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel

from sennit.capture import capture
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.errors import RunError
from sennit.fuse.data_parallel_torch import DataParallel
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.kernel_cost import Roofline
from sennit.fuse.model import Channel, Grouping, StepModel
from sennit.fuse.moves import Limits, fused_greedily, random_move
from sennit.fuse.row_uses import row_uses
from sennit.ir.strategy import Bucket, Part, Reduce, Strategy, WaitAt
from sennit.kernels.graph_attention import with_fused_attention

CONFIG = GPTConfig(vocabulary=48, context=8, width=16, heads=2, layers=2)
STEPS = 3


def build() -> GPT:
    torch.manual_seed(0)
    return GPT(CONFIG).to(here())


def batches(rank: int, count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    drawn = [random_batch(CONFIG, 4, seed=10 * step + rank) for step in range(count)]
    return [(tokens.to(here()), targets.to(here())) for tokens, targets in drawn]


def here() -> torch.device:
    """Where the ranks compute; outside of a group, as when strategies are made, the CPU."""
    return torch.device("cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu")


def step_model(*, fused_attention: bool = True) -> StepModel:
    captured = capture(build(), batches(0)[0])
    graph = gradients_first(with_fused_attention(captured, here().type) if fused_attention else captured)
    return StepModel(graph, Roofline.of(graph, load("dgx-a100").device), Channel(5e-6, 1e-9), uses=row_uses(graph))


def random_strategy(model: StepModel, seed: int) -> Strategy:
    """Groups by random moves; gradients, some of them cut, in random runs, with random waits and reductions."""
    draw = random.Random(seed)
    grouping = fused_greedily(model, Limits()) if draw.random() < 0.3 else Grouping()
    for _ in range(draw.randrange(60)):
        grouping = random_move(model, grouping, draw, Limits(size=10)) or grouping
    parts: list[Part] = []
    for path, _, _ in model.gradients:
        cut = draw.randrange(1, model.elements[path]) if draw.random() < 0.3 else None
        if cut is not None and draw.random() < 0.5 and (use := model.uses.get(path)) is not None:
            cut = max(1, cut // use.width) * use.width  # between rows: then they are read and updated by themselves
        spans = [None] if cut is None else [(0, cut), (cut, model.elements[path])]
        parts += [Part(path, span) for span in spans]
    if draw.random() < 0.5:
        draw.shuffle(parts)
    buckets: list[Bucket] = []
    while parts:
        count = draw.randint(1, 6)
        buckets.append(Bucket(tuple(parts[:count]), draw.choice(list(WaitAt)), draw.choice(list(Reduce))))
        parts = parts[count:]
    return Strategy(f"random {seed}", model.strategy("", grouping, ()).groups, tuple(buckets))


def optimizer_of(model: nn.Module, seed: int) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    if seed % 2:
        return torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": rest}], lr=0.05, momentum=0.9)
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses: list[float] = []
    for batch in data:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return losses


def compare(rank: int, seeds: list[int]) -> dict[int, tuple[bool, float]]:
    """Whether losses and parameters are DDP's to the last bit, and the largest difference, for random strategies.

    Every third has attention in its mathematical form.
    """
    torch.set_num_threads(1)
    found: dict[int, tuple[bool, float]] = {}
    for seed in seeds:
        fused = seed % 3 > 0
        model = step_model(fused_attention=fused)
        with nullcontext() if fused else sdpa_kernel(SDPBackend.MATH):
            theirs = build()
            ddp = DistributedDataParallel(theirs)
            expected = train(ddp, optimizer_of(ddp.module, seed), batches(rank))
            ours = build()
            optimizer = optimizer_of(ours, seed)
            wrapped = DataParallel(
                ours,
                optimizer,
                sample=batches(rank)[0],
                strategy=random_strategy(model, seed),
                fused_attention=fused,
            )
            losses = train(wrapped, optimizer, batches(rank))
            state, other = wrapped.state_dict(), ddp.state_dict()
            assert set(state) == set(other)
            worst = max(float((state[key] - other[key]).abs().max()) for key in other)
            # the loss is taken apart, and its own last bit may differ
            near = all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True))
            found[seed] = (near and all(torch.equal(state[key], other[key]) for key in other), worst)
    return found


def late(model: StepModel) -> Strategy:
    parts = [Part(path) for path, _, _ in model.gradients]
    buckets = tuple(Bucket((part,), wait=WaitAt.NEXT) for part in parts)
    return Strategy("all late", (), buckets)


def clip_and_accumulate(rank: int) -> dict[str, float]:
    """Clipping by the global norm, and gradients summed over two backward passes: largest differences from DDP."""
    torch.set_num_threads(1)
    model, found = step_model(), {}
    data = batches(rank, 4)
    for what in ("clip", "no_sync"):
        results = []
        for ours in (False, True):
            net = build()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            wrapped: Any = (
                DataParallel(net, optimizer, sample=data[0], strategy=late(model))
                if ours
                else DistributedDataParallel(net)
            )
            for first, second in (data[:2], data[2:]):
                if what == "no_sync":
                    with wrapped.no_sync():
                        wrapped(*first).backward()
                    wrapped(*second).backward()
                else:
                    wrapped(*first).backward()
                    if ours:
                        wrapped.clip_grad_norm_(0.1)
                    else:
                        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
            results.append({key: value.clone() for key, value in wrapped.state_dict().items()})
        found[what] = max(float((results[0][key] - results[1][key]).abs().max()) for key in results[0])
    return found


def disagree(rank: int) -> str:
    model = step_model()
    strategy = late(model)
    if rank == 1:
        strategy = Strategy("other", strategy.groups, strategy.buckets[::-1])
    net = build()
    try:
        DataParallel(net, torch.optim.SGD(net.parameters()), sample=batches(rank)[0], strategy=strategy)
    except RunError as error:
        return error.what
    return "nothing"


def misuse(rank: int) -> list[str]:
    """What is said of a second backward pass, of another shape, of a closure."""
    model, net = step_model(), build()
    optimizer = torch.optim.SGD(net.parameters())
    wrapped = DataParallel(net, optimizer, sample=batches(rank)[0], strategy=late(model))
    said: list[str] = []
    loss = wrapped(*batches(rank)[0])
    loss.backward(retain_graph=True)

    def attempt(action: Any) -> None:
        try:
            action()
        except RunError as error:
            said.append(error.what)

    attempt(loss.backward)
    attempt(lambda: wrapped(*(item.to(here()) for item in random_batch(CONFIG, 2))))
    attempt(lambda: optimizer.step(lambda: 0.0))  # type: ignore[arg-type]
    wrapped.flush()
    return said


def measured(rank: int) -> tuple[bool, str]:
    """A strategy found by measuring trains as DDP does; its text."""
    torch.set_num_threads(1)
    theirs, ours = build(), build()
    ddp = DistributedDataParallel(theirs)
    train(ddp, optimizer_of(theirs, 0), batches(rank))
    optimizer = optimizer_of(ours, 0)
    with DataParallel(ours, optimizer, sample=batches(rank)[0]) as wrapped:
        train(wrapped, optimizer, batches(rank))
    equal = all(
        torch.equal(a, b) for a, b in zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True)
    )
    return equal, str(wrapped.strategy)
