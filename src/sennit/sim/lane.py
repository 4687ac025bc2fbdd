"""A lane made ready for the clock: which steps take time, what each waits for, and what memory they hold.

A *job* is a step that takes time: all but views (a `sennit.take` of all that is there is one) and frees. It waits for
the job before it on its stream (an exchange: for the one before it between the same devices), for the jobs that make
what it reads (a view stands for what it looks at) and, on a device that blocks, a transfer waits for the last compute
job before it. Collectives and transfers wait for their partners too; `sim/build.py` sees to that.

**Memory.** A *storage* is what an input or a job allocates; views share it. It is there from the start of its job
(inputs: from the beginning) until every name for it is freed and everything that reads them has ended; a free takes
effect, like the work around it, behind the compute jobs before it. What is never freed stays. Kinds: parameters and
buffers of the model are `parameters`; inputs and tangents `inputs`; results of `sennit.accumulate` and what pieces of a
tensor lie in that the program puts out as a gradient `gradients`; the rest `activations`. `staging` is what a step
holds while it runs: a kernel's own memory (`cost/workspace.py`), and the packed copies of a transfer: of the source for
a send, an exchange, a reduce-scatter and an all-to-all, of the result for an all-gather; an all-reduce works in its
result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.errors import ProgramError
from sennit.ir.event import Category, MemoryKind
from sennit.ir.graph import OutputKind, Phase, Ref, Role
from sennit.ir.memory_order import MemoryOrder, order_of_view
from sennit.ir.mesh import print_ranges
from sennit.ir.operators import is_local_move, is_view
from sennit.ir.program import (
    Buffer,
    Collective,
    CollectiveKind,
    Compute,
    Exchange,
    Free,
    Lane,
    Receive,
    Send,
    Step,
    defines,
    reads,
    stream_of,
)
from sennit.ir.program_regions import is_all

__all__ = ["OPTIMIZER", "Job", "LaneCode", "Storage", "compile_lane"]

OPTIMIZER = "sennit.optimizer"  # the kind of the step that `sim/optimizer.py` costs


@dataclass(frozen=True, slots=True)
class Job:
    """`waits` are positions of jobs of the same lane; `staging` names the buffer that is copied while it runs; `orders`
    are those of the buffers among `reads` that do not lie plainly in memory."""

    step: Step
    stream: str
    category: Category
    name: str
    waits: tuple[int, ...]
    reads: tuple[str, ...]
    staging: str | None = None
    orders: tuple[tuple[str, MemoryOrder], ...] = ()


@dataclass(frozen=True, slots=True)
class Storage:
    """`made` is the job that allocates it (None: an input), `ends` the jobs after which it is gone (None: never)."""

    buffer: str
    kind: MemoryKind
    made: int | None
    ends: tuple[int, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class LaneCode:
    """`computes` and `joints` are the positions of compute jobs and of the others; job `waits_after[i]` waits for job
    `waits_before[i]`."""

    lane: Lane
    jobs: tuple[Job, ...]
    storages: tuple[Storage, ...]
    buffers: dict[str, Buffer]
    computes: tuple[int, ...]
    joints: tuple[int, ...]
    compute_array: NDArray[np.int64]
    waits_before: NDArray[np.int64]
    waits_after: NDArray[np.int64]


def compile_lane(
    lane: Lane, blocking: bool, optimizer: str | None = None, channels: Mapping[str, object] | None = None
) -> LaneCode:
    """`optimizer` names one whose step comes last, on all parameters that have gradients; `channels` tells, by label,
    which exchanges wait for each other.
    """
    walk = _Walk(lane, blocking, channels or {})
    for step in lane.steps:
        walk.step(step)
    if optimizer is not None:
        walk.update(optimizer)
    jobs = tuple(walk.jobs)
    computes = tuple([number for number, job in enumerate(jobs) if job.category is Category.COMPUTE])
    joints = tuple([number for number, job in enumerate(jobs) if job.category is not Category.COMPUTE])
    return LaneCode(
        lane,
        jobs,
        walk.storages(),
        walk.buffers,
        computes,
        joints,
        np.array(computes, dtype=np.int64),
        np.array([before for job in jobs for before in job.waits], dtype=np.int64),
        np.array([number for number, job in enumerate(jobs) for _ in job.waits], dtype=np.int64),
    )


class _Walk:
    """The state of one pass over a lane's steps."""

    def __init__(self, lane: Lane, blocking: bool, channels: Mapping[str, object]) -> None:
        self.lane, self.blocking, self.channels = lane, blocking, channels
        self.buffers = lane.buffers()
        self.jobs: list[Job] = []
        self.made: dict[str, int | None] = {}  # by storage
        self.root: dict[str, str] = {}  # by buffer, the storage it lies in
        self.names: dict[str, set[str]] = {}  # by storage, the names not yet freed
        self.readers: dict[str, list[int]] = {}  # by storage, the transfers that read it
        self.ends: dict[str, tuple[int, ...]] = {}
        self.last: dict[object, int] = {}  # by stream, or by channel
        self.orders: dict[str, MemoryOrder] = {}  # by buffer that does not lie plainly in memory
        for item in lane.inputs:
            self._allocate(item.buffer.name, None)

    def step(self, step: Step) -> None:
        match step:
            case Free(source):
                self._free(source)
            case Compute(kind=kind) if is_view(kind) or self._only_drops_ones(step):
                self._view(step)
            case Compute(kind="sennit.take", args=(Ref(name),), results=(taken,)) if name in self.buffers and is_all(
                self.buffers[name], taken
            ):
                self._same(name, taken, self.orders.get(name))
            case _:
                self._job(step)

    def _only_drops_ones(self, step: Compute) -> bool:
        """Whether it is a reshape that adds or leaves out dims of one element: a view, however its elements lie."""
        match step:
            case Compute(kind="aten.reshape.default", args=(Ref(name), *_), results=(made,)) if name in self.buffers:
                layouts = (self.buffers[name].layout, made.layout)
                if not all(layout.is_even for layout in layouts):
                    return False
                read, result = ([size for size in layout.local_shape() if size != 1] for layout in layouts)
                return read == result
            case _:
                return False

    def _same(self, name: str, buffer: Buffer, order: MemoryOrder | None) -> None:
        """Another name for what lies in memory already."""
        root = self._storage(name)
        self.root[buffer.name] = root
        self.names[root].add(buffer.name)
        if order is not None and not order.is_plain:
            self.orders[buffer.name] = order

    def _allocate(self, name: str, made: int | None) -> None:
        self.root[name], self.made[name], self.names[name], self.readers[name] = name, made, {name}, []

    def _storage(self, name: str) -> str:
        if name not in self.root:
            raise ProgramError(
                f"buffer %{name} is used before it is defined",
                where=f"lane {self.lane.name!r}",
                fix="define it by an input or an earlier step of the same lane",
            )
        return self.root[name]

    def _view(self, step: Compute) -> None:
        first = next((arg for arg in step.args if isinstance(arg, Ref)), None)
        if first is None:
            raise ProgramError(f"{step.kind} looks at no buffer", where=f"lane {self.lane.name!r}")
        self._storage(first.name)  # raises where it is not there
        seen = self.buffers[first.name]
        plain = MemoryOrder.plain(len(seen.layout.shape))
        order = order_of_view(step, self.orders.get(first.name, plain), {first.name: seen.type}, first.name)
        for buffer in step.results:
            self._same(first.name, buffer, order)

    def _job(self, step: Step) -> None:
        position, stream = len(self.jobs), stream_of(step)
        is_compute = isinstance(step, Compute)
        waits: dict[int, None] = {}
        queue: object = ("exchange", self.channels.get(step.label)) if isinstance(step, Exchange) else stream
        if queue in self.last:
            waits[self.last[queue]] = None
        if self.blocking and not is_compute and "compute" in self.last:
            waits[self.last["compute"]] = None
        names = reads(step)
        for name in names:
            root = self._storage(name)
            if (made := self.made[root]) is not None:
                waits[made] = None
            if not is_compute:
                self.readers[root].append(position)
        self.last[queue] = position
        orders = tuple([(name, self.orders[name]) for name in names if name in self.orders])
        self.jobs.append(
            Job(step, stream, _category(step), self._label(step), tuple(waits), names, _staging(step), orders)
        )
        for buffer in defines(step):
            self._allocate(buffer.name, position)

    def update(self, optimizer: str) -> None:
        """The optimizer's step: it reads the parameters and waits for every gradient."""
        gradients = [item.name for item in self.lane.outputs if item.kind is OutputKind.GRADIENT]
        paths = {item.path for item in self.lane.outputs if item.kind is OutputKind.GRADIENT}
        parameters = [item.buffer.name for item in self.lane.inputs if item.role is Role.PARAM and item.path in paths]
        if not parameters:
            return
        waits = {self.last["compute"]: None} if "compute" in self.last else {}
        waits.update((made, None) for name in gradients if (made := self.made[self._storage(name)]) is not None)
        step = Compute(OPTIMIZER, tuple(map(Ref, parameters)), (), (), Phase.BACKWARD, "", optimizer)
        self.last["compute"] = len(self.jobs)
        self.jobs.append(
            Job(step, "compute", Category.COMPUTE, f"optimizer {optimizer}", tuple(waits), tuple(parameters))
        )

    def _free(self, name: str) -> None:
        root = self._storage(name)
        self.names[root].discard(name)
        if self.names[root]:
            return
        ends = dict.fromkeys(self.readers[root])
        if "compute" in self.last:
            ends[self.last["compute"]] = None
        if (made := self.made[root]) is not None:
            ends[made] = None
        self.ends[root] = tuple(ends)

    def storages(self) -> tuple[Storage, ...]:
        gradients = {
            self.buffers[item.name].tensor
            for item in self.lane.outputs
            if item.kind is OutputKind.GRADIENT and item.name in self.buffers
        }
        # a gradient may be a view: what it lies in is then the gradient's memory
        lies_in = {root for name, root in self.root.items() if self.buffers[name].tensor in gradients}
        sums = {
            buffer.name
            for job in self.jobs
            if isinstance(job.step, Compute) and job.step.kind == "sennit.accumulate"
            for buffer in job.step.results
        }
        roles = {item.buffer.name: item.role for item in self.lane.inputs}

        def kind(name: str) -> MemoryKind:
            match roles.get(name):
                case Role.PARAM | Role.BUFFER:
                    return MemoryKind.PARAMETERS
                case Role.INPUT | Role.TANGENT | Role.SEED:
                    return MemoryKind.INPUTS
                case None:
                    is_gradient = name in sums or name in lies_in
                    return MemoryKind.GRADIENTS if is_gradient else MemoryKind.ACTIVATIONS

        return tuple(Storage(name, kind(name), made, self.ends.get(name)) for name, made in self.made.items())

    def _label(self, step: Step) -> str:
        match step:
            case Compute(kind=kind, results=results, phase=phase, module=module, op=op):
                if is_local_move(kind):
                    return f"{kind.removeprefix('sennit.')} {results[0].tensor}{_times(results[0])}"
                short = kind.split(".")[1] if "." in kind else kind
                return f"{module or op or short} {phase.value}{_times(results[0])}"
            case Collective(kind=collective, result=result):
                return f"{collective.value} {result.tensor}{_times(result)}"
            case Send(source, to):
                buffer = self.buffers[source]
                return f"send {buffer.tensor} to {to}{_times(buffer)}"
            case Receive(result, origin):
                return f"receive {result.tensor} from {origin}{_times(result)}"
            case Exchange(source=given, result=taken):
                moved = taken if given is None else self.buffers[given]
                assert moved is not None  # `exchange_meetings` refuses one that neither gives nor takes
                return f"exchange {moved.tensor}{_times(moved)}"
            case Free(source):
                return f"free {source}"


def _times(buffer: Buffer) -> str:
    if not buffer.times:
        return ""
    at = ", ".join(f"{axis} {print_ranges(covered)}" for axis, covered in buffer.times)
    return f" [{at}]"


def _category(step: Step) -> Category:
    match step:
        case Collective():
            return Category.COLLECTIVE
        case Send() | Exchange(result=None):
            return Category.SEND
        case Receive() | Exchange(source=None):
            return Category.RECEIVE
        case Exchange():
            return Category.COLLECTIVE
        case Compute() | Free():
            return Category.COMPUTE


def _staging(step: Step) -> str | None:
    match step:
        case Send(source=source):
            return source
        case Exchange(source=given):
            return given
        case Collective(kind=CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL, source=source):
            return source
        case Collective(kind=CollectiveKind.ALL_GATHER, result=result):
            return result.name
        case _:
            return None
