"""How fast the simulator is, in events of the timeline a second on one core, the making of the Timeline included.

    python benchmarks/sim/speed.py [--only events growth gpt3]

**events**: a data- and tensor-parallel program of 16 and of 512 devices and a pipeline of four stages, each folded (one
device stands for its lane, where exact) and unfolded (every device for itself). **growth**: the first on 8 to 16384
devices. **gpt3**: a step of GPT-3 175B on 512 devices, and on 8192. Times are CPU seconds of one process.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Sequence

from gpt3_program import GPT3, gpt3

from sennit.cluster import load
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
from sennit.sim import parse_what_if, simulate_fully

WIDTH, ROWS = 4096, 2048


def layers(mesh: Mesh, count: int, first: str, tag: str) -> tuple[list[LaneInput], list[Step], str]:
    """Column-parallel product, gelu, row-parallel product, all-reduce over tp; weights' gradients reduced over dp."""
    bf16 = DType.BF16
    column = Layout.block(mesh, (WIDTH, WIDTH), {1: ["tp"]})
    row = Layout.block(mesh, (WIDTH, WIDTH), {0: ["tp"]})
    hidden = Layout.block(mesh, (ROWS, WIDTH), {0: ["dp"], 1: ["tp"]})
    partial = Layout.block(mesh, (ROWS, WIDTH), {0: ["dp"]}, {"tp": Reduction.SUM})
    whole = Layout.block(mesh, (ROWS, WIDTH), {0: ["dp"]})
    pending = Layout.block(mesh, (WIDTH, WIDTH), {1: ["tp"]}, {"dp": Reduction.SUM})
    inputs: list[LaneInput] = []
    steps: list[Step] = []
    x = first

    def compute(kind: str, args: tuple[str, ...], buffer: Buffer, module: str) -> None:
        steps.append(Compute(kind, tuple(map(Ref, args)), (), (buffer,), Phase.FORWARD, module, buffer.name))

    for i in range(count):
        name = f"{tag}{i}"
        up, down = Buffer(f"up{name}", f"up{name}", bf16, column), Buffer(f"down{name}", f"down{name}", bf16, row)
        inputs += [LaneInput(Role.PARAM, up, f"{name}.up"), LaneInput(Role.PARAM, down, f"{name}.down")]
        compute("aten.mm.default", (x, up.name), Buffer(f"a{name}", f"a{name}", bf16, hidden), f"blocks.{i}.up")
        compute("aten.gelu.default", (f"a{name}",), Buffer(f"b{name}", f"b{name}", bf16, hidden), f"blocks.{i}.act")
        part = Buffer(f"c{name}", f"c{name}", bf16, partial)
        compute("aten.mm.default", (f"b{name}", down.name), part, f"blocks.{i}.down")
        steps.append(
            Collective(CollectiveKind.ALL_REDUCE, part.name, Buffer(f"y{name}", part.tensor, bf16, whole), ("tp",))
        )
        compute("aten.mm.default", (up.name, up.name), Buffer(f"g{name}", f"g{name}", bf16, pending), f"blocks.{i}.up")
        result = Buffer(f"r{name}", f"g{name}", bf16, column)
        steps.append(Collective(CollectiveKind.ALL_REDUCE, f"g{name}", result, ("dp",)))
        steps += [Free(f"a{name}"), Free(f"b{name}"), Free(part.name), Free(f"g{name}")]
        x = f"y{name}"
    return inputs, steps, x


def one_lane(dp: int, tp: int, count: int) -> Program:
    mesh = Mesh.make({"dp": dp, "tp": tp})
    x = Buffer("x", "x", DType.BF16, Layout.block(mesh, (ROWS, WIDTH), {0: ["dp"]}))
    inputs, steps, _ = layers(mesh, count, "x", "l")
    lane = Lane("all", mesh.devices, (LaneInput(Role.INPUT, x, "x"), *inputs), tuple(steps), ())
    return Program(f"dp={dp},tp={tp}", (lane,))


def pipeline(stages: int, dp: int, tp: int, count: int, micro: int) -> Program:
    lanes: list[Lane] = []
    for stage in range(stages):
        size = dp * tp
        mesh = Mesh.make({"dp": dp, "tp": tp}, devices=tuple(range(stage * size, (stage + 1) * size)))
        whole = Layout.block(mesh, (ROWS, WIDTH), {0: ["dp"]})
        inputs: list[LaneInput] = []
        steps: list[Step] = []
        for m in range(micro):
            x = f"x{m}"
            buffer = Buffer(x, f"s{stage}x{m}", DType.BF16, whole)
            if stage:
                steps.append(Receive(buffer, f"stage{stage - 1}"))
            else:
                inputs.append(LaneInput(Role.INPUT, buffer, x))
            more, block, last = layers(mesh, count // micro, x, f"m{m}l")
            inputs += more
            steps += block
            if stage < stages - 1:
                steps.append(Send(last, f"stage{stage + 1}"))
        lanes.append(Lane(f"stage{stage}", mesh.devices, tuple(inputs), tuple(steps), ()))
    return Program(f"pp={stages},dp={dp},tp={tp}", tuple(lanes))


def row(program: Program, cluster: str, *, fold: bool, what_if: Sequence[str] = ()) -> None:
    machine = load(cluster)
    start = time.process_time()  # other work on the machine is not counted
    changes = [parse_what_if(text) for text in what_if]
    timeline = simulate_fully(program, machine, fold=fold, what_if=changes).timeline
    seconds = time.process_time() - start
    events = len(timeline.events)
    print(
        f"| {program.name} | {len(program.devices)} | {events} | {'yes' if fold else 'no'} | {seconds:.2f} | "
        f"{events / seconds:.0f} | {timeline.span * 1e3:.3f} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = ("events", "growth", "fault", "gpt3")
    parser.add_argument("--only", nargs="*", choices=sections, default=sections)
    only = parser.parse_args().only
    print(f"python {platform.python_version()} on {platform.machine()}, one core, CPU seconds\n")
    print(
        "| program | devices | events | folded | seconds | events/s | simulated step, ms |\n|---|---|---|---|---|---|---|"
    )
    if "events" in only:
        for program, cluster in ((one_lane(4, 4, 500), "dgx-h100:2"), (pipeline(4, 2, 2, 500, 10), "dgx-h100:2")):
            row(program, cluster, fold=True)
            row(program, cluster, fold=False)
        row(one_lane(64, 8, 500), "dgx-h100:64", fold=True)
        row(one_lane(64, 8, 340), "dgx-h100:64", fold=False)
    if "growth" in only:
        for devices in (8, 64, 512, 1024, 4096, 16384):
            row(one_lane(devices // 8, 8, 100), f"dgx-h100:{devices // 8}", fold=True)
    if "fault" in only:  # one NIC of one node fails
        row(one_lane(512, 8, 50), "dgx-h100:512", fold=True, what_if=["link nic:3 down"])
    if "gpt3" in only:
        row(gpt3(GPT3()), "dgx-h100:64", fold=True)
        row(gpt3(GPT3(dp=128)), "dgx-h100:1024", fold=True)


if __name__ == "__main__":
    main()
