"""Three small plans with their programs and timelines, made the way a simulator makes them: for the tests of the
report.

A stack of layers is trained data parallel, tensor parallel and as a two-stage 1F1B pipeline on 16 devices. `play` runs
a program's steps in order, compute on one stream and communication on the others, with a fixed cost per step.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from hypothesis import strategies as st

from sennit.ir.dtype import DType
from sennit.ir.graph import Output, OutputKind, Phase, Ref, Role
from sennit.ir.layout import Layout
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
    defines,
    reads,
    stream_of,
)
from sennit.ir.timeline import Category, Event, Memory, MemoryKind, Origin, Timeline
from sennit.report import Comparison, MeasuredRun, PlanResult, SimulatedRun

MIB = 1 << 20


def buffer(name: str, mesh: Mesh, microbatch: int | None = None, shape: tuple[int, ...] = (1024, 1024)) -> Buffer:
    times = () if microbatch is None else (("mb", (microbatch,)),)
    return Buffer(name, name.split("_")[0], DType.F32, Layout(mesh, shape), times)


def compute(kind: str, result: Buffer, source: str, phase: Phase, module: str) -> Compute:
    return Compute(kind, (Ref(source),), (), (result,), phase, module, result.tensor)


def layers(
    mesh: Mesh, first: int, last: int, start: str, phase: Phase, microbatch: int | None, exchange: str | None
) -> list[Step]:
    """Two operators a layer; with `exchange`, an all-reduce over that axis after each."""
    tag = ("f" if phase is Phase.FORWARD else "b") + ("" if microbatch is None else str(microbatch))
    steps: list[Step] = []
    source = start
    order = range(first, last) if phase is Phase.FORWARD else range(last - 1, first - 1, -1)
    for layer in order:
        for part in ("attention", "mlp"):
            result = buffer(f"{part}{layer}_{tag}", mesh, microbatch)
            steps.append(compute("aten.mm.default", result, source, phase, f"layers.{layer}.{part}"))
            source = result.name
            if exchange is not None:
                whole = buffer(f"{part}{layer}_{tag}_sum", mesh, microbatch)
                steps.append(Collective(CollectiveKind.ALL_REDUCE, source, whole, (exchange,)))
                source = whole.name
    return steps


def inputs(mesh: Mesh) -> tuple[LaneInput, ...]:
    return (LaneInput(Role.PARAM, buffer("w", mesh), "layers.0.weight"),)


def one_lane(name: str, mesh_text: str, exchange: str | None, reduce: str, depth: int = 8) -> Program:
    mesh = Mesh.parse(mesh_text)
    forward = layers(mesh, 0, depth, "w", Phase.FORWARD, None, exchange)
    top = defines(forward[-1])[0].name
    steps: list[Step] = list(forward)
    for step in layers(mesh, 0, depth, top, Phase.BACKWARD, None, exchange):
        steps.append(step)
        if isinstance(step, Compute):
            result = buffer(f"{step.results[0].name}_grad", mesh)
            steps.append(Collective(CollectiveKind.ALL_REDUCE, step.results[0].name, result, (reduce,)))
    steps.append(Free(top))
    lane = Lane("all", mesh.devices, inputs(mesh), tuple(steps), (Output(OutputKind.LOSS, top),))
    return Program(name, (lane,))


def pipeline(name: str, devices: int, microbatches: int = 4, depth: int = 8) -> Program:
    """1F1B over two stages: stage 0 runs one micro-batch ahead."""
    half = devices // 2
    meshes = [Mesh.parse(f"dp={half};mb={microbatches}@{s * half}-{(s + 1) * half - 1}") for s in (0, 1)]
    lanes = []
    for stage, mesh in enumerate(meshes):
        steps: list[Step] = []
        low, high = stage * depth // 2, (stage + 1) * depth // 2

        def forward(m: int, stage: int = stage, mesh: Mesh = mesh, low: int = low, high: int = high) -> list[Step]:
            source = buffer(f"h{m}_in", mesh, m)
            before: list[Step] = [Receive(source, "stage0")] if stage == 1 else []
            run = layers(mesh, low, high, source.name if stage == 1 else "w", Phase.FORWARD, m, None)
            return [*before, *run, *([Send(defines(run[-1])[0].name, "stage1")] if stage == 0 else [])]

        def backward(m: int, stage: int = stage, mesh: Mesh = mesh, low: int = low, high: int = high) -> list[Step]:
            source = buffer(f"g{m}_in", mesh, m)
            before: list[Step] = [Receive(source, "stage1")] if stage == 0 else []
            top = source.name if stage == 0 else f"mlp{high - 1}_f{m}"
            run = layers(mesh, low, high, top, Phase.BACKWARD, m, None)
            return [*before, *run, *([Send(defines(run[-1])[0].name, "stage0")] if stage == 1 else [])]

        ahead = 1 - stage
        for m in range(min(ahead, microbatches)):
            steps += forward(m)
        for m in range(microbatches):
            if m + ahead < microbatches:
                steps += forward(m + ahead)
            steps += backward(m)
        total = buffer("grad", mesh)
        steps.append(Collective(CollectiveKind.ALL_REDUCE, f"mlp{low}_b{microbatches - 1}", total, ("dp",)))
        lanes.append(Lane(f"stage{stage}", mesh.devices, inputs(mesh), tuple(steps), ()))
    return Program(name, tuple(lanes))


def play(program: Program, seconds: dict[str, float], bytes: int = 4 * MIB) -> Timeline:
    """Run the steps: `seconds` per forward step, backward step, collective over each axis, transfer."""
    events: list[Event] = []
    memory: list[Memory] = []
    at = {lane.name: 0 for lane in program.lanes}
    done: dict[tuple[str, str], int] = {}  # lane, buffer -> event of the lane's first device
    last: dict[tuple[str, str], int] = {}  # lane, stream -> event
    sent: dict[tuple[str, str], list[int]] = defaultdict(list)
    live = {lane.name: 0 for lane in program.lanes}
    while any(at[lane.name] < len(lane.steps) for lane in program.lanes):
        for lane in program.lanes:
            while at[lane.name] < len(lane.steps):
                step = lane.steps[at[lane.name]]
                causes = [done[lane.name, name] for name in reads(step) if (lane.name, name) in done]
                if isinstance(step, Receive):
                    queue = sent[step.origin, lane.name]
                    if not queue:
                        break
                    causes.append(queue.pop(0))
                at[lane.name] += 1
                if isinstance(step, Free):
                    continue
                stream = stream_of(step)
                if (lane.name, stream) in last:
                    causes.append(last[lane.name, stream])
                cause = max(causes, key=lambda i: events[i].stop, default=None)
                start = events[cause].stop if cause is not None else 0.0
                match step:
                    case Compute(phase=phase):
                        cost, category, wire = seconds[phase.value], Category.COMPUTE, 0
                        live[lane.name] += 24 * MIB if phase is Phase.FORWARD else -24 * MIB
                    case Collective(axes=axes):
                        cost, category, wire = seconds[axes[0]], Category.COLLECTIVE, bytes
                    case Send():
                        cost, category, wire = seconds["transfer"], Category.SEND, bytes
                    case Receive():
                        cost, category, wire = seconds["transfer"] / 4, Category.RECEIVE, 0
                here = len(events)
                name = step.source if isinstance(step, Send) else defines(step)[0].name
                for offset, device in enumerate(lane.devices):
                    same = None
                    if cause is not None:
                        same = cause + offset
                    events.append(Event(device, stream, category, name, start, start + cost, wire, same))
                    kinds = ((MemoryKind.PARAMETERS, 300 * MIB), (MemoryKind.ACTIVATIONS, live[lane.name]))
                    kinds += ((MemoryKind.GRADIENTS, 300 * MIB),)
                    memory.append(Memory(device, start, kinds))
                last[lane.name, stream] = here
                for result in defines(step):
                    done[lane.name, result.name] = here
                if isinstance(step, Send):
                    sent[lane.name, step.to].append(here)
    return Timeline(program.name, Origin.SIMULATED, tuple(events), tuple(memory))


def slower(seconds: dict[str, float], factor: float) -> dict[str, float]:
    return {name: value * factor for name, value in seconds.items()}


def sample_comparison(depth: int = 8) -> Comparison:
    """Data parallel wins; the tensor-parallel run differs by rounding, the pipeline by nothing."""
    dp = {"forward": 40e-6, "backward": 80e-6, "dp": 95e-6, "transfer": 30e-6}
    tp = {"forward": 12e-6, "backward": 24e-6, "tp": 60e-6, "dp": 20e-6, "transfer": 30e-6}
    pp = {"forward": 22e-6, "backward": 44e-6, "dp": 150e-6, "transfer": 30e-6}
    programs = {
        "data parallel": (one_lane("data parallel", "dp=16", None, "dp", depth), dp, "dp=16"),
        "tensor parallel": (one_lane("tensor parallel", "dp=2,tp=8", "tp", "dp", depth), tp, "dp=2,tp=8"),
        "pipeline 1F1B": (pipeline("pipeline 1F1B", 16, 4, depth), pp, "pp=2,dp=8"),
    }
    small = {
        "data parallel": (one_lane("data parallel", "dp=4", None, "dp", depth), "dp=4"),
        "tensor parallel": (one_lane("tensor parallel", "dp=1,tp=4", "tp", "dp", depth), "tp=4"),
        "pipeline 1F1B": (pipeline("pipeline 1F1B", 4, 4, depth), "pp=2,dp=2"),
    }
    measured = {
        "data parallel": MeasuredRun(4, "gloo", (0.062, 0.060, 0.071), 2.4e-7, "layers.0.weight", 1e-5, 11, 27),
        "tensor parallel": MeasuredRun(4, "gloo", (0.145, 0.150, 0.148), 9.5e-7, "loss", 1e-5, 3, 27),
        "pipeline 1F1B": MeasuredRun(4, "gloo", (0.098,), 0.0, "loss", 1e-5, 27, 27),
    }
    summaries = {
        "data parallel": "batch split over 16 devices, gradients all-reduced",
        "tensor parallel": "heads and hidden split over 8, batch over 2",
        "pipeline 1F1B": "2 stages of 8 devices, 4 micro-batches",
    }
    results = []
    for name, (program, cost, mesh) in programs.items():
        big = SimulatedRun("2x8 H100", mesh, renamed(play(program, cost), f"{name} on 2x8 H100"), program)
        shrunk, shrunk_mesh = small[name]
        time = play(shrunk, slower(cost, 25))
        laptop = SimulatedRun("laptop", shrunk_mesh, renamed(time, f"{name} on laptop"), shrunk)
        results.append(PlanResult(name, summaries[name], (big, laptop), measured[name], laptop))
    return Comparison("GPT", "8 layers, 512 wide, 8 heads, 28.3 M parameters", 0.081, tuple(results))


def renamed(timeline: Timeline, name: str) -> Timeline:
    return replace(timeline, name=name)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Events one after another on each stream of a few devices, with and without gaps."""
    events = []
    kinds = {"compute": Category.COMPUTE, "collective dp": Category.COLLECTIVE, "send b": Category.SEND}
    for device in range(draw(st.integers(1, 3))):
        for stream, category in kinds.items():
            clock = 0.0
            for position in range(draw(st.integers(0, 6))):
                start = clock + draw(st.sampled_from([0.0, 1e-9, 3.3e-7, 0.7e-3]))
                clock = start + draw(st.sampled_from([0.0, 1e-9, 1.0005e-6, 0.3e-3, 1 / 3]))
                events.append(Event(device, stream, category, f"{stream}{position}", start, clock, 8))
    return Timeline("random", Origin.SIMULATED, tuple(events))
