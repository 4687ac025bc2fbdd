"""Running a redistribution on torch.distributed: each rank calls it with its piece and gets its piece of the target.

    executor = Executor()
    piece = executor.run(redistribution, local)                # or .start(...), and .wait() later

Device d of the layouts is rank d of the default process group. A rank outside the source's mesh passes an empty tensor
of the right dtype; a rank outside the target's gets one back. Any backend serves that has isend and irecv (gloo, NCCL,
...).

**Memory.** Of a step that goes point to point, the input, the output and at most `staging` bytes are held (8 MiB unless
told; a `budget` lowers it for one redistribution): `wire_torch.py` cuts what must be packed. Less staging is slower,
since ranks wait for each other more often. A step over a process group (accelerators) packs its whole input and output
when they are not contiguous. A redistribution of several steps lets go of a step's input when its output is there.

**Shared memory.** Where the participants of a redistribution are all on one host, CPU tensors go through memory that
they share (`shared_torch.py`), if the executor was made with a maker of it (`shared`); `current_executor` is. The
participants decide it at the first redistribution among them, by two small messages between each two. Elsewhere, and
where it cannot be had (no compiled core, another container, tensors of an accelerator), everything goes by messages of
the backend; one line of the log says why. `staging` is then the size of this rank's shared memory, which is kept as
long as the executor.

**Order.** Redistributions that are under way finish in the order in which they were started: waiting for one first
finishes those before it. So ranks that start the same redistributions in the same order do not deadlock, in whatever
order they wait.

**Same plan everywhere.** Planning is a pure function, so ranks that pass the same layouts run the same steps. Ranks
that do not (a shape that differs by one, a version of the library) would exchange messages that do not match. So with
`check`, before a plan runs for the first time, every participant sends a digest of it to the lowest rank, which
compares and answers. A rank that planned something else is named on every rank; one that does not come is named after
the time limit. Nothing of the plan has been sent then.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.errors import LayoutError, RunError
from sennit.ir.layout import Layout, Reduction
from sennit.reshard.groups_torch import Groups, Transport, collective
from sennit.reshard.lower_torch import Cut, Fill, Move, Operation, Together, lower, region_of, transposed
from sennit.reshard.planner import plan
from sennit.reshard.redistribution import Redistribution
from sennit.reshard.shared import SharedMaker
from sennit.reshard.shared_torch import SharedWire
from sennit.reshard.timing import Timing
from sennit.reshard.wire_torch import Wire, traffic_of

__all__ = ["EXECUTORS", "Executor", "Executors", "Lowered", "Running", "chunk_of", "current_executor", "make_lowered"]

_CHUNKS_STAGED = 8  # a chunk is this part of the staging memory, so that several peers are served at once
_DIGEST = 4  # 64-bit words
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Lowered:
    """What this rank runs for one redistribution, and how the ranks name it."""

    operations: tuple[Operation, ...]
    participants: tuple[int, ...]
    digest: bytes
    text: str
    traffic: Mapping[tuple[int, bool], int]
    staging: int
    given: tuple[int, ...] | None  # this rank's piece of the source; None where it has none
    result: tuple[int, ...] | None


class Running:
    """A redistribution under way.

    `wait` returns this rank's piece of the target; `done` says whether it would return at once.
    """

    def __init__(self, executor: Executor, steps: Generator[None, None, Tensor]) -> None:
        self._executor, self._steps = executor, steps
        self._result: Tensor | None = None
        self._advance()

    @property
    def done(self) -> bool:
        return self._result is not None

    def wait(self) -> Tensor:
        self._executor.finish_until(self)
        assert self._result is not None
        return self._result

    def _advance(self) -> None:
        """To the next place where it waits."""
        try:
            next(self._steps)
        except StopIteration as stop:
            self._result = stop.value

    def finish(self) -> None:
        while not self.done:
            self._advance()


class Executor:
    """This rank's end.

    Make one per default process group and use it for all redistributions (`current_executor` keeps one).
    """

    def __init__(
        self,
        *,
        staging: int = 8 << 20,
        timeout: float = 120.0,
        check: bool = True,
        transport: Transport = Transport.AUTO,
        timing: Timing | None = None,
        shared: SharedMaker | None = None,
        remembered: int = 1024,
    ) -> None:
        if not dist.is_initialized():
            raise RunError(
                "there is no process group",
                fix="call torch.distributed.init_process_group first, or run the script under torchrun",
            )
        self.rank = dist.get_rank()
        self.check, self.staging, self.timing, self.remembered = check, staging, timing, remembered
        self.wire = Wire(timeout)
        self.groups = Groups(timeout, transport, timing)
        self.shared: SharedWire | None = None
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._agreed: set[bytes] = set()
        self._under_way: list[Running] = []
        self._lock = threading.RLock()  # backward passes may run on threads of autograd's
        if shared is not None:
            self.share(shared)

    def share(self, make: SharedMaker) -> None:
        """Use shared memory from the next redistribution on, unless that was ruled out.

        All ranks call it at the same place.
        """
        if self.shared is None and self.groups.transport is Transport.AUTO:
            made = partial(make, self.rank, dist.get_world_size(), self.staging)
            self.shared = SharedWire(self.rank, made, self.wire.timeout)

    def use(self, timing: Timing) -> None:
        """Choose plans by these costs from now on. All ranks call it at the same place, with the same figures."""
        with self._lock:
            self.timing = self.groups.timing = timing
            self._kept.clear()  # plans of before were chosen by others

    # ---- running -----------------------------------------------------------------------------------------------------

    def run(self, redistribution: Redistribution, local: Tensor) -> Tensor:
        return self.start(redistribution, local).wait()

    def start(
        self, redistribution: Redistribution, local: Tensor, *, budget: int | None = None, adjoint: bool = False
    ) -> Running:
        """Post what can be posted.

        `local` must not change until `wait`. With a budget, that many bytes are staged at most where that is less than
        `staging`; the adjoint takes a gradient of the target to one of the source.
        """
        return self.start_lowered(self.lowered(redistribution, local.element_size(), budget, adjoint=adjoint), local)

    def start_lowered(self, lowered: Lowered, local: Tensor, into: Tensor | None = None) -> Running:
        """The same for what was lowered before. One move may write `into` a contiguous tensor."""
        if lowered.given is not None and tuple(local.shape) != lowered.given:
            raise LayoutError(
                f"rank {self.rank} passes a piece of shape {list(local.shape)}, and the source gives it "
                f"{list(lowered.given)}",
                where=lowered.text.splitlines()[0],
                fix="pass the piece of the source layout, or correct the layout",
            )
        with self._lock:
            if self.check and lowered.digest not in self._agreed:
                self.finish_until(None)
                self._agree(lowered, local.device)
                self._agreed.add(lowered.digest)
            if local.device.type != "cpu":
                # accelerators' backends match messages by order, not by tag; finishing there does not block the host
                self.finish_until(None)
            running = Running(self, self._steps(lowered, local.detach(), into, self._wire_for(lowered, local)))
            if not running.done:
                self._under_way.append(running)
            return running

    def _wire_for(self, lowered: Lowered, local: Tensor) -> Wire | SharedWire:
        """The same answer on all participants."""
        if self.shared is None or local.device.type != "cpu":
            return self.wire
        if not self.shared.knows(lowered.participants):
            self.finish_until(None)  # they must not wait for a rank that is asked here
        return self.shared if self.shared.reaches(lowered.participants, self.wire) else self.wire

    def finish_until(self, running: Running | None) -> None:
        """Finish everything that was started before `running`, and it; everything, for None."""
        with self._lock:
            while self._under_way and not (running is not None and running.done):
                self._under_way.pop(0).finish()

    def _steps(
        self, lowered: Lowered, tensor: Tensor, into: Tensor | None, wire: Wire | SharedWire
    ) -> Generator[None, None, Tensor]:
        assert into is None or (len(lowered.operations) == 1 and into.is_contiguous())
        send = _opened(wire, lowered)
        for operation in lowered.operations:
            match operation:
                case Fill(_, op, keeps):
                    tensor = tensor if keeps else torch.full_like(tensor, _identity(op, tensor.dtype))
                case Move():
                    tensor = yield from send(operation, tensor, into)
                case Together():
                    group = self.groups.serve(operation, tensor) if wire is self.wire else None
                    if group is not None:
                        tensor = yield from collective(operation, tensor, group, self.wire.timeout)
                    else:
                        for move in operation.point_to_point:
                            tensor = yield from send(move, tensor, None)
                        tensor = tensor.view(operation.shape)
        return tensor if lowered.result is not None else tensor.new_empty((0,))

    # ---- plans -------------------------------------------------------------------------------------------------------

    def planned(self, source: Layout, target: Layout, itemsize: int, budget: int | None = None) -> Redistribution:
        """The plan between two layouts, made once."""
        key = ("plan", source, target, itemsize, budget)
        return self.kept(key, lambda: plan(source, target, itemsize=itemsize, budget=budget, timing=self.timing))

    def lowered(
        self, redistribution: Redistribution, itemsize: int, budget: int | None = None, *, adjoint: bool = False
    ) -> Lowered:
        """What this rank runs, computed once for each redistribution and item size."""
        staging = self.staged(budget)
        key = (redistribution.source, redistribution.target, redistribution.steps, itemsize, staging, adjoint)
        return self.kept(key, lambda: self._lower(redistribution, itemsize, staging, adjoint=adjoint))

    def kept(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value kept under a key, which names its type.

        The oldest of more than `remembered` are forgotten; agreements are not, since ranks of different meshes forget
        at different times, and a check needs all of them.
        """
        found: Value | None = self._kept.get(key)
        if found is None:
            found = self._kept[key] = make()
            if len(self._kept) > self.remembered:
                self._kept.popitem(last=False)
        else:
            self._kept.move_to_end(key)
        return found

    def staged(self, budget: int | None) -> int:
        return self.staging if budget is None else min(self.staging, budget)

    def _lower(self, redistribution: Redistribution, itemsize: int, staging: int, *, adjoint: bool) -> Lowered:
        source, target = redistribution.source, redistribution.target
        self.check_ranks(source, target)
        operations = lower(redistribution, self.rank, Cut(chunk_of(staging, itemsize), in_place=not adjoint))
        text = _text(redistribution, itemsize, staging)
        given, result = _shape(source, self.rank), _shape(target, self.rank)
        if adjoint:
            operations, text, given, result = transposed(operations), f"adjoint of {text}", result, given
        participants = tuple(sorted({*source.mesh.devices, *target.mesh.devices}))
        return make_lowered(operations, participants, text, staging, given, result)

    def check_ranks(self, *layouts: Layout) -> None:
        world = dist.get_world_size()
        for layout in layouts:
            beyond = [device for device in layout.mesh.devices if device >= world]
            if beyond:
                raise LayoutError(
                    f"layout {layout} is on devices {beyond} too, and there are {world} ranks",
                    where=f"mesh {layout.mesh}",
                    fix=f"use devices 0 to {world - 1}: device d is rank d",
                )
            if layout.mesh.time:
                raise LayoutError(
                    f"layout {layout} has time axes, and a redistribution runs in space",
                    where=f"mesh {layout.mesh}",
                    fix="pass the layout of one pass",
                )

    def _agree(self, lowered: Lowered, device: torch.device) -> None:
        """All participants have the same plan, or `RunError` on all of them."""
        if self.rank not in lowered.participants or len(lowered.participants) < 2:
            return
        lead, *others = lowered.participants
        own = torch.frombuffer(bytearray(lowered.digest), dtype=torch.int64).to(device)
        purpose = f"agreement on the plan {lowered.text.splitlines()[0]}"
        if self.rank != lead:
            self.wire.send(own, lead, purpose)
            deviates = self.wire.receive((len(others),), torch.int64, device, lead, purpose).bool().tolist()
        else:
            received = [self.wire.receive((_DIGEST,), torch.int64, device, other, purpose) for other in others]
            deviates = [not torch.equal(digest, own) for digest in received]
            verdict = torch.tensor(deviates, dtype=torch.int64, device=device)
            for other in others:
                self.wire.send(verdict, other, purpose)
        wrong = [other for other, different in zip(others, deviates, strict=True) if different]
        if wrong:
            raise RunError(
                f"ranks {wrong} plan something else than rank {lead}; nothing was sent",
                where=f"rank {self.rank} plans:\n{lowered.text}",
                fix="call with the same layouts, item size, budget and library version on every rank",
            )


def _opened(
    wire: Wire | SharedWire, lowered: Lowered
) -> Callable[[Move, Tensor, Tensor | None], Generator[None, None, Tensor]]:
    """Moves of a redistribution on a wire, in order."""
    if isinstance(wire, SharedWire):
        shared_channel = wire.open(lowered.traffic, lowered.staging)
        return lambda move, tensor, into: wire.run(move, tensor, shared_channel, into)
    channel = wire.open(lowered.traffic, lowered.staging)
    return lambda move, tensor, into: wire.run(move, tensor, channel, into)


def make_lowered(
    operations: tuple[Operation, ...],
    participants: tuple[int, ...],
    text: str,
    staging: int,
    given: tuple[int, ...] | None,
    result: tuple[int, ...] | None,
) -> Lowered:
    moves: list[Move] = []
    for operation in operations:
        if isinstance(operation, Move):
            moves.append(operation)
        elif isinstance(operation, Together):
            moves += operation.point_to_point
    digest = hashlib.sha256(text.encode()).digest()
    return Lowered(operations, participants, digest, text, traffic_of(moves), staging, given, result)


def chunk_of(staging: int, itemsize: int) -> int:
    """Elements of a packed message at most."""
    return max(1, staging // _CHUNKS_STAGED // itemsize)


def _text(redistribution: Redistribution, itemsize: int, staging: int) -> str:
    source, target = redistribution.source, redistribution.target
    lines = [f"{source} on {source.mesh} -> {target} on {target.mesh}, {itemsize} bytes an item, staging {staging}"]
    for step in redistribution.steps:
        part = "" if step.region is None else f" in {step.region}"
        lines.append(
            f"{step.kind.value} {','.join(step.axes)}: {step.source} on {step.source.mesh} -> "
            f"{step.result} on {step.result.mesh}{part}"
        )
    return "\n".join(lines)


def _shape(layout: Layout, device: int) -> tuple[int, ...] | None:
    region = region_of(layout, device)
    return None if region is None else region.shape


def _identity(op: Reduction, dtype: torch.dtype) -> float:
    match op:
        case Reduction.SUM:
            return 0
        case Reduction.PROD:
            return 1
        case Reduction.MAX:
            return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min
        case Reduction.MIN:
            return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


class Executors:
    """One executor per default process group, dropped with it.

    `shared` makes the memory that ranks of one host share; the package's public face puts it in, since it comes from a
    folder above this one.
    """

    def __init__(self) -> None:
        self.shared: SharedMaker | None = None
        self._of: weakref.WeakKeyDictionary[dist.ProcessGroup, Executor] = weakref.WeakKeyDictionary()

    def current(self) -> Executor:
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is None:
            return Executor()  # raises, with the remedy
        executor = self._of.get(world)
        if executor is None:
            executor = self._of[world] = Executor()
        if self.shared is not None:
            executor.share(self.shared)  # also where it was made before the public face was used
        return executor


# The one-line use has nowhere else to keep plans, message counts and process groups, which must outlive a call.
EXECUTORS = Executors()


def current_executor() -> Executor:
    """The executor of the default process group."""
    return EXECUTORS.current()
