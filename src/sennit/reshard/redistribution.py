"""The value that a redistribution is planned into: moves from one layout to another, and a certificate of what they
cost.

    redistribution := "redistribution" "{" mesh* "source" placed "target" placed step* "chosen" costs ("lost" costs)* "}"
    mesh   := "mesh" NAME "=" MESH
    placed := NAME LAYOUT                                  the mesh that the layout lies on, and the layout
    step   := KIND ("over" AXIS ("," AXIS)*)? placed "to" placed ("in" REGION)?
    costs  := CANDIDATE "received" NUMBER "of" NUMBER "peak" INT "of" INT "staging" INT "messages" INT "seconds" NUMBER

Layouts of a redistribution lie on refined meshes (`Mesh.refined`): axes of prime size, so that any part of an axis can
move alone; entries of axes of size 1, which say nothing, are left out. Where the target's mesh is the source's by other
names (the same devices, the same primes), all steps use the names of the source; points and devices are the same. Each
move says what it makes of what it gets; its kind says with which communication:

| kind | along its axes | communication |
|---|---|---|
| slice | nothing -> split | none |
| partial | nothing -> pending | none |
| reduce_scatter | pending -> split | one collective over the group of all its axes |
| all_to_all | split -> split on a digit that was local | one collective over the group, parts of one size |
| all_reduce | pending -> nothing | one collective over the group |
| all_gather | split -> nothing | one collective over the group |
| permute | any change that keeps the size of every piece, each piece from one device | point to point, one message a device |
| exchange | anything, also to another mesh, on uneven pieces, or for a region of the array only | point to point, regions |

The meaning of every kind but exchange is `layout_numpy.regroup`; the meaning of an exchange is that each device ends
with the indices of its region in the result, from any holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from sennit.errors import ParseError
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.region import Region
from sennit.ir.text import Scanner

__all__ = ["Candidate", "Certificate", "Redistribution", "Step", "StepKind"]

Named = TypeVar("Named", bound=Enum)


class StepKind(Enum):
    SLICE = "slice"
    PARTIAL = "partial"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    PERMUTE = "permute"
    EXCHANGE = "exchange"

    @property
    def communicates(self) -> bool:
        return self not in (StepKind.SLICE, StepKind.PARTIAL)


@dataclass(frozen=True, slots=True)
class Step:
    """One move. `axes` are those that change, major to minor in the group; an exchange over a part of the array, as in
    streaming under a byte budget, names its `region`."""

    kind: StepKind
    axes: tuple[str, ...]
    source: Layout
    result: Layout
    region: Region | None = None

    def continues_in(self, later: Step) -> bool:
        """Whether both fill one result: exchanges of parts of the array between the same layouts."""
        parts = self.region is not None and later.region is not None
        return parts and self.source == later.source and self.result == later.result


class Candidate(Enum):
    """How a sequence of moves was found."""

    NOTHING = "nothing"
    CONSTRUCTIVE = "constructive"
    SEARCH = "search"
    DIRECT = "direct"
    STREAMED = "streamed"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the moves cost, and the bounds that no sequence of moves can beat.

    Elements are per device; `received` is the mean over the devices of the target, `peak` the largest piece that any
    device holds at any time (staging apart).
    """

    candidate: Candidate
    received: float
    received_bound: float
    peak: int
    peak_bound: int
    staging: int
    messages: int
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.candidate.value} received {self.received!r} of {self.received_bound!r} peak {self.peak} of {self.peak_bound}"
            f" staging {self.staging} messages {self.messages} seconds {self.seconds!r}"
        )

    @classmethod
    def read(cls, scanner: Scanner) -> Certificate:
        candidate = _member(scanner, Candidate, "a candidate")
        _expect_word(scanner, "received")
        received = float(scanner.number())
        _expect_word(scanner, "of")
        received_bound = float(scanner.number())
        _expect_word(scanner, "peak")
        peak = scanner.integer()
        _expect_word(scanner, "of")
        peak_bound = scanner.integer()
        _expect_word(scanner, "staging")
        staging = scanner.integer()
        _expect_word(scanner, "messages")
        messages = scanner.integer()
        _expect_word(scanner, "seconds")
        seconds = float(scanner.number())
        return cls(candidate, received, received_bound, peak, peak_bound, staging, messages, seconds)


@dataclass(frozen=True, slots=True)
class Redistribution:
    """`alternatives` are the certificates of the candidates that lost, for `--explain`."""

    source: Layout
    target: Layout
    steps: tuple[Step, ...]
    certificate: Certificate
    alternatives: tuple[Certificate, ...] = ()

    # ---- text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        meshes = dict.fromkeys([self.source.mesh, self.target.mesh])
        meshes.update(dict.fromkeys(layout.mesh for step in self.steps for layout in (step.source, step.result)))
        names = {mesh: f"m{position}" for position, mesh in enumerate(meshes)}

        def placed(layout: Layout) -> str:
            return f"{names[layout.mesh]}{layout}"

        lines = ["redistribution {"]
        lines += [f"  mesh {name} = {mesh}" for mesh, name in names.items()]
        lines += [f"  source {placed(self.source)}", f"  target {placed(self.target)}"]
        for step in self.steps:
            over = f" over {','.join(step.axes)}" if step.axes else ""
            part = "" if step.region is None else f" in {step.region}"
            lines.append(f"  {step.kind.value}{over} {placed(step.source)} to {placed(step.result)}{part}")
        lines.append(f"  chosen {self.certificate}")
        lines += [f"  lost {certificate}" for certificate in self.alternatives]
        return "\n".join([*lines, "}"])

    @classmethod
    def read(cls, scanner: Scanner) -> Redistribution:
        _expect_word(scanner, "redistribution")
        scanner.expect("{")
        meshes: dict[str, Mesh] = {}
        while scanner.accept_word("mesh"):
            name = scanner.word("the name of a mesh")
            scanner.expect("=")
            meshes[name] = Mesh.read(scanner)
        _expect_word(scanner, "source")
        source = _read_placed(scanner, meshes)
        _expect_word(scanner, "target")
        target = _read_placed(scanner, meshes)
        steps: list[Step] = []
        while not scanner.accept_word("chosen"):
            steps.append(_read_step(scanner, meshes))
        certificate = Certificate.read(scanner)
        alternatives: list[Certificate] = []
        while scanner.accept_word("lost"):
            alternatives.append(Certificate.read(scanner))
        scanner.expect("}")
        return cls(source, target, tuple(steps), certificate, tuple(alternatives))

    @classmethod
    def parse(cls, text: str) -> Redistribution:
        return Scanner.whole(text, cls.read)


def _read_step(scanner: Scanner, meshes: dict[str, Mesh]) -> Step:
    kind = _member(scanner, StepKind, "a kind of step, or chosen")
    axes: list[str] = []
    if scanner.accept_word("over"):
        axes.append(scanner.word("an axis"))
        while scanner.accept(","):
            axes.append(scanner.word("an axis"))
    source = _read_placed(scanner, meshes)
    _expect_word(scanner, "to")
    result = _read_placed(scanner, meshes)
    region = Region.read(scanner) if scanner.accept_word("in") else None
    return Step(kind, tuple(axes), source, result, region)


def _read_placed(scanner: Scanner, meshes: dict[str, Mesh]) -> Layout:
    where = scanner.here()
    name = scanner.word("the name of a mesh")
    if name not in meshes:
        raise ParseError(f"unknown mesh {name!r}", where=where, fix=f"use one of {', '.join(meshes) or 'none'}")
    return Layout.read(scanner, meshes[name])


def _member(scanner: Scanner, kind: type[Named], what: str) -> Named:
    where = scanner.here()
    word = scanner.word(what)
    for member in kind:
        if member.value == word:
            return member
    raise ParseError(f"{word!r} is not {what}", where=where, fix=f"use one of {', '.join(m.value for m in kind)}")


def _expect_word(scanner: Scanner, word: str) -> None:
    if not scanner.accept_word(word):
        raise scanner.expected(repr(word))
