"""Random programs for the simulator: what they compute means nothing, how their steps wait for each other does."""

from __future__ import annotations

from hypothesis import strategies as st

from sennit.ir.dtype import DType
from sennit.ir.graph import Phase, Ref, Role
from sennit.ir.layout import Layout, Reduction
from sennit.ir.mesh import Mesh
from sennit.ir.program import (
    Buffer,
    Collective,
    CollectiveKind,
    Compute,
    Free,
    Lane,
    LaneInput,
    Program,
    Receive,
    Send,
    Step,
)

__all__ = ["one_lane_programs", "programs"]


class _LaneBuilder:
    def __init__(self, name: str, mesh: Mesh, size: int) -> None:
        self.name, self.mesh, self.size = name, mesh, size
        x = Buffer("x", "x", DType.F32, self.layout())
        self.inputs = (LaneInput(Role.INPUT, x, "x"),)
        self.live = ["x"]
        self.steps: list[Step] = []
        self.count = 0

    def layout(self, axis: str | None = None) -> Layout:
        pending = {axis: Reduction.SUM} if axis is not None else {}
        return Layout.block(self.mesh, (self.size, self.size), {}, pending)

    def fresh(self, axis: str | None = None) -> Buffer:
        self.count += 1
        return Buffer(f"b{self.count}", f"t{self.count}", DType.F32, self.layout(axis))

    def compute(self, kind: str, *names: str) -> None:
        buffer = self.fresh()
        self.steps.append(Compute(kind, tuple(map(Ref, names)), (), (buffer,), Phase.FORWARD, "m", buffer.name))
        self.live.append(buffer.name)

    def reduce(self, name: str, axis: str) -> None:
        part, whole = self.fresh(axis), self.fresh()
        self.steps.append(Compute("sennit.partial", (Ref(name),), (), (part,), Phase.FORWARD))
        self.steps.append(Collective(CollectiveKind.ALL_REDUCE, part.name, whole, (axis,)))
        self.live.append(whole.name)

    def lane(self) -> Lane:
        return Lane(self.name, self.mesh.devices, self.inputs, tuple(self.steps), ())


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """One or two lanes on up to eight devices. Actions are drawn in one global order, so that nothing deadlocks."""
    dp, tp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2)]))
    count = draw(st.integers(1, 2))
    size = draw(st.sampled_from([64, 512, 2048]))
    lanes = []
    for number in range(count):
        devices = tuple(range(number * dp * tp, (number + 1) * dp * tp))
        lanes.append(_LaneBuilder(f"lane{number}", Mesh.make({"dp": dp, "tp": tp}, devices=devices), size))
    for _ in range(draw(st.integers(1, 14))):
        lane = draw(st.sampled_from(lanes))
        name = draw(st.sampled_from(lane.live))
        match draw(st.sampled_from(["product", "sum", "view", "dp", "tp", "send", "free"])):
            case "product":
                lane.compute("aten.mm.default", name, draw(st.sampled_from(lane.live)))
            case "sum":
                lane.compute("aten.add.Tensor", name, draw(st.sampled_from(lane.live)))
            case "view":
                lane.compute("aten.view.default", name)
            case "dp" | "tp" as axis:
                lane.reduce(name, axis)
            case "send" if count == 2:
                other = lanes[1] if lane is lanes[0] else lanes[0]
                buffer = other.fresh()
                lane.steps.append(Send(name, other.name))
                other.steps.append(Receive(buffer, lane.name))
                other.live.append(buffer.name)
            case "free" if len(lane.live) > 1:
                lane.live.remove(name)
                lane.steps.append(Free(name))
            case _:
                pass
    return Program("random", tuple(lane.lane() for lane in lanes))


@st.composite
def one_lane_programs(draw: st.DrawFn) -> Program:
    """Tensor parallel on four devices of a node: its transfers are on one stream, so that they never contend."""
    lane = _LaneBuilder("all", Mesh.make({"tp": 4}), draw(st.sampled_from([64, 512, 2048])))
    for _ in range(draw(st.integers(1, 12))):
        name = draw(st.sampled_from(lane.live))
        if draw(st.booleans()):
            lane.compute("aten.mm.default", name, draw(st.sampled_from(lane.live)))
        else:
            lane.reduce(name, "tp")
    return Program("random", (lane.lane(),))
