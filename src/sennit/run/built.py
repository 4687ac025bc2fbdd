"""What a rank keeps of a compiled program: what it runs, and small tables.

A program has every step of every lane. A rank that trains needs its own lane as code, the pieces of the constants that
it reads, where inputs come from and outputs go, its peers and groups. `build` takes these out of what was compiled, in
the process that compiled it (`run/child.py`), and all the rest is packed: `Stages` are unpacked when a person asks for
them.
"""

from __future__ import annotations

import hashlib
import inspect
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sennit.capture import Signature
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Output, OutputKind, Role
from sennit.ir.program import LaneInput, Program
from sennit.plan import Decisions, Plan
from sennit.run.compile import Compiled
from sennit.run.emit import emit_lane
from sennit.run.groups import GroupsNeeded, groups_needed
from sennit.run.homes import Homes, Move
from sennit.run.load import Code, code_of
from sennit.run.pieces import input_keys, piece_of
from sennit.run.rank import Seat, seat_of

__all__ = ["Built", "Packed", "Returned", "Stages", "build", "notes_of"]


@dataclass(frozen=True, slots=True)
class Stages:
    """What each stage of the compilation made, for all ranks."""

    graph: Graph
    plan: Plan
    decisions: Decisions
    program: Program


class Packed:
    """Stages that are packed when they are sent, and unpacked when they are first asked for: then they stay."""

    __slots__ = ("_bytes", "_value")

    def __init__(self, value: Stages) -> None:
        self._value: Stages | None = value
        self._bytes = b""

    @property
    def value(self) -> Stages:
        if self._value is None:
            self._value, self._bytes = pickle.loads(zlib.decompress(self._bytes)), b""
        assert self._value is not None
        return self._value

    def __getstate__(self) -> bytes:
        return self._bytes or zlib.compress(pickle.dumps(self._value, protocol=pickle.HIGHEST_PROTOCOL), 1)

    def __setstate__(self, state: bytes) -> None:
        self._value, self._bytes = None, state


@dataclass(frozen=True, slots=True)
class Returned:
    """A loss or a result, its type, and the devices that make it."""

    key: str
    kind: OutputKind
    type: TensorType
    makers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Built:
    """A program as one rank runs it. `digest` is of the whole program's text, which all ranks must have made alike."""

    digest: str
    plan: str
    mesh: str
    lane: str
    inputs: tuple[LaneInput, ...]
    outputs: tuple[Output, ...]
    keys: Mapping[str, str]  # of inputs, by the name of their buffer
    returned: tuple[Returned, ...]
    gradients: tuple[str, ...]  # the paths of those that this lane makes, in the order of the graph
    signature: Signature
    constants: Mapping[str, Tensor]  # this rank's pieces, by key
    homes: Homes
    moves: tuple[Move, ...]
    seat: Seat
    groups: GroupsNeeded
    code: Code
    seconds: Mapping[str, float]
    stages: Packed

    def with_forward(self, forward: inspect.Signature) -> Built:
        """With the signature of the model's `forward`, which holds what cannot always be pickled (annotations,
        defaults).
        """
        return replace(self, signature=replace(self.signature, forward=forward))


def build(
    compiled: Compiled, rank: int, homes: Homes, moves: tuple[Move, ...], *, local_inputs: bool, ahead: bool
) -> Built:
    """`compiled` for one rank. `ahead`: messages may be received before they are needed (`run/order.py`)."""
    program, graph = compiled.program, compiled.graph
    lane = program.lane_of(rank)
    source = emit_lane(program, lane, notes_of(compiled.plan), ahead=ahead)
    keys = input_keys(lane)
    here = {output.key for output in lane.outputs}
    signature = _local_signature(compiled) if local_inputs else compiled.signature
    return Built(
        digest=hashlib.sha256(str(program).encode()).hexdigest(),
        plan=compiled.plan.name,
        mesh=str(compiled.plan.mesh),
        lane=lane.name,
        inputs=lane.inputs,
        outputs=lane.outputs,
        keys=keys,
        returned=_returned(compiled),
        gradients=tuple(
            output.path for output in graph.outputs if output.kind is OutputKind.GRADIENT and output.path in here
        ),
        signature=replace(signature, forward=inspect.Signature()),
        constants={
            keys[item.buffer.name]: piece_of(
                compiled.constants[item.path], item.buffer.layout, item.buffer.point(rank)
            ).clone()
            for item in lane.inputs
            if item.path in compiled.constants
        },
        homes=homes,
        moves=moves,
        seat=seat_of(program, lane, rank),
        groups=groups_needed(program),
        code=code_of(source, f"{program.name} {lane.name}"),
        seconds=compiled.seconds,
        stages=Packed(Stages(graph, compiled.plan, compiled.decisions, program)),
    )


def notes_of(plan: Plan) -> dict[str, str]:
    """What a plan decided of its operators, in words, by their names."""
    notes: dict[str, list[str]] = {}
    for split in plan.splits:
        inside = f" in each of {split.chunks} parts" if split.chunks > 1 else ""
        notes.setdefault(split.op, []).append(f"{split.letter} over {split.axis}{inside}")
    return {op: "the plan splits " + ", ".join(words) for op, words in notes.items()}


def _returned(compiled: Compiled) -> tuple[Returned, ...]:
    types, lanes = compiled.graph.types(), compiled.program.lanes
    keys = {lane.name: {output.key for output in lane.outputs} for lane in lanes}
    return tuple(
        Returned(
            output.key,
            output.kind,
            types[output.name],
            tuple(device for lane in lanes if output.key in keys[lane.name] for device in lane.devices),
        )
        for output in compiled.graph.outputs
        if output.kind in (OutputKind.LOSS, OutputKind.RESULT)
    )


def _local_signature(compiled: Compiled) -> Signature:
    """The signature of a call with this rank's part of each input. An input that this stage does not read has the shape
    of the part that its reader has at the same place in the mesh."""
    signature = compiled.signature
    parts: dict[str, tuple[int, ...]] = {}
    for lane in compiled.program.lanes:
        for item in lane.inputs:
            if item.role is Role.INPUT:
                parts.setdefault(item.path, item.buffer.local_shape(lane.devices[0]))
    arguments: dict[str, Any] = {
        path: TensorType(parts.get(signature.renamed.get(path, path), kind.shape), kind.dtype)
        if isinstance(kind, TensorType)
        else kind
        for path, kind in signature.arguments.items()
    }
    return replace(signature, arguments=arguments)
