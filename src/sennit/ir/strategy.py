"""A strategy: which operators of a training step become one kernel, and how its gradients are communicated.

    strategy := "strategy" STRING "{" group* bucket* "}"
    group    := "group" "{" %op ("," %op)* "}" ("again" "{" %op ("," %op)* "}")?
    bucket   := "bucket" reduction ("by" STRING)? "wait" "=" wait "{" part ("," part)* "}"
    reduction := "all_reduce" | "reduce_scatter"
    wait     := "step" | "next"
    part     := STRING ("[" START ":" STOP "]")?

An operator goes by the name of its first result, as in the graph.

**Groups.** The operators of a group run as one kernel. Those under `again` belong to other groups and are computed a
second time inside this one, so that their results need not be read from memory: DisCo's duplicate fusion. An operator
that no group names is a group by itself.

**Buckets.** A bucket's gradients travel in one collective. A part is a parameter's gradient, whole or the flat elements
START to STOP of it. `all_reduce` gives every rank the mean in one collective; `reduce_scatter` reduces to shares, and
gathers them where it is waited for. `by` names the algorithm of the collective; without it the group's library chooses.
Buckets travel in the order in which they stand here, on every rank; one that is ready before its turn waits for those
before it. `wait` says where the update is waited for: at the end of the same `step`, or in the `next` one, before the
first kernel that reads one of the bucket's parameters.

`check_strategy` says which strategies fit a graph: every gradient is communicated exactly once, no group waits for
itself through others, forward and backward are not mixed, and only operators without side effects are repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

from sennit.ir.text import Scanner, quote

__all__ = ["Bucket", "Group", "Part", "Reduce", "Strategy", "WaitAt"]


Choice = TypeVar("Choice", bound=Enum)


class Reduce(Enum):
    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"


class WaitAt(Enum):
    STEP = "step"
    NEXT = "next"


@dataclass(frozen=True, slots=True)
class Group:
    ops: tuple[str, ...]
    again: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"group {{ {', '.join(f'%{name}' for name in self.ops)} }}"
        return f"{text} again {{ {', '.join(f'%{name}' for name in self.again)} }}" if self.again else text

    @classmethod
    def read(cls, scanner: Scanner) -> Group:
        ops = tuple(scanner.bracketed("{", "}", scanner.value_name))
        again = tuple(scanner.bracketed("{", "}", scanner.value_name)) if scanner.accept_word("again") else ()
        return cls(ops, again)


@dataclass(frozen=True, slots=True)
class Part:
    """The gradient of the parameter `path`: all of it, or the flat elements `start` to `stop`."""

    path: str
    span: tuple[int, int] | None = None

    def __str__(self) -> str:
        return quote(self.path) + (f"[{self.span[0]}:{self.span[1]}]" if self.span is not None else "")

    @classmethod
    def read(cls, scanner: Scanner) -> Part:
        path = scanner.string()
        if not scanner.accept("["):
            return cls(path)
        start = scanner.integer()
        scanner.expect(":")
        stop = scanner.integer()
        scanner.expect("]")
        return cls(path, (start, stop))


@dataclass(frozen=True, slots=True)
class Bucket:
    parts: tuple[Part, ...]
    wait: WaitAt = WaitAt.STEP
    reduce: Reduce = Reduce.ALL_REDUCE
    algorithm: str | None = None

    def __str__(self) -> str:
        parts = ", ".join(map(str, self.parts))
        by = "" if self.algorithm is None else f" by {quote(self.algorithm)}"
        return f"bucket {self.reduce.value}{by} wait={self.wait.value} {{ {parts} }}"

    @classmethod
    def read(cls, scanner: Scanner) -> Bucket:
        reduce = _choice(scanner, Reduce)
        algorithm = scanner.string() if scanner.accept_word("by") else None
        scanner.expect("wait")
        scanner.expect("=")
        wait = _choice(scanner, WaitAt)
        return cls(tuple(scanner.bracketed("{", "}", lambda: Part.read(scanner))), wait, reduce, algorithm)


@dataclass(frozen=True, slots=True)
class Strategy:
    name: str
    groups: tuple[Group, ...] = ()
    buckets: tuple[Bucket, ...] = ()

    def __str__(self) -> str:
        lines = [f"strategy {quote(self.name)} {{", *(f"  {item}" for item in (*self.groups, *self.buckets)), "}"]
        return "\n".join(lines) + "\n"

    @classmethod
    def read(cls, scanner: Scanner) -> Strategy:
        scanner.expect("strategy")
        name = scanner.string()
        scanner.expect("{")
        groups: list[Group] = []
        buckets: list[Bucket] = []
        while scanner.accept_word("group"):
            groups.append(Group.read(scanner))
        while scanner.accept_word("bucket"):
            buckets.append(Bucket.read(scanner))
        scanner.expect("}")
        return cls(name, tuple(groups), tuple(buckets))

    @classmethod
    def parse(cls, text: str) -> Strategy:
        return Scanner.whole(text, cls.read)


def _choice(scanner: Scanner, kind: type[Choice]) -> Choice:
    for item in kind:
        if scanner.accept_word(item.value):
            return item
    raise scanner.expected(" or ".join(repr(item.value) for item in kind))
