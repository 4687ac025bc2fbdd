"""A step of GPT-3 175B as a program: 96 layers in stages, tensor and data parallel inside a stage, 1F1B over
micro-batches.

Made here step by step and not by a plan, so that the simulator alone is timed; the operators of a layer are those of a
transformer's forward and backward, on bf16, with the collectives of Megatron's tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.ir.dtype import DType
from sennit.ir.graph import Output, OutputKind, Phase, Ref, Role
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

__all__ = ["GPT3", "gpt3"]


@dataclass(frozen=True, slots=True)
class GPT3:
    """Sizes of the model and of the plan; `micro` micro-batches of one sequence a data-parallel rank."""

    stages: int = 8
    dp: int = 8
    tp: int = 8
    micro: int = 32
    layers: int = 96
    width: int = 12288
    heads: int = 96
    tokens: int = 2048

    @property
    def devices(self) -> int:
        return self.stages * self.dp * self.tp


def gpt3(size: GPT3) -> Program:
    lanes = tuple(_Stage(size, number).lane() for number in range(size.stages))
    return Program(f"GPT-3, pp={size.stages},dp={size.dp},tp={size.tp}", lanes)


class _Stage:
    """The lane of one stage."""

    def __init__(self, size: GPT3, number: int) -> None:
        self.size, self.number = size, number
        per = size.dp * size.tp
        devices = tuple(range(number * per, (number + 1) * per))
        mesh = self.mesh = Mesh.make({"dp": size.dp, "tp": size.tp}, devices=devices)
        rows, width = size.dp * size.tokens, size.width
        head = width // size.heads
        block = Layout.block
        self.whole = block(mesh, (rows, width), {0: ["dp"]})
        self.partial = block(mesh, (rows, width), {0: ["dp"]}, {"tp": Reduction.SUM})
        self.qkv = block(mesh, (rows, 3 * width), {0: ["dp"], 1: ["tp"]})
        self.split = block(mesh, (rows, width), {0: ["dp"], 1: ["tp"]})
        self.wide = block(mesh, (rows, 4 * width), {0: ["dp"], 1: ["tp"]})
        self.scores = block(mesh, (size.heads, rows, size.tokens), {0: ["tp"], 1: ["dp"]})
        self.mixed = block(mesh, (size.heads, rows, head), {0: ["tp"], 1: ["dp"]})
        self.keys = block(mesh, (size.heads, head, rows), {0: ["tp"], 2: ["dp"]})
        self.weights = {
            "qkv": block(mesh, (width, 3 * width), {1: ["tp"]}),
            "proj": block(mesh, (width, width), {0: ["tp"]}),
            "up": block(mesh, (width, 4 * width), {1: ["tp"]}),
            "down": block(mesh, (4 * width, width), {0: ["tp"]}),
        }
        self.steps: list[Step] = []
        self.count = 0
        first = number * size.layers // size.stages
        self.layers = range(first, (number + 1) * size.layers // size.stages)

    def compute(self, kind: str, reads: tuple[str, ...], layout: Layout, layer: int, phase: Phase) -> str:
        self.count += 1
        name = f"t{self.count}"
        buffer = Buffer(name, name, DType.BF16, layout)
        module = f"blocks.{layer}"
        self.steps.append(Compute(kind, tuple(map(Ref, reads)), (), (buffer,), phase, module, name))
        return name

    def reduce(self, name: str) -> str:
        self.count += 1
        result = Buffer(f"t{self.count}", name, DType.BF16, self.whole)
        self.steps.append(Collective(CollectiveKind.ALL_REDUCE, name, result, ("tp",)))
        return result.name

    def layer(self, x: str, layer: int, phase: Phase) -> str:
        """The operators of a layer; a backward has each product twice, once for what it read and once for its weight."""
        twice = 2 if phase is Phase.BACKWARD else 1
        made: list[str] = []

        def product(kind: str, left: str, right: str, layout: Layout) -> str:
            out = self.compute(kind, (left, right), layout, layer, phase)
            made.append(out)
            for _ in range(twice - 1):
                made.append(self.compute(kind, (left, right), layout, layer, phase))
            return out

        def point(kind: str, reads: tuple[str, ...], layout: Layout) -> str:
            made.append(self.compute(kind, reads, layout, layer, phase))
            return made[-1]

        normal = point("aten.mul.Tensor", (x, x), self.whole)
        qkv = product("aten.mm.default", normal, f"qkv{layer}", self.qkv)
        q = point("sennit.slice", (qkv,), self.mixed)
        k = point("sennit.slice", (qkv,), self.keys)
        scores = product("aten.bmm.default", q, k, self.scores)
        weights = point("aten.gelu.default", (scores,), self.scores)
        mixed = product("aten.bmm.default", weights, q, self.mixed)
        joined = point("sennit.slice", (mixed,), self.split)
        out = product("aten.mm.default", joined, f"proj{layer}", self.partial)
        y = point("aten.add.Tensor", (self.reduce(out), x), self.whole)
        normal = point("aten.mul.Tensor", (y, y), self.whole)
        wide = product("aten.mm.default", normal, f"up{layer}", self.wide)
        active = point("aten.gelu.default", (wide,), self.wide)
        out = product("aten.mm.default", active, f"down{layer}", self.partial)
        result = self.compute("aten.add.Tensor", (self.reduce(out), y), self.whole, layer, phase)
        if phase is Phase.BACKWARD:
            self.steps += [Free(name) for name in made]
        return result

    def one(self, phase: Phase, number: int) -> None:
        """A micro-batch: receive, all layers, send on."""
        forward = phase is Phase.FORWARD
        before, after = (self.number - 1, self.number + 1) if forward else (self.number + 1, self.number - 1)
        x = f"x{number}" if forward else f"g{number}"
        if 0 <= before < self.size.stages:
            self.steps.append(Receive(Buffer(x, x, DType.BF16, self.whole), f"stage{before}"))
        elif not forward:
            x = self.last[number]
        for layer in self.layers if forward else reversed(self.layers):
            x = self.layer(x, layer, phase)
        if forward:
            self.last[number] = x
        if 0 <= after < self.size.stages:
            self.steps.append(Send(x, f"stage{after}"))

    def lane(self) -> Lane:
        size = self.size
        self.last: dict[int, str] = {}
        warm = min(size.micro, size.stages - self.number - 1)
        for number in range(warm):
            self.one(Phase.FORWARD, number)
        for number in range(size.micro - warm):
            self.one(Phase.FORWARD, warm + number)
            self.one(Phase.BACKWARD, number)
        for number in range(size.micro - warm, size.micro):
            self.one(Phase.BACKWARD, number)
        inputs = [
            LaneInput(Role.PARAM, Buffer(f"{name}{layer}", f"{name}{layer}", DType.BF16, layout), f"{layer}.{name}")
            for layer in self.layers
            for name, layout in self.weights.items()
        ]
        if self.number == 0:
            inputs += [
                LaneInput(Role.INPUT, Buffer(f"x{n}", f"x{n}", DType.BF16, self.whole), f"x{n}")
                for n in range(size.micro)
            ]
        outputs: list[Output] = []
        for layer in self.layers:  # gradients of the data-parallel ranks meet at the end
            for name, layout in self.weights.items():
                pending = Layout.block(
                    self.mesh, layout.shape, {1 if name in ("qkv", "up") else 0: ["tp"]}, {"dp": Reduction.SUM}
                )
                part = self.compute("sennit.partial", (f"{name}{layer}",), pending, layer, Phase.BACKWARD)
                self.count += 1
                result = Buffer(f"t{self.count}", part, DType.BF16, layout)
                self.steps.append(Collective(CollectiveKind.ALL_REDUCE, part, result, ("dp",)))
                self.steps.append(Free(part))
                outputs.append(Output(OutputKind.GRADIENT, result.name, f"{layer}.{name}"))
        return Lane(f"stage{self.number}", self.mesh.devices, tuple(inputs), tuple(self.steps), tuple(outputs))
