"""A strategy for the machine at hand: measured, searched for, and the best few tried.

    1. measure every operator of the step and the step without communication, the group's collectives alone and beside computing, and the optimizer's update
    2. where kernels are compiled: time groups compiled and as they are, and keep what is faster (`compiled_groups_torch.py`); the best strategies without groups are tried beside those with them
    3. search by the clock, with several bucket sizes: some of the strategies that come out wait across steps, some do not
    4. run them for some steps each, in turns; after every turn the slower half goes, and those that are left are visited more often; what is slower, the steps of all ranks (`moments_torch.py`) and the clock say together (`trial_choice.py`)
    5. run the winner with the network's threads before the model's and without; what is faster stays

The clock knows what it was told. What it was not told decides between strategies that it puts close together: how the
threads of the network share a core with the model's, what else runs on the machine. So the last word has the real step.
A trial computes and communicates and updates nothing: parameters, buffers, gradients and the generator's state are as
before when it ends.

The first rank searches; all ranks try the same strategies and agree on the winner, since the times that they compare
are the same on all.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.errors import RunError
from sennit.fuse.annealed_buckets import Annealing, annealed
from sennit.fuse.bucket_search import Buckets, judged, refined, solved
from sennit.fuse.buckets import by_size
from sennit.fuse.compiled_groups_torch import compiled_groups
from sennit.fuse.model import Channel, Grouping, KernelOrder, StepModel
from sennit.fuse.moments_torch import Moments, of_all_ranks, wall
from sennit.fuse.network_threads import network_first, ordinary
from sennit.fuse.profile_torch import measure_blocks, measure_channel, measure_operators
from sennit.fuse.row_blocks import row_products
from sennit.fuse.search_options import SearchOptions
from sennit.fuse.timeline_torch import in_stretches, rate_beside, stretches
from sennit.fuse.trial_choice import is_clearly_faster, weighed
from sennit.ir.strategy import Bucket, Part, Strategy, WaitAt

if TYPE_CHECKING:
    from sennit.fuse.data_parallel_torch import DataParallel

__all__ = [
    "Trial",
    "Tuning",
    "candidates",
    "drop_gradients",
    "is_preference_worth",
    "measured_model",
    "timed_steps",
    "tune",
]

_MEBI = 1 << 20
_ROUNDS, _ROUNDS_BESIDE = 7, 7
_LEAST_RATE = 0.25
_FILLING = 2  # steps until the channel has as much to carry as in those that follow
_VISITS = 2  # of a strategy in one turn, at most


@dataclass(frozen=True, slots=True)
class Tuning:
    """How long to look:

    `turns` of `steps` steps for each of the `most` strategies that the clock has first, of which `sizes` (bytes of a
    bucket) gives two each. With no turns the clock's word is taken.
    """

    turns: int = 3
    steps: int = 3
    most: int = 6
    sizes: tuple[int, ...] = (_MEBI, 2 * _MEBI, 4 * _MEBI, 8 * _MEBI)
    sample_bytes: int = 16 * _MEBI  # parameters whose update is timed, at most
    compilations: int = 48  # structures of groups that are compiled and timed, at most

    def __post_init__(self) -> None:
        least = {"turns": 0, "steps": 1, "most": 1, "sample_bytes": 0, "compilations": 0}
        for name, first in least.items():
            given = getattr(self, name)
            if not isinstance(given, int) or given < first:
                raise RunError(
                    f"{name} is {given!r}",
                    where="sennit.fuse.tune_torch.Tuning",
                    fix=f"pass a whole number from {first} up"
                    + "; with turns=0 the clock's word is taken, and nothing is tried" * (name == "turns"),
                )
        if (
            not isinstance(self.sizes, (tuple, list))
            or not self.sizes
            or not all(isinstance(size, int) and size > 0 for size in self.sizes)
        ):
            raise RunError(
                f"sizes is {self.sizes!r}",
                where="sennit.fuse.tune_torch.Tuning",
                fix="pass one size of a bucket or several, in bytes: sizes=(1 << 20, 4 << 20)",
            )


@dataclass(frozen=True, slots=True)
class Trial:
    """A strategy with its simulated and its measured seconds a step (0 where it was not run)."""

    strategy: Strategy
    simulated: float
    measured: float = 0.0


def tune(
    owner: DataParallel,
    inputs: Mapping[str, Tensor],
    *,
    across_steps: bool,
    compile_kernels: bool = False,
    tuning: Tuning | None = None,
) -> tuple[Trial, ...]:
    """What was tried, the best first. The same on every rank."""
    tuning = tuning or Tuning()
    with _untouched(owner):
        model = measured_model(owner, inputs, tuning)
        grouping = compiled_groups(owner, model, tuning.compilations) if compile_kernels else Grouping()
        found: list[Any] = [None]
        if owner.group.rank() == 0:
            trials = candidates(model, grouping, across_steps=across_steps, sizes=tuning.sizes)
            trials = _worth_running(trials, tuning.most) if tuning.turns else trials
            if grouping.groups:  # the best without compiled kernels as well: what compiling is worth, a step says
                plain = candidates(model, Grouping(), across_steps=across_steps, sizes=tuning.sizes)
                plain = _worth_running(plain, tuning.most // 2)
                trials += [replace(item, strategy=_named(item.strategy, "no groups")) for item in plain]
            found = [[(str(item.strategy), item.simulated) for item in trials]]
        dist.broadcast_object_list(found, dist.get_global_rank(owner.group, 0), group=owner.group)
        trials = [Trial(Strategy.parse(text), simulated) for text, simulated in found[0]]
        return tuple(_run(owner, inputs, trials, tuning, compile_kernels)) if tuning.turns else tuple(trials)


def _named(strategy: Strategy, remark: str) -> Strategy:
    return replace(strategy, name=f"{strategy.name}, {remark}")


def measured_model(owner: DataParallel, inputs: Mapping[str, Tensor], tuning: Tuning) -> StepModel:
    """The step as the clock sees it, on this machine and this group.

    Operators are timed one by one, and then as they run in the step (`timeline_torch.py`).
    """
    cost = measure_operators(owner.graph, owner.module, {**inputs, **owner.constants})
    alone = stretches(owner, inputs, _ROUNDS)
    names = [op.name for op in owner.graph.ops]
    channel = measure_channel(owner.group, device=owner.device)
    update = _update_per_byte(owner.optimizer, tuning.sample_bytes) if owner.optimizer is not None else 0.0
    in_rows = row_products(owner.graph) if owner.device.type == "cpu" else {}
    if owner.group.size() > 1 and owner.device.type == "cpu":
        sharing = replace(channel.sharing, compute_rate=_compute_rate(owner, inputs, sum(alone.values()), channel))
        channel = replace(channel, sharing=sharing)
    measured = replace(channel, update_per_byte=update, copy_per_byte=_copy_per_byte(owner.device))
    in_the_step = replace(cost, seconds=in_stretches(cost.seconds, names, alone))
    rows, columns = ({item.product for item in found.values()} for found in (in_rows, owner.row_uses))
    per_block = measure_blocks(owner.graph, owner.module, {**inputs, **owner.constants}, rows, columns)
    in_rows = {path: item for path, item in in_rows.items() if item.product in per_block}
    uses = {path: item for path, item in owner.row_uses.items() if item.product in per_block}
    return StepModel(owner.graph, in_the_step, measured, in_rows, owner.packed, uses, per_block)


def _compute_rate(owner: DataParallel, inputs: Mapping[str, Tensor], alone: float, channel: Channel) -> float:
    """How fast the step computes beside messages that are carried, 1 as alone.

    By the step itself: one whose weights pass through the cache again and again loses more there than one of large
    products. What each message costs by itself, the clock counts by itself: beside messages of s seconds the step
    computes at

    rate - issued / s
    """
    nbytes = math.ceil(2.0 * alone / channel.per_byte)
    rate, of_message = rate_beside(owner, inputs, _ROUNDS_BESIDE, nbytes)
    by_messages = channel.sharing.issued / (channel.per_byte * of_message)
    return min(1.0, max(_LEAST_RATE, rate + by_messages))


def candidates(
    model: StepModel, grouping: Grouping, *, across_steps: bool, sizes: Sequence[int] = Tuning().sizes
) -> list[Trial]:
    """Buckets worth trying for these kernels, with their simulated times, the best by the clock first."""
    order = model.order(grouping)
    assert order is not None
    seconds = model.kernel_seconds(order, grouping)
    kernels = KernelOrder(model, order, seconds)
    found: dict[Buckets, str] = {}
    for across in (True, False) if across_steps else (False,):
        where = "across steps" if across else "in the step"
        solved_here: dict[Buckets, str] = {}
        for size in sizes:
            buckets, _ = solved(kernels, SearchOptions(across_steps=across, sizes=(size,)))
            solved_here.setdefault(buckets, f"{size / _MEBI:g} MiB, {where}")
        if across:  # gradients that stay in one piece: products take their time whole
            for size in sizes[::2]:
                buckets, _ = solved(kernels, SearchOptions(across_steps=True, splits=False, sizes=(size,)))
                solved_here.setdefault(buckets, f"{size / _MEBI:g} MiB, whole, {where}")
        # changes that every backend enforces alike
        options = SearchOptions(across_steps=across, reduce_scatter=False)
        best, _ = refined(kernels, min(solved_here, key=lambda buckets: judged(kernels, buckets)), options)
        best = annealed(kernels, best, options, Annealing()) if across else best
        found = {**solved_here, best: f"searched, {where}", **found}
    gradients = model.arrivals(order, seconds)
    for size in sizes:
        ends = by_size(gradients, size)
        cut = zip([0, *ends[:-1]], ends, strict=True)
        buckets = tuple(Bucket(tuple(Part(item.path) for item in gradients[start:end])) for start, end in cut)
        found.setdefault(buckets, f"{size / _MEBI:g} MiB, as ready")
    trials = [
        Trial(model.strategy(name, grouping, buckets), model.step_time(grouping, buckets).seconds)
        for buckets, name in found.items()
    ]
    return sorted(trials, key=lambda trial: trial.simulated)


def _worth_running(trials: Sequence[Trial], most: int) -> list[Trial]:
    """The first ones, and the first that waits for nothing in the next step: what the clock does not know may be one or
    the other's loss alone.
    """
    in_step = [trial for trial in trials if all(bucket.wait is WaitAt.STEP for bucket in trial.strategy.buckets)]
    return [*trials[:most], *(trial for trial in in_step[:1] if trial not in trials[:most])]


def _run(
    owner: DataParallel, inputs: Mapping[str, Tensor], trials: list[Trial], tuning: Tuning, compile_kernels: bool
) -> list[Trial]:
    """The trials with measured times, those that lasted longest first, the best of them first."""
    times: dict[int, list[float]] = defaultdict(list)
    left = list(range(len(trials)))
    lasted: list[int] = []
    for turn in range(tuning.turns):
        for _ in range(min(_VISITS, len(trials) // len(left))):
            for number in left:
                owner.use(trials[number].strategy, compile_kernels=compile_kernels)
                times[number] += timed_steps(owner, inputs, tuning.steps)
        seconds = weighed([item.simulated for item in trials], [times[number] for number in range(len(trials))])
        ranked = sorted(left, key=seconds.__getitem__)
        keep = max(2, len(ranked) // 2) if turn + 1 < tuning.turns else len(ranked)
        left, lasted = ranked[:keep], ranked[keep:] + lasted
    return [replace(trials[number], measured=median(times[number])) for number in (*left, *lasted)]


def is_preference_worth(owner: DataParallel, inputs: Mapping[str, Tensor], tuning: Tuning) -> bool:
    """Whether steps are faster with the network's threads before the model's.

    Where several ranks share a core they need not be: a thread that runs for one rank takes the core from another that
    computes. Ordinary threads must be clearly faster: a turn or two in which the machine did something else chose them
    where a step took 320 ms with them and 292 without.
    """
    times: dict[bool, list[float]] = {True: [], False: []}
    with _untouched(owner):
        for _ in range(tuning.turns):
            for is_first, turns in times.items():
                (network_first if is_first else ordinary)()
                turns.append(median(timed_steps(owner, inputs, tuning.steps)))
    return not is_clearly_faster(times[False], times[True])


def timed_steps(owner: DataParallel, inputs: Mapping[str, Tensor], count: int) -> list[float]:
    """Seconds of steady steps without updates, of all ranks (`moments_torch.py`).

    The first two are not counted: nothing is waited for in the first, and the channel has less to carry before the
    second than before those that follow.
    """
    dist.barrier(owner.group)
    moments = Moments(owner.device)
    moments.note()
    for _ in range(_FILLING + count):
        values = owner.run_forward(inputs)
        drop_gradients(owner)  # no optimizer takes those that have just arrived
        owner.run_backward(values, owner.program.one())
        moments.note()
    owner.flush()
    drop_gradients(owner)
    return of_all_ranks(moments.seconds(), owner.group, owner.device)[_FILLING:]


def drop_gradients(owner: DataParallel) -> None:
    for parameter in owner.trained.values():
        parameter.grad = None


@contextmanager
def _untouched(owner: DataParallel) -> Iterator[None]:
    """Gradients and the generators' states as before."""
    held = [(parameter, parameter.grad) for parameter in owner.trained.values()]
    devices = [owner.device] if owner.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        drop_gradients(owner)
        yield
    for parameter, gradient in held:
        parameter.grad = gradient


def _copy_per_byte(device: torch.device) -> float:
    """Seconds per byte of copying what is in no cache."""
    source, target = (torch.zeros(8 * _MEBI // 4, device=device) for _ in range(2))
    spent: list[float] = []
    for _ in range(5):
        start = wall(device)
        target.copy_(source)
        spent.append(wall(device) - start)
    return median(spent) / source.nbytes


def _update_per_byte(optimizer: torch.optim.Optimizer, most: int) -> float:
    """Seconds of the optimizer's step per byte of parameters, timed on copies of some of them.

    Zero for optimizers that are not torch's own: what else they would touch is not known.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return 0.0
    copied = copy.copy(optimizer)
    copied.state = defaultdict(dict)
    copied.param_groups, size = [], 0
    for group in optimizer.param_groups:
        some: list[Tensor] = []
        for parameter in group["params"]:
            if size < most and parameter.requires_grad:
                some.append(parameter.detach().clone())
                some[-1].grad = torch.zeros_like(parameter)
                size += parameter.nbytes
        copied.param_groups.append({**group, "params": some})
    if size == 0:
        return 0.0
    spent: list[float] = []
    device = next(parameter.device for group in copied.param_groups for parameter in group["params"])
    for _ in range(4):
        start = wall(device)
        type(optimizer).step(copied)
        spent.append(wall(device) - start)
    return min(spent) / size
