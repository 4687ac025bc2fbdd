"""A graph: operators on logical tensors, forward and backward, as the unsplit model computes them.

    graph  := "graph" STRING "{" input* op* output* repeat* "}"
    input  := role %name ":" tensor STRING        role: "param" | "buffer" | "input" | "tangent" | "seed"
    op     := phase result ("," result)* "=" KIND "(" (arg ("," arg)*)? ")" origin?
    result := %name ":" tensor
    phase  := "forward" | "backward"
    arg    := (NAME "=")? term
    term   := %name | NUMBER | STRING | "true" | "false" | "none" | dtype | "[" (term ("," term)*)? "]"
    origin := "at" STRING (STRING)? ("seq" INT)? ("call" INT)?  module path, source line, autograd sequence number, which call
    output := "loss" STRING? %name | "gradient" STRING %name | "buffer" STRING %name | "result" STRING %name
    repeat := "repeat" STRING "of" INT ":" INT "+" INT "*" INT    a module, its units, then: start, length and how many copies

Static single assignment: a value has one definition, before its uses. `Op.kind` is a torch operator by its full name
(`aten.mm.default`); a value's type is that of the whole tensor, whatever will be split later. `seq` links a backward
operator to the forward one whose derivative it computes.

**Inputs.** `param` and `buffer` go by their path in the model; `input` by its path in the call (`input_ids`,
`batch.labels`, `args.0`); `tangent` is the upstream gradient of a loss (`tangent`, or `tangent.PATH` for the loss of
that path); `seed` is the pair (seed, step) that all random numbers of the step are made from, by `sennit.uniform`
(`ir/random_numpy.py`).

**Outputs.** A `loss` is a scalar that the gradients differentiate; its path is its place in what the model returns,
absent where that is the loss alone. There may be several: the gradients are those of their sum, each weighted by its
tangent. `buffer` is the new value of a buffer that the model updates (running statistics). `result` is anything else
that the model returns, not differentiated. No two outputs share a key.

**Calls.** A model may call a module several times (recycling). `call` counts, from 0, the calls of the outermost module
around the operator that is called more than once.

**Repeats.** Equal layers give equal operators. `repeat "h" of 12 : 40 + 57 * 10` says that `h` has 12 units (layers, or
groups of layers), and that the operators 40 to 40 + 57 * 10 - 1 are ten copies of 57 each: they differ in the names of
values, of modules and of parameters only, so what a pass finds for one copy holds for all. The first and the last unit
are not among them: their surroundings differ. A pass that changes operators drops the repeats (they count positions).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from sennit.errors import GraphError, ParseError
from sennit.ir.dtype import DType, TensorType
from sennit.ir.text import Scanner, quote

__all__ = ["Arg", "Graph", "Input", "Op", "Output", "OutputKind", "Phase", "Ref", "Repeat", "Role", "Value", "refs"]


class Role(Enum):
    PARAM = "param"
    BUFFER = "buffer"
    INPUT = "input"
    TANGENT = "tangent"
    SEED = "seed"


class Phase(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class OutputKind(Enum):
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that names a value."""

    name: str


Arg = Ref | DType | bool | int | float | str | None | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class Input:
    """A value that comes from outside; `path` is the parameter's name in the model, or the argument's."""

    role: Role
    value: Value
    path: str


@dataclass(frozen=True, slots=True)
class Op:
    kind: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[Value, ...]
    phase: Phase
    module: str = ""
    line: str = ""
    seq: int | None = None
    call: int = 0
    # the values it reads, in order, repeated where they are read twice; made once, since every pass asks for them
    reads: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read = (*refs(self.args), *refs(tuple(arg for _, arg in self.kwargs)))
        object.__setattr__(self, "reads", read)

    @property
    def name(self) -> str:
        """An operator goes by the name of its first result."""
        return self.results[0].name

    def describe(self) -> str:
        """For error messages: kind, name, module and line."""
        place = f" in module {self.module!r}" if self.module else ""
        return f"{self.kind} %{self.name}{place}" + (f" ({self.line})" if self.line else "")


@dataclass(frozen=True, slots=True)
class Output:
    kind: OutputKind
    name: str
    path: str = ""

    @property
    def key(self) -> str:
        """What a run returns it by: its path, or `loss` for the loss that has none."""
        return self.path or "loss"

    def __str__(self) -> str:
        path = "" if self.kind is OutputKind.LOSS and not self.path else f"{quote(self.path)} "
        return f"{self.kind.value} {path}%{self.name}"

    @classmethod
    def read(cls, scanner: Scanner, word: str) -> Output:
        """The rest of an output, after the word that names its kind."""
        kind = OutputKind(word)
        path = "" if kind is OutputKind.LOSS and not scanner.peek('"') else scanner.string()
        return cls(kind, scanner.value_name(), path)


@dataclass(frozen=True, slots=True)
class Repeat:
    """`copies` runs of `length` operators from position `start`, equal but for names; see the top."""

    module: str
    units: int
    start: int
    length: int
    copies: int

    @property
    def end(self) -> int:
        return self.start + self.length * self.copies

    def __str__(self) -> str:
        return f"repeat {quote(self.module)} of {self.units} : {self.start} + {self.length} * {self.copies}"

    @classmethod
    def read(cls, scanner: Scanner) -> Repeat:
        module = scanner.string()
        numbers = []
        for sign in ("of", ":", "+", "*"):
            scanner.expect(sign)
            numbers.append(scanner.integer())
        return cls(module, *numbers)


@dataclass(frozen=True, slots=True)
class Graph:
    name: str
    inputs: tuple[Input, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    repeats: tuple[Repeat, ...] = ()

    def __post_init__(self) -> None:
        known: set[str] = set()
        for value in self.values():
            if value.name in known:
                raise GraphError(f"value %{value.name} is defined twice", where=f"graph {self.name!r}")
            known.add(value.name)
        defined = {item.value.name for item in self.inputs}
        for op in self.ops:
            for name in op.reads:
                if name not in defined:
                    late = "is read before it is defined" if name in known else "is not defined"
                    raise GraphError(f"value %{name} {late}", where=f"graph {self.name!r}, {op.describe()}")
            defined.update(value.name for value in op.results)
        for output in self.outputs:
            if output.name not in defined:
                raise GraphError(f"output %{output.name} is not defined", where=f"graph {self.name!r}")
        self._check_edges()
        self._check_repeats()

    def _check_edges(self) -> None:
        """There is one seed at most, a pair of integers, and no two outputs share a key."""
        keys: set[str] = set()
        for output in self.outputs:
            if output.key in keys:
                raise GraphError(f"two outputs have the key {output.key!r}", where=f"graph {self.name!r}")
            keys.add(output.key)
        seeds = [item.value for item in self.inputs if item.role is Role.SEED]
        if len(seeds) > 1:
            raise GraphError(f"there are {len(seeds)} seeds", where=f"graph {self.name!r}", fix="use one")
        if seeds and seeds[0].type != TensorType((2,), DType.I64):
            raise GraphError(f"the seed %{seeds[0].name} is {seeds[0].type}, not i64[2]", where=f"graph {self.name!r}")

    def _check_repeats(self) -> None:
        """Copies have the kinds of the first one, in order."""
        for repeat in self.repeats:
            kinds = [op.kind for op in self.ops[repeat.start : repeat.end]]
            if repeat.start < 0 or repeat.length < 1 or kinds != kinds[: repeat.length] * repeat.copies:
                raise GraphError(
                    f"the operators of `{repeat}` are not copies of each other",
                    where=f"graph {self.name!r} of {len(self.ops)} operators",
                    fix="drop the repeats of a graph when its operators change",
                )

    def values(self) -> Iterator[Value]:
        for item in self.inputs:
            yield item.value
        for op in self.ops:
            yield from op.results

    def types(self) -> dict[str, TensorType]:
        return {value.name: value.type for value in self.values()}

    def producers(self) -> dict[str, Op]:
        """The operator that defines each value; inputs are absent."""
        return {value.name: op for op in self.ops for value in op.results}

    def select(self, module: str = "*", kind: str = "*", phase: Phase | None = None) -> tuple[Op, ...]:
        """Operators by globs on the module path and the kind; alternatives are separated by `|`. An empty choice is an
        error: a pattern that matches nothing is a mistake."""
        modules, kinds = module.split("|"), kind.split("|")
        chosen = tuple(
            op
            for op in self.ops
            if (phase is None or op.phase is phase)
            and any(fnmatch.fnmatchcase(op.module, pattern) for pattern in modules)
            and any(fnmatch.fnmatchcase(op.kind, pattern) for pattern in kinds)
        )
        if not chosen:
            some = ", ".join(sorted({op.module for op in self.ops if op.module})[:8])
            raise GraphError(
                f"no operator matches module {module!r} and kind {kind!r}",
                where=f"graph {self.name!r}",
                fix=f"its modules are {some}, ...",
            )
        return chosen

    def __str__(self) -> str:
        lines = [f"graph {quote(self.name)} {{"]
        lines += [
            f"  {item.role.value} %{item.value.name} : {item.value.type} {quote(item.path)}" for item in self.inputs
        ]
        lines += [f"  {print_op(op)}" for op in self.ops]
        lines += [f"  {output}" for output in self.outputs]
        lines += [f"  {repeat}" for repeat in self.repeats]
        return "\n".join([*lines, "}"]) + "\n"

    @classmethod
    def read(cls, scanner: Scanner) -> Graph:
        scanner.expect("graph")
        name = scanner.string()
        scanner.expect("{")
        inputs: list[Input] = []
        ops: list[Op] = []
        outputs: list[Output] = []
        repeats: list[Repeat] = []
        while not scanner.accept("}"):
            word = scanner.word("an input, an operator or an output")
            if word in [role.value for role in Role] and not scanner.peek('"'):  # else an output: `buffer "path" %name`
                value = _read_result(scanner)
                inputs.append(Input(Role(word), value, scanner.string()))
            elif word in [phase.value for phase in Phase]:
                ops.append(_read_op(scanner, Phase(word)))
            elif word in [kind.value for kind in OutputKind]:
                outputs.append(Output.read(scanner, word))
            elif word == "repeat":
                repeats.append(Repeat.read(scanner))
            else:
                raise ParseError(f"unknown line {word!r}", where=scanner.here(), fix="see the grammar in ir/graph.py")
        return cls(name, tuple(inputs), tuple(ops), tuple(outputs), tuple(repeats))

    @classmethod
    def parse(cls, text: str) -> Graph:
        return Scanner.whole(text, cls.read)


def refs(arg: Arg) -> Iterator[str]:
    """The values that an argument names, in order."""
    if isinstance(arg, Ref):
        yield arg.name
    elif isinstance(arg, tuple):
        for part in arg:
            yield from refs(part)


def print_op(op: Op) -> str:
    results = ", ".join(f"%{value.name} : {value.type}" for value in op.results)
    text = f"{op.phase.value} {results} = {print_call(op.kind, op.args, op.kwargs)}"
    if op.module or op.line or op.seq is not None or op.call:
        text += f" at {quote(op.module)}"
        text += f" {quote(op.line)}" if op.line else ""
        text += f" seq {op.seq}" if op.seq is not None else ""
        text += f" call {op.call}" if op.call else ""
    return text


def print_call(kind: str, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> str:
    parts = [print_arg(arg) for arg in args] + [f"{name}={print_arg(arg)}" for name, arg in kwargs]
    return f"{kind}({', '.join(parts)})"


def print_arg(arg: Arg) -> str:
    match arg:
        case None:
            return "none"
        case bool():
            return "true" if arg else "false"
        case int() | float():
            return repr(arg)
        case str():
            return quote(arg)
        case DType():
            return arg.value
        case Ref(name):
            return f"%{name}"
        case tuple():
            return "[" + ", ".join(print_arg(part) for part in arg) + "]"


def read_call(scanner: Scanner) -> tuple[str, tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    kind = scanner.word("an operator")
    args: list[Arg] = []
    kwargs: list[tuple[str, Arg]] = []

    def one() -> None:
        start = scanner.position
        if scanner.text[start : start + 1].isidentifier():
            name = scanner.word()
            if scanner.accept("="):
                kwargs.append((name, read_arg(scanner)))
                return
            scanner.position = start
        args.append(read_arg(scanner))

    scanner.bracketed("(", ")", one)
    return kind, tuple(args), tuple(kwargs)


def read_arg(scanner: Scanner) -> Arg:
    if scanner.peek("%"):
        return Ref(scanner.value_name())
    if scanner.peek('"'):
        return scanner.string()
    if scanner.peek("["):
        return tuple(scanner.bracketed("[", "]", lambda: read_arg(scanner)))
    for word, constant in (("true", True), ("false", False), ("none", None)):
        if scanner.accept_word(word):
            return constant
    if scanner.text[scanner.position : scanner.position + 1].isalpha() and not (
        scanner.peek("inf") or scanner.peek("nan")
    ):
        return DType.read(scanner)
    return scanner.number()


def _read_result(scanner: Scanner) -> Value:
    name = scanner.value_name()
    scanner.expect(":")
    return Value(name, TensorType.read(scanner))


def _read_op(scanner: Scanner, phase: Phase) -> Op:
    results = [_read_result(scanner)]
    while scanner.accept(","):
        results.append(_read_result(scanner))
    scanner.expect("=")
    kind, args, kwargs = read_call(scanner)
    module = line = ""
    seq, call = None, 0
    if scanner.accept_word("at"):
        module = scanner.string()
        line = scanner.string() if scanner.peek('"') else ""
        seq = scanner.integer() if scanner.accept_word("seq") else None
        call = scanner.integer() if scanner.accept_word("call") else 0
    return Op(kind, args, kwargs, tuple(results), phase, module, line, seq, call)
