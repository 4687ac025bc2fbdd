"""Training loops that are run under DDP and under `DataParallel` on the ranks at hand, and whether both end in the same
bits. An importable module, since ranks are processes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sennit.capture import capture
from sennit.errors import RunError
from sennit.fuse.data_parallel_torch import DataParallel
from sennit.fuse.gradient_order import gradients_first
from sennit.fuse.model import Channel, StepModel
from sennit.fuse.moves import Limits, fused_greedily
from sennit.fuse.network_threads import gloo_threads
from sennit.fuse.profile_torch import MeasuredCost
from sennit.fuse.serial_group_torch import serial_group
from sennit.fuse.timeline_torch import _Marks, rate_beside, stretches
from sennit.fuse.tune_torch import Tuning
from sennit.ir.strategy import Bucket, Part, Reduce, Strategy, WaitAt

State = dict[str, Tensor]
Loop = Callable[[Any, torch.optim.Optimizer, int], list[State]]


class Normed(nn.Module):
    """Convolution and batch norm: buffers that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(images))).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


class Dropped(nn.Module):
    """Dropout between layers and on attention weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.dropout(F.relu(self.first(images.flatten(1)[:, :6])), 0.1)
        weights = F.dropout(torch.softmax(x @ x.T, 1), 0.3)
        x = F.dropout(weights @ F.relu(self.second(x)), 0.5)
        return F.cross_entropy(self.head(x + 0.01 * torch.rand_like(x)), labels)


class Partly(nn.Module):
    """A frozen layer, a layer that nothing uses, results beside the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.hidden, self.idle, self.head = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(2, 2),
            nn.Linear(6, 3),
        )
        self.frozen.requires_grad_(False)

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.hidden(self.frozen(images.flatten(1)[:, :6]))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Tabled(nn.Module):
    """An embedding of which a batch names a few rows, some of them twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(64, 4, padding_idx=1), nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(torch.tanh(self.table(rows_of(images)).sum(1))), labels)


class Tied(nn.Module):
    """The embedding is the head as well, and its gradient the sum of both."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(64, 4), nn.Linear(4, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.hidden(self.table(rows_of(images)).sum(1)))
        return F.cross_entropy(x @ self.table.weight.T, labels)


def rows_of(images: Tensor) -> Tensor:
    """Two rows a picture, by its numbers; pictures and ranks share some."""
    return (images[:, 0, :2, 0] * 4).long() % 64


def batches(rank: int, count: int = 3) -> list[tuple[Tensor, Tensor]]:
    made, device = torch.Generator().manual_seed(7 + rank), here()
    drawn = [(torch.randn(4, 2, 6, 6, generator=made), torch.randint(3, (4,), generator=made)) for _ in range(count)]
    return [(images.to(device), labels.to(device)) for images, labels in drawn]


def here() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def build(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(here())


def spread(paths: list[str], wait: WaitAt, reduce: Reduce = Reduce.ALL_REDUCE) -> Strategy:
    """Gradients in buckets of two, those of the last layers first."""
    backwards = paths[::-1]
    pairs = [backwards[start : start + 2] for start in range(0, len(backwards), 2)]
    return Strategy("spread", (), tuple(Bucket(tuple(map(Part, pair)), wait, reduce) for pair in pairs))


def cut(model: nn.Module) -> Strategy:
    """Every gradient of some size in three buckets, between rows and inside them, the middle one first."""
    buckets: list[Bucket] = []
    for path, parameter in reversed(list(model.named_parameters())):
        count = parameter.numel()
        first, second = count // 4, count * 2 // 3
        spans = [(first, second), (0, first), (second, count)] if count > 8 else [None]
        buckets += [Bucket((Part(path, span),), WaitAt.NEXT) for span in spans]
    return Strategy("cut", (), tuple(buckets))


def by_rows(model: nn.Module) -> Strategy:
    """Every matrix in blocks of rows, the last of them first, each in a bucket with a piece of the gradient before it;
    what else there is at the end.
    """
    parts: list[Part] = []
    rest = [path for path, parameter in model.named_parameters() if parameter.ndim != 2 or len(parameter) < 3]
    for path, parameter in reversed(list(model.named_parameters())):
        if path not in rest:
            rows, width = parameter.shape
            cuts = [0, width, width * (1 + rows // 2), rows * width]
            parts += [Part(path, span) for span in itertools.pairwise(cuts)][::-1]
    pairs = [parts[:1], *(parts[start : start + 2] for start in range(1, len(parts), 2)), [Part(path) for path in rest]]
    return Strategy("rows", (), tuple(Bucket(tuple(pair), WaitAt.NEXT) for pair in pairs if pair))


def head_in_blocks(wait: WaitAt, cuts: tuple[int, ...]) -> Strategy:
    """The table of `Tied` cut at these elements, the last part first and one beside another gradient; then the rest and
    the rows that are looked up.
    """
    spans = [Part("table.weight", span) for span in itertools.pairwise((0, *cuts, 256))]
    first, second, *others = spans[::-1]
    parts = [(first,), (Part("hidden.bias"), second), *((other,) for other in others)]
    parts += [(Part("hidden.weight"),), (Part("table.weight:rows"),)]
    return Strategy("blocks", (), tuple(Bucket(some, wait) for some in parts))


def snapshot(model: Any) -> State:
    return {key: value.clone() for key, value in model.state_dict().items()}


# ---- loops: what a user writes after wrapping ------------------------------------------------------------------------


def plain(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[State]:
    states = []
    for batch in batches(rank):
        loss = model(*batch)
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append(snapshot(model))
    return states


def unwatched(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[State]:
    """As `plain`, and nobody looks until the end: updates wait for the next forward pass."""
    for batch in batches(rank):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model.eval()
        seen = model(*batches(rank)[0])
        model.train()
    return [snapshot(model), {"seen": seen.detach()}]


def accumulated(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[State]:
    """Two passes without synchronisation, one with it; then gradients that are not set to zero between two passes."""
    first, second, third = batches(rank)
    with model.no_sync():
        model(*first).backward()
        model(*second).backward()
    local = {path: p.grad.clone() for path, p in model.named_parameters()}
    model(*third).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(*first).backward()
    model(*second).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [local, snapshot(model)]


def clipped(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[State]:
    norms = []
    for batch in batches(rank):
        model(*batch).backward()
        clip = getattr(model, "clip_grad_norm_", None)
        norms.append(clip(0.1) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [snapshot(model), {"norms": torch.stack(norms)}]


def scaled(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[State]:
    """A loss scaler: one step is left out, because its gradients overflow."""
    scaler = torch.amp.GradScaler(here().type, init_scale=2.0**10)
    for number, (images, labels) in enumerate(batches(rank, 4)):
        loss = model(images * (1e38 if number == 1 else 1.0), labels)
        scaler.scale(loss).backward()
        if hasattr(model, "synchronize"):
            model.synchronize()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [snapshot(model), {"scale": torch.tensor(scaler.get_scale())}]


def saved(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> list[State]:
    """The model's own state and the optimizer's, in the middle of training; then back to them, and on."""
    first, second, third = batches(rank)
    for batch in (first, second):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = {str(key): entry["exp_avg"].clone() for key, entry in optimizer.state_dict()["state"].items()}
    held, kept = snapshot(model.module), dict(optimizer.state_dict())
    kept["state"] = {key: {k: torch.clone(v) for k, v in entry.items()} for key, entry in kept["state"].items()}
    model(*third).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.module.load_state_dict(held)
    optimizer.load_state_dict(kept)
    model(*third).backward()
    optimizer.step()
    return [moments, held, snapshot(model)]


LOOPS: dict[str, tuple[type[nn.Module], Loop]] = {
    "batch norm": (Normed, plain),
    "batch norm, unwatched": (Normed, unwatched),
    "dropout": (Dropped, unwatched),
    "accumulated": (Dropped, accumulated),
    "clipped": (Normed, clipped),
    "scaled": (Dropped, scaled),
    "saved": (Normed, saved),
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)


def same(first: list[State], second: list[State]) -> list[str]:
    """What differs in a bit, or is missing."""
    different = []
    for one, other in zip(first, second, strict=True):
        keys = {key.removeprefix("module."): value for key, value in one.items()}
        others = {key.removeprefix("module."): value for key, value in other.items()}
        different += [
            key
            for key in keys | others
            if key not in keys or key not in others or not torch.equal(keys[key], others[key])
        ]
    return different


def as_ddp(rank: int, backend: str | None = None) -> dict[str, list[str]]:
    """By loop and kind of wait, what is not DDP's to the last bit.

    Without cuDNN: eager torch has it compute batch norm, which a graph calls torch's own kernel for.
    """
    torch.set_num_threads(1)
    with torch.backends.cudnn.flags(enabled=False):
        return _as_ddp(rank, backend)


def _as_ddp(rank: int, backend: str | None) -> dict[str, list[str]]:
    group = dist.new_group(backend=backend) if backend else None
    found: dict[str, list[str]] = {}
    for name, (kind, loop) in LOOPS.items():
        theirs = build(kind)
        theirs.register_buffer("untouched", torch.ones(2, device=here()))
        ddp = DistributedDataParallel(theirs)
        torch.manual_seed(100 + rank)
        expected = loop(ddp, adam(theirs), rank)
        for strategy in strategies(kind):
            ours = build(kind)
            ours.register_buffer("untouched", torch.ones(2, device=here()))
            optimizer = adam(ours)
            wrapped = DataParallel(ours, optimizer, sample=batches(rank)[0], strategy=strategy, group=group)
            torch.manual_seed(100 + rank)
            title = f"{name}, {strategy.name} {strategy.buckets[0].wait.value} {strategy.buckets[0].reduce.value}"
            found[title] = same(expected, loop(wrapped, optimizer, rank))
            wrapped.flush()
    return found


def strategies(kind: type[nn.Module]) -> list[Strategy]:
    paths = [path for path, _ in build(kind).named_parameters()]
    return [
        spread(paths, WaitAt.STEP),
        spread(paths, WaitAt.NEXT),
        spread(paths, WaitAt.NEXT, Reduce.REDUCE_SCATTER),
        cut(build(kind)),
        by_rows(build(kind)),
    ]


def tables(rank: int, backend: str | None = None) -> dict[str, list[str]]:
    """What is not DDP's to the last bit where rows of tables travel packed; and, under `sent`, tables that did not."""
    torch.set_num_threads(1)
    group = dist.new_group(backend=backend) if backend else None
    found: dict[str, list[str]] = {"sent": []}
    for kind, names, loop in itertools.product((Tabled, Tied), ((), ("table.weight:rows",)), (unwatched, accumulated)):
        if kind is Tabled and names:
            continue
        theirs = build(kind)
        expected = loop(DistributedDataParallel(theirs), adam(theirs), rank)
        paths = [*names, *(path for path, _ in theirs.named_parameters())]
        for wait, reduce in (
            (WaitAt.STEP, Reduce.ALL_REDUCE),
            (WaitAt.NEXT, Reduce.ALL_REDUCE),
            (WaitAt.NEXT, Reduce.REDUCE_SCATTER),
        ):
            ours = build(kind)
            optimizer = adam(ours)
            strategy = spread(paths, wait, reduce)
            wrapped = DataParallel(ours, optimizer, sample=batches(rank)[0], strategy=strategy, group=group)
            title = f"{kind.__name__} {names} {loop.__name__} {wait.value} {reduce.value}"
            found[title] = same(expected, loop(wrapped, optimizer, rank))
            wrapped.flush()
            if (kind is Tabled or names) and not (wrapped.packed and "rows('table.weight" in wrapped.source):
                found["sent"].append(title)
    for loop, wait, cuts in itertools.product(
        (unwatched, accumulated), (WaitAt.STEP, WaitAt.NEXT), ((128, 192), (101,))
    ):
        theirs, ours = build(Tied), build(Tied)
        expected = loop(DistributedDataParallel(theirs), adam(theirs), rank)
        optimizer = adam(ours)
        strategy = head_in_blocks(wait, cuts)
        wrapped = DataParallel(ours, optimizer, sample=batches(rank)[0], strategy=strategy, group=group)
        found[f"blocks {loop.__name__} {wait.value} {cuts}"] = same(expected, loop(wrapped, optimizer, rank))
        wrapped.flush()
        if "product('table.weight', " not in wrapped.source:
            found["sent"].append(f"blocks {cuts}")
    ours = build(Tied)
    optimizer = adam(ours)
    wrapped = DataParallel(ours, optimizer, sample=batches(rank)[0], group=group, tuning=Tuning(turns=1, steps=1))
    found["tuned"] = same(expected, loop(wrapped, optimizer, rank))
    return found


def narrow(rank: int) -> list[str]:
    """What is not DDP's to the last bit of a model in bfloat16, by a strategy that is measured for."""
    torch.set_num_threads(1)
    states = []
    for wrap in (lambda model, _: DistributedDataParallel(model), tuned):
        model = build(Dropped).to(torch.bfloat16)
        optimizer = adam(model)
        wrapped = wrap(model, optimizer)
        torch.manual_seed(100 + rank)
        for images, labels in batches(rank):
            wrapped(images.to(torch.bfloat16), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append([snapshot(wrapped)])
    return same(*states)


def tuned(model: nn.Module, optimizer: torch.optim.Optimizer) -> DataParallel:
    images, labels = batches(0)[0]
    tuning = Tuning(turns=1, steps=1, sizes=(1 << 20,))
    return DataParallel(model, optimizer, sample=(images.to(torch.bfloat16), labels), tuning=tuning)


def marked(rank: int) -> list[tuple[list[tuple[int, int]], int, set[int]]]:
    """For some models: the stretches of a step, how many operators it has, and where its gradients are made."""
    torch.set_num_threads(1)
    found = []
    for kind in (Normed, Tabled, Tied):
        model = build(kind)
        sample = batches(rank)[0]
        wrapped = DataParallel(model, adam(model), sample=sample, tuning=Tuning(turns=0))
        with torch.no_grad():
            lengths = stretches(wrapped, wrapped.signature.flatten(sample), 1)
            rate, of_message = rate_beside(wrapped, wrapped.signature.flatten(sample), 1, nbytes=1 << 20)
            assert rate > 0.0
            assert 0 < of_message <= 1 << 20
        assert min(lengths.values()) > 0.0
        found.append((list(lengths), len(wrapped.graph.ops), set(_Marks(wrapped).made.values())))
    return found


def partly(rank: int) -> tuple[str, list[str], bool, bool]:
    """A model with frozen and unused layers: what is said of it, what differs from DDP, whether its other results are
    there, whether the frozen layer stayed.
    """
    said = ""
    try:
        DataParallel(build(Partly), None, sample=batches(rank)[0], tuning=Tuning(turns=0))
    except RunError as error:
        said = error.what
    theirs, ours = build(Partly), build(Partly)
    ddp = DistributedDataParallel(theirs, find_unused_parameters=True)
    expected = plain(ddp, adam(theirs), rank)
    optimizer = adam(ours)
    images, labels = batches(rank)[0]
    wrapped = DataParallel(
        ours,
        optimizer,
        sample={"images": images, "labels": labels},
        find_unused_parameters=True,
        tuning=Tuning(turns=1, steps=1),
    )
    different = same(expected, plain(wrapped, optimizer, rank))
    result = wrapped(images, labels=labels)
    near = torch.equal(result["logits"], theirs(images, labels)["logits"].detach())
    return (
        said,
        different,
        near and result["logits"].requires_grad,
        torch.equal(ours.frozen.weight, build(Partly).frozen.weight),
    )


def refused(rank: int) -> list[str]:
    """What is said of a mode that changed, of late buckets without an optimizer, of an algorithm, and of a strategy
    that mixes element types.
    """
    said: list[str] = []

    def attempt(action: Callable[[], Any]) -> None:
        try:
            action()
        except RunError as error:
            said.append(error.what)

    model = build(Normed)
    paths = [path for path, _ in model.named_parameters()]
    sample = batches(rank)[0]
    wrapped = DataParallel(model, None, sample=sample, strategy=spread(paths, WaitAt.STEP))
    model.norm.eval()
    attempt(lambda: wrapped(*sample))
    attempt(lambda: DataParallel(build(Normed), None, sample=sample, strategy=spread(paths, WaitAt.NEXT)))
    by = Strategy("by", (), (Bucket(tuple(map(Part, paths)), algorithm="ring"),))
    attempt(lambda: DataParallel(build(Normed), None, sample=sample, strategy=by))
    mixed = build(Partly)
    mixed.idle.requires_grad_(False)
    mixed.head.double()
    mixed.forward = (
        lambda images, labels: F.cross_entropy(  # type: ignore[method-assign]
            mixed.head(mixed.hidden(images.flatten(1)[:, :6]).double()), labels
        )
    )
    names = [path for path, p in mixed.named_parameters() if p.requires_grad]
    one = Strategy("one", (), (Bucket(tuple(map(Part, names))),))
    attempt(lambda: DataParallel(mixed, None, sample=sample, strategy=one))
    return said


class Crossed(nn.Module):
    """Its kernels read transposed values: a compiled one must be made for the strides that come."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.first(images.flatten(1)[:, :6])).T
        return F.cross_entropy(self.second((torch.sigmoid(x * 2.0) + x).T), labels)


def compiled(rank: int) -> tuple[int, float]:
    """How many groups were compiled, and the largest difference from DDP after three steps: of a strategy that is
    given, and of one that is found.
    """
    torch.set_num_threads(1)
    theirs, ours = build(Crossed), build(Crossed)
    expected = plain(DistributedDataParallel(theirs), adam(theirs), rank)[-1]
    optimizer = adam(ours)
    found = StepModel(gradients_first(capture(ours, batches(rank)[0])), MeasuredCost({}), Channel(0.0, 0.0))
    groups = found.strategy("", fused_greedily(found, Limits()), ()).groups
    spread_out = spread([path for path, _ in ours.named_parameters()], WaitAt.NEXT)
    strategy = Strategy("compiled", groups, spread_out.buckets)
    wrapped = DataParallel(ours, optimizer, sample=batches(rank)[0], strategy=strategy, compile_kernels=True)
    state = plain(wrapped, optimizer, rank)[-1]
    tuned = build(Crossed)
    optimizer = adam(tuned)
    tuning = Tuning(turns=1, steps=1, sizes=(1 << 20,), compilations=2)
    wrapped = DataParallel(tuned, optimizer, sample=batches(rank)[0], compile_kernels=True, tuning=tuning)
    found_state = plain(wrapped, optimizer, rank)[-1]
    differences = [(made[key] - expected[key]).abs().max() for made in (state, found_state) for key in expected]
    return len(groups), float(max(differences))


def policies(rank: int) -> int:
    """How many kinds of scheduling the threads of gloo have, once a model with buffers is wrapped: its groups are new."""
    model = build(Normed)
    paths = [path for path, _ in model.named_parameters()]
    DataParallel(model, None, sample=batches(rank)[0], strategy=spread(paths, WaitAt.STEP))
    return len({os.sched_getscheduler(thread) for thread in gloo_threads()})


def out_of_turn(rank: int) -> int:
    """How often, of 20 times, a small collective that was issued behind a large one was done before it."""
    group = serial_group()
    large, small = torch.zeros(1 << 21), torch.zeros(4)
    early = 0
    for _ in range(20):
        dist.barrier(group)
        first = dist.all_reduce(large, group=group, async_op=True)
        second = dist.all_reduce(small, group=group, async_op=True)
        assert first is not None
        assert second is not None
        second.wait()
        early += not first.is_completed()
        first.wait()
    return early
