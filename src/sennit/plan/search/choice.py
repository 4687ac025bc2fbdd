"""What a search decided, as a value with a text form.

    choice    := "plan" STRING "on" STRING "{" line* "}"
    line      := "batch" INT                            samples of a step, over all replicas
               | "way" STRING                           how a unit is split (`ways.py`)
               | "mesh" "pp=" INT "," "dp=" INT ("+" INT)*     replicas; of each lane where they differ
               | "microbatch" INT "*" INT               samples of one, on one replica (on a lane where they differ); how many a replica runs
               | "schedule" NAME INT?                   and how many stages a lane has
               | "zero" INT                             what replicas share: 1 optimizer state, 2 gradients too, 3 parameters too
               | "stage" INT ":" part ("," part)*       units of each item, and what they keep
               | "simulated" "step" FLOAT "memory" INT "bound" FLOAT
    part      := STRING "*" INT ("as" STRING)?          an item, how many of its units, the words of a way that differ

It prints and parses, so a choice is saved as a file, read again and compared with another (`differences`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.errors import ParseError
from sennit.ir.text import Scanner, quote
from sennit.plan.search.ways import Keep, Way

__all__ = ["Choice", "Kind", "Part", "differences"]


class Kind(Enum):
    """The schedules that a search looks at (`plan/schedules.py`)."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE_H1 = "zero-bubble-h1"
    ZERO_BUBBLE_H2 = "zero-bubble-h2"
    DUAL_PIPE_V = "dual-pipe-v"
    INTERLACED = "interlaced"
    SEVERAL_FORWARD = "several-forward"


@dataclass(frozen=True, slots=True)
class Part:
    """Units of one item in a stage, and what they keep."""

    item: str
    units: int
    keep: Keep = Keep.ALL
    pieces: int = 1

    def __str__(self) -> str:
        own = str(Way(keep=self.keep, pieces=self.pieces))
        return f"{quote(self.item)} * {self.units}" + (f" as {quote(own)}" if own != "plain" else "")


@dataclass(frozen=True, slots=True)
class Choice:
    """`step`, `memory` (of the fullest device) and `bound` are simulated: by the schedule's recurrence on costs of the
    lowered units. `lanes` are the replicas of each lane where they differ: `dp` is then 1, and `size` the samples of a
    micro-batch on a lane.
    """

    model: str
    cluster: str
    batch: int
    way: Way
    pp: int
    dp: int
    size: int
    microbatches: int
    kind: Kind
    chunks: int
    zero: int
    stages: tuple[tuple[Part, ...], ...]
    step: float
    memory: int
    bound: float
    lanes: tuple[int, ...] = ()

    @property
    def replicas(self) -> str:
        return "+".join(map(str, self.lanes)) or str(self.dp)

    @property
    def gap(self) -> float:
        """How far the step is above the bound, relative."""
        return self.step / self.bound - 1.0

    @property
    def title(self) -> str:
        zero = f", ZeRO-{self.zero}" if self.zero else ""
        chunks = f" x{self.chunks}" if self.chunks > 1 else ""
        pipeline = f", {self.kind.value}{chunks}" if self.pp > 1 else ""
        batches = f"{self.microbatches} micro-batch{'es' if self.microbatches > 1 else ''} of {self.size}"
        return f"{self.way}, pp={self.pp}, dp={self.replicas}{pipeline}, {batches}{zero}"

    def __str__(self) -> str:
        lines = [f"plan {quote(self.model)} on {quote(self.cluster)} {{"]
        lines.append(f"  batch {self.batch}")
        lines.append(f"  way {quote(str(self.way))}")
        lines.append(f"  mesh pp={self.pp},dp={self.replicas}")
        lines.append(f"  microbatch {self.size} * {self.microbatches}")
        lines.append(f"  schedule {self.kind.value} {self.chunks}")
        lines.append(f"  zero {self.zero}")
        lines += [
            f"  stage {number} : {', '.join(str(part) for part in stage)}" for number, stage in enumerate(self.stages)
        ]
        lines.append(f"  simulated step {self.step!r} memory {self.memory} bound {self.bound!r}")
        return "\n".join([*lines, "}"]) + "\n"

    @classmethod
    def parse(cls, text: str) -> Choice:
        return Scanner.whole(text, cls.read)

    @classmethod
    def read(cls, scanner: Scanner) -> Choice:
        scanner.expect("plan")
        model = scanner.string()
        scanner.expect("on")
        cluster = scanner.string()
        scanner.expect("{")
        scanner.expect("batch")
        batch = scanner.integer()
        scanner.expect("way")
        way = Way.parse(scanner.string())
        scanner.expect("mesh")
        scanner.expect("pp=")
        pp = scanner.integer()
        scanner.expect(",dp=")
        lanes = [scanner.integer()]
        while scanner.accept("+"):
            lanes.append(scanner.integer())
        dp = lanes[0] if len(lanes) == 1 else 1
        scanner.expect("microbatch")
        size = scanner.integer()
        scanner.expect("*")
        microbatches = scanner.integer()
        scanner.expect("schedule")
        name = next(
            (kind for kind in sorted(Kind, key=lambda kind: -len(kind.value)) if scanner.accept(kind.value)), None
        )
        if name is None:
            raise ParseError("unknown schedule", where=scanner.here(), fix=", ".join(kind.value for kind in Kind))
        chunks = scanner.integer()
        scanner.expect("zero")
        zero = scanner.integer()
        stages: list[tuple[Part, ...]] = []
        while scanner.accept_word("stage"):
            scanner.integer()
            scanner.expect(":")
            parts = [_read_part(scanner)]
            while scanner.accept(","):
                parts.append(_read_part(scanner))
            stages.append(tuple(parts))
        scanner.expect("simulated")
        numbers: list[float] = []
        for word in ("step", "memory", "bound"):
            scanner.expect(word)
            numbers.append(scanner.number())
        scanner.expect("}")
        step, memory, bound = numbers
        return cls(
            model,
            cluster,
            batch,
            way,
            pp,
            dp,
            size,
            microbatches,
            name,
            chunks,
            zero,
            tuple(stages),
            step,
            int(memory),
            bound,
            tuple(lanes) if len(lanes) > 1 else (),
        )


def _read_part(scanner: Scanner) -> Part:
    item = scanner.string()
    scanner.expect("*")
    units = scanner.integer()
    own = Way.parse(scanner.string()) if scanner.accept_word("as") else Way()
    return Part(item, units, own.keep, own.pieces)


def differences(old: Choice, new: Choice) -> tuple[tuple[str, str, str], ...]:
    """What differs: a name, the old value, the new one."""
    rows: list[tuple[str, str, str]] = []

    def compare(name: str, before: object, after: object) -> None:
        if before != after:
            rows.append((name, str(before), str(after)))

    for name in ("model", "cluster", "batch", "way", "pp", "replicas", "size", "microbatches"):
        compare(name, getattr(old, name), getattr(new, name))
    compare("schedule", f"{old.kind.value} x{old.chunks}", f"{new.kind.value} x{new.chunks}")
    compare("zero", old.zero, new.zero)
    for number in range(max(len(old.stages), len(new.stages))):
        before = ", ".join(map(str, old.stages[number])) if number < len(old.stages) else "none"
        after = ", ".join(map(str, new.stages[number])) if number < len(new.stages) else "none"
        compare(f"stage {number}", before, after)
    compare("step, simulated", f"{old.step:.4g} s", f"{new.step:.4g} s")
    compare("memory, simulated", f"{old.memory / 1e9:.2f} GB", f"{new.memory / 1e9:.2f} GB")
    return tuple(rows)
