"""What one unit costs under one way to split it: read off the program that the compiler makes of the shallow graph.

`probe` propagates and lowers a plan of the shallow graph, and puts one device of it on the clock: operators cost what
`sennit.cost` says of their local pieces, collectives what all their groups together take on the cluster's wires
(`sim/transfers.py`), and a step starts when what it waits for has ended (`sim/lane.py`). What the model calls
`scaled_dot_product_attention` is one kernel there and another for its derivative, as eager torch runs it on a GPU
(`kernels/attention.py`), unless the mathematical form is asked for. There is no other cost model. The batch lies over
an axis `dp` that is as large as the number of micro-batches of all replicas: so a device sees one micro-batch of the
size that is asked for, and the plan needs no time axis. Sums of weight gradients are made once a step and not for every
micro-batch: they take no time here, and `sync` has those over other axes than `dp`, whose size is not known yet.

Of each item, for one unit and one micro-batch on one device:

    F = by how much its forward steps move the end of all steps before them
    B = the same backward, with the steps of W taking no time
    W = the seconds of the backward steps that lead to gradients of its own parameters and to nothing else
    together = B and W where they are not apart: W then runs while B waits for collectives

    accumulate    seconds to add its weight gradients to those of earlier micro-batches
    activations   bytes made by its forward and read by a backward
    working       the most that is live while its backward runs, beyond what was there when it began
    sends         bytes of what a later item reads forward
    parameters, gradients, state: bytes that are there all the time
    tied          bytes of parameters that an earlier item reads first: they are held again where that one lies on other devices
    tensors       how many parameters it trains: as many messages scatter their gradients, where replicas share
    messages      how many messages gather its parameters (`kernels/gathers.py`, with the largest bucket: so it is from 800 MB of parameters on)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sennit.cluster import Cluster, Topology
from sennit.cost import memory_time
from sennit.ir.dtype import DType, TensorType
from sennit.ir.event import MemoryKind
from sennit.ir.graph import Graph, OutputKind, Phase, Role
from sennit.ir.layout import Split
from sennit.ir.mesh import Mesh
from sennit.ir.operators import is_local_move
from sennit.ir.program import Buffer, Collective, CollectiveKind, Compute, Lane, Step
from sennit.kernels import fuse_attention
from sennit.kernels.buckets import MOST_BYTES
from sennit.kernels.gathers import message_count
from sennit.plan.lower import lower
from sennit.plan.plan import Plan
from sennit.plan.propagate import propagate
from sennit.plan.search.shallow import Shallow
from sennit.sim.lane import LaneCode, compile_lane
from sennit.sim.local import LocalTypes, Machine, StepCosts, Types
from sennit.sim.optimizer import Optimizer
from sennit.sim.transfers import Transfers

__all__ = ["ItemCost", "Wires", "probe"]


@dataclass(frozen=True, slots=True)
class ItemCost:
    """Seconds and bytes of one unit, by the module's text.

    `compute` and `talk` are what F, B and W hold of operators and of collectives, waited for or not; `wire_bytes` is
    what the device sends in them.
    """

    forward: float
    backward: float
    weights: float
    together: float
    compute: float
    talk: float
    wire_bytes: int
    accumulate: float
    sync: float
    activations: int
    working: int
    sends: int
    parameters: int
    gradients: int
    state: int
    tied: int = 0
    tensors: int = 1
    messages: int = 1

    @property
    def seconds(self) -> float:
        return self.forward + self.together


class Wires:
    """Seconds that collectives and transfers take on a cluster when all groups of one shape run at once."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.topology = cluster, Topology.of(cluster)
        self.transfers = Transfers(self.topology, None)
        self.meshes: dict[tuple[int, int], Mesh] = {}
        self.sizes: dict[int, TensorType] = {}
        self.found: dict[tuple[CollectiveKind, int, int, int], tuple[float, int]] = {}

    def collective(self, kind: CollectiveKind, stride: int, count: int, size: int) -> float:
        """Groups of `count` devices, `stride` apart; `size` as in `cost/transfer.py`."""
        return self._collective(kind, stride, count, size)[0]

    def wire_bytes(self, kind: CollectiveKind, stride: int, count: int, size: int) -> int:
        return self._collective(kind, stride, count, size)[1]

    def _collective(self, kind: CollectiveKind, stride: int, count: int, size: int) -> tuple[float, int]:
        if count == 1 or size == 0:
            return 0.0, 0
        if size <= _LARGE:
            return self._exactly(kind, stride, count, size)
        # beyond, bandwidth alone decides: a line through two sizes, or a search on a thousand devices spends its time
        # here
        (low, sent), (high, more) = (self._exactly(kind, stride, count, point) for point in (_LARGE, 16 * _LARGE))
        share = (size - _LARGE) / (15 * _LARGE)
        return low + share * (high - low), int(sent + share * (more - sent))

    def _exactly(self, kind: CollectiveKind, stride: int, count: int, size: int) -> tuple[float, int]:
        key = (kind, stride, count, size)
        if key not in self.found:
            mesh = self._mesh(stride, count)
            party = self.transfers.party(mesh, ("group",), mesh.devices)
            moved = self.sizes.setdefault(size, _bytes(size))
            bundle = self.transfers.collective(kind, party, moved)
            self.found[key] = (bundle.latency + bundle.drain, bundle.wire_bytes)
        return self.found[key]

    def send(self, distance: int, devices: int, size: int) -> float:
        """From each of `devices` devices to the one `distance` behind it, at once."""
        if size == 0 or distance + devices > self.cluster.devices:
            return 0.0
        bundle = self.transfers.pairs(tuple((device, device + distance) for device in range(devices)), size)
        return bundle.latency + bundle.drain

    def _mesh(self, stride: int, count: int) -> Mesh:
        if (stride, count) not in self.meshes:
            outer = max(1, self.cluster.devices // (stride * count))
            self.meshes[stride, count] = Mesh.make({"outer": outer, "group": count, "inner": stride})
        return self.meshes[stride, count]


_LARGE = 1 << 26  # bytes


def _bytes(size: int) -> TensorType:
    return TensorType((size,), DType.I8)


def probe(
    model: Shallow,
    planner: Callable[[Graph, Mesh], Plan],
    mesh: Mesh,
    wires: Wires,
    optimizer: Optimizer,
    serial: Mapping[str, int] | None = None,
    *,
    fused_attention: bool = True,
) -> tuple[ItemCost, ...]:
    """The costs of each item of the model under a plan on this mesh.

    `serial` names axes whose pieces one device runs one after another (co-shard), with their sizes: compute counts for
    all pieces, sums over the axis are made where they lie.
    """
    plan = planner(model.graph, mesh)
    program = lower(propagate(plan))
    (lane,) = (fuse_attention(program) if fused_attention else program).lanes
    code = compile_lane(lane, blocking=False)
    types = LocalTypes().of(code, lane.devices[0])
    clock = _Clock(model, plan, lane, code, types, wires, serial or {})
    return tuple(clock.cost(number, optimizer) for number in range(len(model.items)))


class _Clock:
    """One device of a lowered shallow graph, with the seconds of each of its jobs and the item that each belongs to."""

    def __init__(
        self,
        model: Shallow,
        plan: Plan,
        lane: Lane,
        code: LaneCode,
        types: Types,
        wires: Wires,
        serial: Mapping[str, int],
    ) -> None:
        self.model, self.lane, self.code, self.types, self.wires, self.serial = model, lane, code, types, wires, serial
        self.mesh = plan.mesh
        graph = plan.graph  # recomputation adds operators to it
        self.phase = {value.name: op.phase for op in graph.ops for value in op.results}
        self.item = _items(model, graph)
        self.weights = _weight_gradients(graph, self.item)
        self.read_by = [(model.item_of[op.name], op.phase, op.reads) for op in model.graph.ops]
        self.reads = self._parameters()
        self.crossing = self._crossing()
        self.device = Machine(wires.cluster.device)
        self.computes = dict(zip(code.computes, StepCosts().of(code, types, self.device), strict=True))
        self.readers: dict[str, int] = {}  # the first job that reads a buffer
        for number, job in enumerate(code.jobs):
            for name in job.reads:
                self.readers.setdefault(name, number)
        self.seconds = [
            self.computes[number] * self._pieces(number) if number in self.computes else self._talk(number)
            for number in range(len(code.jobs))
        ]
        self.place = [self._place(number) for number in range(len(code.jobs))]
        self.whole = self._run(self.seconds)
        self.without = self._run(
            [0.0 if self._is_weights(number) else seconds for number, seconds in enumerate(self.seconds)]
        )

    def _parameters(self) -> list[set[str]]:
        """The parameters that each item reads, by buffer."""
        named = {entry.buffer.tensor: entry.buffer.name for entry in self.lane.inputs if entry.role is Role.PARAM}
        found: list[set[str]] = [set() for _ in self.model.items]
        for item, _, names in self.read_by:
            found[item].update(named[name] for name in names if name in named)
        return found

    def _crossing(self) -> list[int]:
        """Bytes of each item's forward results that a later item reads forward."""
        crossing: list[set[str]] = [set() for _ in self.model.items]
        for item, phase, names in self.read_by:
            for name in names if phase is Phase.FORWARD else ():
                if self.phase.get(name) is Phase.FORWARD and self.item[name] < item:
                    crossing[self.item[name]].add(name)
        sizes: dict[str, int] = {}
        for name, buffer in self.code.buffers.items():
            sizes[buffer.tensor] = min(sizes.get(buffer.tensor, 1 << 62), self.types[name].bytes)
        return [sum(sizes.get(name, 0) for name in names) for names in crossing]

    def _talk(self, number: int) -> float:
        step = self.code.jobs[number].step
        assert isinstance(step, Collective), f"{step} in a shallow graph on one lane"
        if self._is_sync(step):
            return 0.0
        return self._alone(step)

    def _alone(self, step: Collective) -> float:
        size = self._moved(step)
        if any(axis in self.serial for axis in step.axes):  # pieces of one device: summed in its memory
            rate = self.wires.cluster.device.bandwidth.value * self.wires.cluster.device.bandwidth_efficiency.value
            return 3 * size / rate
        stride, count = self._group(step.axes)
        return self.wires.collective(step.kind, stride, count, size)

    def _moved(self, step: Collective) -> int:
        is_input = step.kind in (CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL)
        return self.types[step.source if is_input else step.result.name].bytes

    def _group(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """How far apart the devices of a group are, not counting axes whose pieces share a device; and how many there
        are.
        """
        stride, count = 1, 1
        for axis in reversed(self.mesh.space):
            if axis.name in axes:
                count *= axis.size
            elif count == 1 and axis.name not in self.serial:
                stride *= axis.size
        return stride, count

    def _is_sync(self, step: Collective) -> bool:
        """Whether it completes a weight gradient."""
        return "dp" in step.axes or step.result.tensor in self.weights

    def _pieces(self, number: int) -> int:
        """How many pieces of the work the device runs one after another: those of the serial axes that split it."""
        step, count = self.code.jobs[number].step, 1
        assert isinstance(step, Compute)
        for axis, size in self.serial.items():
            names = (*self.code.jobs[number].reads, *(buffer.name for buffer in step.results))
            if any(self.code.buffers[name].layout.entry(axis) is not None for name in names):
                count *= size
        return count

    def _held(self, name: str) -> int:
        """Bytes of a buffer, with those of all its pieces that one device holds."""
        size, layout = self.types[name].bytes, self.code.buffers[name].layout
        for axis, count in self.serial.items():
            size *= count if isinstance(layout.entry(axis), Split) else 1
        return size

    def _place(self, number: int) -> tuple[int, Phase]:
        """The item and phase of a job. What only moves data belongs to the job that reads it first."""
        step = self.code.jobs[number].step
        if isinstance(step, Compute) and step.op in self.item and not is_local_move(step.kind):
            return self.item[step.op], step.phase
        result = _result(step)
        while (reader := self.readers.get(result.name)) is not None:
            step = self.code.jobs[reader].step
            if isinstance(step, Compute) and step.op in self.item and not is_local_move(step.kind):
                return self.item[step.op], step.phase
            result = _result(step)
        return self.item.get(result.tensor, 0), self.phase.get(result.tensor, Phase.FORWARD)

    def _is_weights(self, number: int) -> bool:
        step = self.code.jobs[number].step
        return isinstance(step, Compute) and step.op in self.weights

    def _run(self, seconds: list[float]) -> list[float]:
        stop = [0.0] * len(seconds)
        for number, job in enumerate(self.code.jobs):
            stop[number] = max((stop[other] for other in job.waits), default=0.0) + seconds[number]
        return stop

    def cost(self, item: int, optimizer: Optimizer) -> ItemCost:
        jobs = [number for number, place in enumerate(self.place) if place[0] == item]
        weights = sum(self.seconds[number] for number in jobs if self._is_weights(number))
        talk = [number for number in jobs if number not in set(self.code.computes)]
        forward = [number for number in jobs if self.place[number][1] is Phase.FORWARD]
        backward = [number for number in jobs if self.place[number][1] is Phase.BACKWARD]
        activations, working = self._memory(item, backward)
        inputs = self._inputs(item)
        earlier = {name for other in range(item) for name in self.reads[other]}
        return ItemCost(
            forward=self._duration(forward, self.whole),
            backward=self._duration(backward, self.without),
            weights=weights,
            together=self._duration(backward, self.whole),
            compute=sum(self.seconds[number] for number in jobs) - sum(self.seconds[number] for number in talk),
            talk=sum(self.seconds[number] for number in talk),
            wire_bytes=sum(self._wire_bytes(number) for number in talk),
            accumulate=self._accumulate(inputs),
            sync=sum(self._sync(number) for number in talk),
            activations=activations,
            working=working,
            sends=self.crossing[item],
            parameters=sum(self._held(name) for name, _ in inputs),
            gradients=sum(self._held(name) for name, trained in inputs if trained),
            state=sum(self._state(name, optimizer) for name, trained in inputs if trained),
            tied=sum(self._held(name) for name in self.reads[item] & earlier),
            tensors=max(1, sum(trained for _, trained in inputs)),
            messages=max(1, message_count((self._held(name) for name, _ in inputs), MOST_BYTES)),
        )

    def _state(self, name: str, optimizer: Optimizer) -> int:
        return optimizer.bytes(self.types[name]) * self._held(name) // max(1, self.types[name].bytes)

    def _accumulate(self, inputs: list[tuple[str, bool]]) -> float:
        size = sum(self._held(name) for name, trained in inputs if trained)
        return memory_time(3 * size, self.wires.cluster.device)[0]

    def _sync(self, number: int) -> float:
        step = self.code.jobs[number].step
        assert isinstance(step, Collective)
        return self._alone(step) if self._is_sync(step) and "dp" not in step.axes else 0.0

    def _wire_bytes(self, number: int) -> int:
        step = self.code.jobs[number].step
        assert isinstance(step, Collective)
        if self._is_sync(step) or any(axis in self.serial for axis in step.axes):
            return 0
        return self.wires.wire_bytes(step.kind, *self._group(step.axes), self._moved(step))

    def _duration(self, jobs: list[int], stop: list[float]) -> float:
        """By how much these jobs move the end of all that was before them: so the durations of all items add up to the
        whole, also where an item runs several times, between others.
        """
        mine, latest, total = set(jobs), 0.0, 0.0
        for number, end in enumerate(stop):
            if end > latest:
                total += end - latest if number in mine else 0.0
                latest = end
        return total

    def _inputs(self, item: int) -> list[tuple[str, bool]]:
        """The parameters that an item is the first to read, and whether they are trained."""
        trained = {output.path for output in self.lane.outputs if output.kind is OutputKind.GRADIENT}
        earlier = {name for other in range(item) for name in self.reads[other]}
        return [
            (entry.buffer.name, entry.path in trained)
            for entry in self.lane.inputs
            if entry.buffer.name in self.reads[item] and entry.buffer.name not in earlier
        ]

    def _memory(self, item: int, backward: list[int]) -> tuple[int, int]:
        """Activations that wait for a backward, and the most that the item's own backward adds to what waited."""
        turn = min((number for number, place in enumerate(self.place) if place[1] is Phase.BACKWARD), default=0)
        begin, end = (min(backward), max(backward)) if backward else (0, -1)
        kept, changes = 0, dict[int, int]()
        for storage in self.code.storages:
            if storage.kind is not MemoryKind.ACTIVATIONS or storage.made is None:
                continue
            last = max(storage.ends) if storage.ends else len(self.code.jobs)
            mine = self.place[storage.made] == (item, Phase.FORWARD)
            kept += self._held(storage.buffer) if mine and storage.made < turn <= last else 0
            size = self.types[storage.buffer].bytes
            if begin <= storage.made <= end:
                changes[storage.made] = changes.get(storage.made, 0) + size
            if begin <= last <= end and (storage.made >= begin or mine):
                changes[last + 1] = changes.get(last + 1, 0) - size
        live = most = 0
        for number in sorted(changes):
            live += changes[number]
            most = max(most, live)
        return kept, most


def _result(step: Step) -> Buffer:
    """What a step makes first; on one lane every job is an operator or a collective."""
    assert isinstance(step, (Compute, Collective)), f"{step} in a shallow graph on one lane"
    return step.results[0] if isinstance(step, Compute) else step.result


def _items(model: Shallow, graph: Graph) -> dict[str, int]:
    """The item of each value.

    A clone that recomputation made belongs with what it repeats, a part of an operator that was taken apart with the
    part behind it, which has the operator's name.
    """
    found: dict[str, int] = {}
    last = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
    for op in reversed(graph.ops):
        item = model.item_of.get(op.name, model.item_of.get(op.name.removesuffix(".again"), last[op.phase]))
        last[op.phase] = item
        for value in op.results:
            found[value.name] = item
    return found


def _weight_gradients(graph: Graph, item: Mapping[str, int]) -> set[str]:
    """Backward operators that lead to gradients of parameters and to no other item's work."""
    gradients = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    readers: dict[str, list[str]] = {}
    for op in graph.ops:
        for name in op.reads:
            readers.setdefault(name, []).append(op.name)
    found: set[str] = set()
    for op in reversed(graph.ops):
        if op.phase is not Phase.BACKWARD:
            continue
        behind = [reader for value in op.results for reader in readers.get(value.name, ())]
        leads = behind or any(value.name in gradients for value in op.results)
        if leads and all(reader in found and item[reader] == item[op.name] for reader in behind):
            found.add(op.name)
    return found
