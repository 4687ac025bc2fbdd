"""What people write around a step, under DDP and under `DataParallel` with waits in the next step: whether both end in
the same bits. An importable module, since ranks are processes."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from ddp_cases_for_tests import State, batches, same, snapshot, spread
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sennit.errors import RunError
from sennit.fuse.data_parallel_torch import DataParallel
from sennit.fuse.moments_torch import of_all_ranks
from sennit.ir.strategy import Reduce, WaitAt

Habit = Callable[[Any, torch.optim.Optimizer, int], None]


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.second(F.relu(self.first(images.flatten(1)[:, :6]))))
        return F.cross_entropy(self.head(x), labels)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(6, 4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.cells(images.flatten(1, 2)[:, :3])[0][:, -1]), labels)


class Talkative(nn.Module):
    """Results beside the loss, some of which require a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head, self.frozen = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(6, 2)
        self.frozen.requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        rows = images.flatten(1)[:, :6]
        hidden = F.relu(self.first(rows))
        logits = self.head(hidden)
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
            unrecorded = logits.softmax(1)
        seen = {
            "detached": logits.detach(),
            "unrecorded": unrecorded,
            "guesses": logits.argmax(1),
            "sizes": torch.zeros_like(logits),
            "frozen": self.frozen(rows),
            "mean": self.mean * 2,
        }
        return {"loss": F.cross_entropy(logits, labels), "logits": logits, "all": (hidden, [logits.mean(1)], seen)}


def build(kind: type[nn.Module] = Small) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, reduce: Reduce = Reduce.ALL_REDUCE
) -> DataParallel:
    strategy = spread([path for path, _ in model.named_parameters()], WaitAt.NEXT, reduce)
    return DataParallel(model, optimizer, sample=batches(rank)[0], strategy=strategy)


# ---- habits ----------------------------------------------------------------------------------------------------------


def clip_by_torch(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Torch's function, with the parameters of the wrapper and of the model."""
    for number, batch in enumerate(batches(rank, 4)):
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_((model if number % 2 else model.module).parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def scale(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A loss scaler, and nothing said to the model."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for batch in batches(rank):
        scaler.scale(model(*batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def average(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Parameters are read and written between steps."""
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    for batch in batches(rank):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        with torch.no_grad():
            for one, parameter in zip(mean, model.parameters(), strict=True):
                one.lerp_(parameter, 0.5)
                parameter.clamp_(-0.3, 0.3)
    with torch.no_grad():
        for one, parameter in zip(mean, model.parameters(), strict=True):
            parameter.add_(one)


def leave_out(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A step is left out: the gradients are dropped, not by the optimizer."""
    for number, batch in enumerate(batches(rank, 4)):
        model(*batch).backward()
        if number != 1:
            optimizer.step()
        model.module.zero_grad()


def look_now_and_then(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Inference mode, in which the first updates may be made."""
    for number, batch in enumerate(batches(rank, 4)):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode() if number in (0, 2) else nullcontext():
            model(*batch)


def save_on_the_first(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    for batch in batches(rank, 4):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            model.state_dict()


def schedule(model: Any, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """A group that is added later, while updates are on their way, and a scheduler."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number, batch in enumerate(batches(rank, 4)):
        optimizer.zero_grad()
        model(*batch).backward()
        optimizer.step()
        scheduler.step()
        if number == 1:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1})


HABITS: tuple[Habit, ...] = (clip_by_torch, scale, average, leave_out, look_now_and_then, save_on_the_first, schedule)


def as_ddp(rank: int) -> dict[str, list[str]]:
    """By habit, what is not DDP's to the last bit."""
    torch.set_num_threads(1)
    found: dict[str, list[str]] = {}
    for habit in HABITS:
        for reduce in (Reduce.ALL_REDUCE, Reduce.REDUCE_SCATTER):
            states: list[list[State]] = []
            for is_ours in (False, True):
                model = build()
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
                habit(
                    wrapped(model, optimizer, rank, reduce) if is_ours else DistributedDataParallel(model),
                    optimizer,
                    rank,
                )
                states.append([snapshot(model)])
            found[f"{habit.__name__} {reduce.value}"] = same(*states)
    return found


def recurrent(rank: int) -> float:
    """How far an LSTM's parameters are from DDP's."""
    torch.set_num_threads(1)
    states = []
    for is_ours in (False, True):
        model = build(Recurrent)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        used = wrapped(model, optimizer, rank) if is_ours else DistributedDataParallel(model)
        for batch in batches(rank):
            used(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(snapshot(model))
    return max(float((states[0][key] - states[1][key]).abs().max()) for key in states[0])


def autocast(rank: int) -> tuple[list[str], str]:
    """What differs from DDP where model and steps are inside autocast, and what is said where the model was not."""
    torch.set_num_threads(1)
    states: list[list[State]] = []
    for is_ours in (False, True):
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            used = wrapped(model, optimizer, rank) if is_ours else DistributedDataParallel(model)
        for batch in batches(rank):
            with torch.autocast("cpu", torch.bfloat16):
                loss = used(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append([snapshot(model)])
    return same(*states), said_of(lambda: used(*batches(rank)[0]))


def said_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except RunError as error:
        return error.what
    return ""


def refused(rank: int) -> list[str]:
    """What is said of models and arguments that cannot be wrapped, and of what is changed later."""
    model, sample = build(), batches(rank)[0]
    paths = [path for path, _ in model.named_parameters()]
    strategy = spread(paths, WaitAt.STEP)

    def wrap(model: nn.Module, **others: Any) -> DataParallel:
        return DataParallel(model, None, **{"sample": sample, "strategy": strategy, **others})

    hooked, empty = build(), build().to("meta")
    next(hooked.parameters()).register_hook(lambda gradient: gradient * 0)
    said = [
        said_of(lambda: wrap(model, sample=list(sample))),
        said_of(lambda: wrap(model, strategy=str(strategy))),
        said_of(lambda: wrap(build().eval())),
        said_of(lambda: wrap(empty)),
        said_of(lambda: wrap(hooked)),
        said_of(lambda: DataParallel(model, torch.optim.SGD(build().parameters()), sample=sample, strategy=strategy)),
    ]
    used, (images, labels) = wrap(model), sample
    said.append(said_of(lambda: used(images.clone().requires_grad_(), labels)))
    model.first.requires_grad_(False)
    return [*said, said_of(lambda: used(*sample))]


class Shared(nn.Module):
    """A weight that is computed from another, one at two places, one that is frozen and one that is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.frozen = nn.Linear(6, 3, bias=False), nn.Linear(6, 6)
        nn.utils.parametrizations.weight_norm(self.first)
        self.third.weight = self.second.weight
        self.frozen.requires_grad_(False)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.frozen(images.flatten(1)[:, :6])
        return F.cross_entropy(self.head(self.third(F.relu(self.second(F.relu(self.first(x)))))), labels)


def exchanged(rank: int) -> tuple[list[str], list[str]]:
    """What is said at the next call of modules and parameters that are others than those that were captured; and of
    changes that leave them the same ones, or that only need to be read."""
    sample = batches(rank)[0]

    def assign(model: Any) -> None:
        model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)

    def load(model: Any) -> None:
        model.load_state_dict(build(Shared).state_dict())

    def write(model: Any) -> None:
        model.second.weight.data = torch.ones(6, 6)
        model.third.bias.data.mul_(2.0)
        with torch.no_grad():
            model.head.weight.copy_(torch.ones(3, 6))

    def convert(model: Any) -> None:
        model.to(torch.float64).to(torch.float32).to("cpu")

    def untie(model: Any) -> None:
        model.third.weight = nn.Parameter(model.third.weight.detach().clone())

    def add_bias(model: Any) -> None:
        model.head.bias = nn.Parameter(torch.zeros(3))

    def parametrize(model: Any) -> None:
        nn.utils.parametrizations.weight_norm(model.head)

    def thaw(model: Any) -> None:
        model.frozen.weight = nn.Parameter(torch.ones(6, 6))

    def freeze_another(model: Any) -> None:
        model.frozen.weight = nn.Parameter(torch.ones(6, 6), requires_grad=False)

    def replace_module(model: Any) -> None:
        model.second = nn.Linear(6, 6)

    def heard(change: Callable[[Any], None]) -> str:
        model = build(Shared)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        strategy = spread([path for path, p in model.named_parameters() if p.requires_grad], WaitAt.NEXT)
        used = DataParallel(model, optimizer, sample=sample, strategy=strategy)
        used(*sample).backward()
        optimizer.step()
        used.flush()
        change(model)
        return said_of(lambda: used(*sample).backward())

    torch.set_num_threads(1)
    refused = (assign, untie, add_bias, parametrize, thaw, replace_module)
    return [heard(change) for change in refused], [heard(change) for change in (load, write, convert, freeze_another)]


def results(rank: int) -> tuple[list[tuple[bool, bool]], list[str], list[str]]:
    """Of each result: whether it requires a gradient, in the model and wrapped. What differs from DDP after steps in
    which results are used in all ways that need no gradient. What is said of a term that is made of one outside."""
    torch.set_num_threads(1)

    def flat(result: dict[str, Any]) -> list[Tensor]:
        hidden, (means,), seen = result["all"]
        return [result["loss"], result["logits"], hidden, means, *seen.values()]

    def loop(model: Any, optimizer: torch.optim.Optimizer) -> list[State]:
        states, kept = [], []
        for images, labels in batches(rank):
            result = model(images, labels)
            logits = result["logits"]
            right = (logits.argmax(1) == labels).float().mean().item()
            with torch.no_grad():
                highest = logits.max().clone()
            near = F.mse_loss(logits.detach(), torch.zeros(len(labels), 3))
            kept.append(logits)
            result["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            logits.mul_(2.0)
            states.append({"right": torch.tensor(right), "highest": highest, "near": near, "twice": logits.detach()})
        return [*states, snapshot(model)]

    states = []
    for is_ours in (False, True):
        model = build(Talkative)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
        strategy = spread([path for path, p in model.named_parameters() if p.requires_grad], WaitAt.NEXT)
        sample = batches(rank)[0]
        used: Any = (
            DataParallel(model, optimizer, sample=sample, strategy=strategy)
            if is_ours
            else DistributedDataParallel(model)
        )
        states.append(loop(used, optimizer))
    asks = [
        (one.requires_grad, other.requires_grad)
        for one, other in zip(flat(used.module(*sample)), flat(used(*sample)), strict=True)
    ]
    terms: tuple[Callable[[dict[str, Any]], Tensor], ...] = (
        lambda result: result["loss"] + 0.1 * result["logits"].pow(2).mean(),
        lambda result: result["all"][0].sum(),
        lambda result: result["loss"] + result["all"][1][0].sum(),
        lambda result: result["loss"] + result["all"][2]["detached"].sum(),
    )
    return asks, same(*states), [said_of(lambda term=term: term(used(*sample)).backward()) for term in terms]


def beside(rank: int) -> tuple[int, list[str], bool, str]:
    """How often a hook of the optimizer runs in two steps, the warnings of a scheduler that was there first, whether a
    copy of the model and a saved one are the model, and what is said of a gradient that is read too late."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    used, calls = wrapped(model, optimizer, rank), []
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for batch in batches(rank, 2):
            used(*batch).backward()
            kept = model.first.weight.grad
            optimizer.step()
            scheduler.step()
    said = said_of(lambda: kept + 1)
    used.flush()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for batch in batches(rank, 2):
        used(*batch).backward()
        optimizer.step()
    used.flush()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), torch.load(file, weights_only=False)]
    equal = all(same([snapshot(model)], [snapshot(one)]) == [] for one in copies)
    return len(calls), [str(one.message) for one in heard], equal, said


def together(rank: int, own: list[list[float]]) -> list[float]:
    """The seconds of steps that took so long on each rank."""
    assert dist.group.WORLD is not None
    return of_all_ranks(own[rank], dist.group.WORLD, torch.device("cpu"))
