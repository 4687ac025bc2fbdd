"""A graph of a shortened model to the graph of the whole one.

The graph was captured with four units of a run (`runs.py`): A, B, C and Z, the first, the second, a middle one and the
last. Its operators lie like this, where each letter is a *segment*, one interval of operators:

    forward:  ... A B C Z ...        backward:  ... Z C B A ...

(and once more for each time that the model runs through its layers). What follows a unit before the next one begins
counts to its segment. **If the segments B and C are equal up to names, so are those of all units between them**, and C
stands for each:

    forward:  ... A B C_2 C_3 ... C_(n-2) Z ...

What a reference in C_k names follows from what B and C name at that place:

| in B | in C | is | in C_k |
|---|---|---|---|
| x in B | its partner in C | of the unit itself | partner in C_k |
| x outside | y in B | of the unit before | partner of y in C_(k-1) |
| x in C | y outside | of the unit after (in the backward pass) | partner of x in C_(k+1), at the end y |
| x outside | the same x | of the model | x |

Anything else is not periodic, and neither is an operator outside the segments that reads B or C, except from a
neighbour: then `unroll` raises `NotPeriodic`, and the caller captures the whole model. Numbers that count (draws,
sequence numbers) go up by the same step from unit to unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

from sennit.capture.runs import Run
from sennit.ir.graph import Arg, Graph, Input, Op, Output, OutputKind, Phase, Ref, Repeat, Value

__all__ = ["NotPeriodic", "unroll"]


T = TypeVar("T")


class NotPeriodic(Exception):  # noqa: N818 - not an error: the whole model is captured instead
    """Why a run cannot be unrolled."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """The positions where A, B, C and Z begin in one pass through the layers; `ends` is where the last of them ends."""

    begins: tuple[int, int, int, int]
    ends: int

    @property
    def is_backward(self) -> bool:
        return self.begins[0] > self.begins[3]

    def segment(self, unit: int) -> range:
        """The operators of A (0), B (1), C (2) or Z (3)."""
        after = unit - 1 if self.is_backward else unit + 1
        return range(self.begins[unit], self.begins[after] if 0 <= after <= 3 else self.ends)


def unroll(graph: Graph, run: Run) -> Graph:
    """The graph with all units of the run."""
    return _Unroller(graph, run).graph()


@dataclass(slots=True)
class _Unroller:
    source: Graph
    run: Run
    inputs: dict[str, Input] = field(default_factory=dict)
    children: dict[str, int] = field(default_factory=dict)  # a child of the container -> its unit
    passes: list[_Pass] = field(default_factory=list)
    partner: dict[str, str] = field(default_factory=dict)  # a value of B -> that of C
    after: dict[str, str] = field(default_factory=dict)  # a value outside -> the value of C that B names in its place
    of: dict[str, int] = field(default_factory=dict)  # a value of A, B, C or Z -> 0 to 3
    shared: set[str] = field(default_factory=set)  # values outside that B and C both name
    draws: int = 0  # how many numbers a unit draws
    seqs: int = 0  # how far sequence numbers go up in a unit
    draw_ranges: list[tuple[int, int]] = field(default_factory=list)
    seq_ranges: list[tuple[int, int]] = field(default_factory=list)

    # ---- what is there -----------------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        self.inputs = {item.value.name: item for item in self.source.inputs}
        self.children = {name: index for index, unit in enumerate(self.run.units) for name in unit}
        self._find_passes()
        for item in self.source.inputs:
            if (unit := self._kept_unit(item.path)) is not None:
                self.of[item.value.name] = unit
        for one in self.passes:
            for unit in range(4):
                for position in one.segment(unit):
                    self.of.update((value.name, unit) for value in self.source.ops[position].results)
        self._pair_inputs()
        for one in self.passes:
            self._compare(one)
        self.draw_ranges = self._ranges(lambda op: _number(op.args[1]) if op.kind == "sennit.uniform" else None)
        self.seq_ranges = self._ranges(lambda op: op.seq)
        return self._unrolled()

    def _unit(self, path: str) -> int | None:
        head = self.run.path("")
        return self.children.get(path[len(head) :].partition(".")[0]) if path.startswith(head) else None

    def _kept_unit(self, path: str) -> int | None:
        unit = self._unit(path)
        return None if unit is None else self.run.kept.index(unit)

    def _find_passes(self) -> None:
        """Where each unit begins, in each pass."""
        ops = self.source.ops
        units = [self._kept_unit(op.module) if op.module else None for op in ops]
        names = {self.run.path(name) for unit in self.run.units for name in unit}
        calls = {op.call for op in ops if op.module in names}  # of the units themselves, not of what they call in turn
        found: dict[tuple[Phase, int], dict[int, list[int]]] = {}
        for position, (op, unit) in enumerate(zip(ops, units, strict=True)):
            if unit is not None:
                key = (op.phase, op.call if len(calls) > 1 else 0)
                found.setdefault(key, {}).setdefault(unit, []).append(position)
        if not found:
            raise NotPeriodic("no operator belongs to it")
        for (phase, _), positions in sorted(found.items(), key=lambda item: min(map(min, item[1].values()))):
            if sorted(positions) != [0, 1, 2, 3]:
                raise NotPeriodic(f"the {phase.value} pass has operators of {len(positions)} of 4 units")
            a, b, c, z = (positions[unit][0] for unit in range(4))
            one = self._with_tail(_Pass((a, b, c, z), max(map(max, positions.values())) + 1))
            if not (a > b > c > z if phase is Phase.BACKWARD else a < b < c < z):
                raise NotPeriodic(f"the units do not follow each other in the {phase.value} pass")
            for unit in range(4):
                if not all(position in one.segment(unit) for position in positions[unit]):
                    raise NotPeriodic(f"units overlap in the {phase.value} pass")
            self.passes.append(one)

    def _with_tail(self, one: _Pass) -> _Pass:
        """What follows the last unit as it follows the others, such as a sum that the container's owner makes, is its
        own.
        """
        ops, (last, other) = self.source.ops, ((0, 1) if one.is_backward else (3, 2))
        ends, model = one.ends, one.segment(other)
        while (
            (at := ends - one.begins[last]) < len(model) and ends < len(ops) and ops[ends].kind == ops[model[at]].kind
        ):
            ends += 1
        return replace(one, ends=ends)

    def _pair_inputs(self) -> None:
        """Parameters and buffers of B with those of C."""
        inputs = {item.path: item for item in self.source.inputs}
        for item in self.source.inputs:
            if self.of.get(item.value.name) == 1:
                other = inputs.get(self._moved(item.path, self.run.kept[1], self.run.kept[2]))
                if other is None or (other.role, other.value.type) != (item.role, item.value.type):
                    raise NotPeriodic(f"{item.path} has no partner")
                self.partner[item.value.name] = other.value.name

    def _moved(self, path: str, source: int, target: int) -> str:
        """A path in one unit as a path in another; other paths stay."""
        if self._unit(path) != source:
            return path
        head = self.run.path("")
        child, dot, rest = path[len(head) :].partition(".")
        units = self.run.units
        return f"{head}{units[target][units[source].index(child)]}{dot}{rest}"

    # ---- B and C are equal -------------------------------------------------------------------------------------------

    def _compare(self, one: _Pass) -> None:
        ours, theirs = one.segment(1), one.segment(2)
        if len(ours) != len(theirs):
            raise NotPeriodic(f"two units have {len(ours)} and {len(theirs)} operators")
        for left, right in zip(ours, theirs, strict=True):
            a, b = self.source.ops[left], self.source.ops[right]
            types = [value.type for value in a.results] == [value.type for value in b.results]
            module = self._moved(a.module, self.run.kept[1], self.run.kept[2])
            if (a.kind, a.phase, a.line, module, a.call) != (b.kind, b.phase, b.line, b.module, b.call) or not types:
                raise NotPeriodic(f"{a.describe()} and {b.describe()} differ")
            self._compare_args(a, b)
            self._compare_seq(a, b)
            self.partner.update((x.name, y.name) for x, y in zip(a.results, b.results, strict=True))

    def _compare_args(self, a: Op, b: Op) -> None:
        mine, theirs = list(a.args), list(b.args)
        if a.kind == "sennit.uniform":
            step = _difference(a.args[1], b.args[1])
            if self.draws not in (0, step):
                raise NotPeriodic("units draw different numbers of random values")
            self.draws = step
            mine[1] = theirs[1]
        if not self._agree(tuple(mine), tuple(theirs)):
            raise NotPeriodic(f"{a.describe()} and {b.describe()} have other arguments")
        if [key for key, _ in a.kwargs] != [key for key, _ in b.kwargs] or not self._agree(
            tuple(arg for _, arg in a.kwargs), tuple(arg for _, arg in b.kwargs)
        ):
            raise NotPeriodic(f"{a.describe()} and {b.describe()} have other arguments")

    def _compare_seq(self, a: Op, b: Op) -> None:
        if a.seq == b.seq:
            return
        if a.seq is None or b.seq is None or self.seqs not in (0, b.seq - a.seq):
            raise NotPeriodic(f"sequence numbers of {a.describe()} and {b.describe()} do not go up evenly")
        self.seqs = b.seq - a.seq

    def _agree(self, x: Arg, y: Arg) -> bool:
        """Whether two arguments at the same place of B and C fit the table at the top."""
        if isinstance(x, Ref) and isinstance(y, Ref):
            own, other = self.of.get(x.name), self.of.get(y.name)
            if own == 1:
                return self.partner.get(x.name) == y.name
            if own == 2:
                return (
                    other not in (1, 2)
                    and y.name not in self.shared
                    and self.after.setdefault(y.name, x.name) == x.name
                )
            if other == 1:
                return True
            self.shared.add(x.name)
            return x.name == y.name and other != 2 and x.name not in self.after
        if isinstance(x, tuple) and isinstance(y, tuple):
            return len(x) == len(y) and all(map(self._agree, x, y))
        return type(x) is type(y) and (x == y or (x != x and y != y))

    # ---- copies ------------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> int:
        """The last unit that is a copy of C."""
        return len(self.run.units) - 2

    def _name(self, name: str, unit: int) -> str:
        """What a value of C is called in a copy."""
        return name if unit == 2 else f"{name}.{unit}"

    def _unrolled(self) -> Graph:
        ops: list[Op] = []
        repeats = []
        done = 0
        for one in sorted(self.passes, key=lambda item: min(item.begins)):
            first = one.segment(2 if one.is_backward else 1)
            ops += [self._outside(position) for position in range(done, first.start)]
            repeats.append(self._repeat(len(ops), len(first)))
            units = range(self._last, 0, -1) if one.is_backward else range(1, self._last + 1)
            for unit in units:
                template = one.segment(1 if unit == 1 else 2)
                ops += [self._copy(self.source.ops[position], unit) for position in template]
            done = one.segment(1 if one.is_backward else 2).stop
        ops += [self._outside(position) for position in range(done, len(self.source.ops))]
        moved = self._moved_repeats(len(ops))
        return replace(
            self.source,
            inputs=self._inputs(),
            ops=tuple(ops),
            outputs=self._outputs(),
            repeats=(*moved, *repeats),
        )

    def _repeat(self, start: int, length: int) -> Repeat:
        return Repeat(self.run.module, len(self.run.units), start, length, self._last)

    def _moved_repeats(self, total: int) -> list[Repeat]:
        """Repeats of other runs: those behind a segment moved down."""
        grown = [(one.segment(2).start, len(one.segment(2)) * (self._last - 2)) for one in self.passes]
        return [
            replace(repeat, start=repeat.start + sum(more for where, more in grown if where < repeat.start))
            for repeat in self.source.repeats
        ]

    def _copy(self, op: Op, unit: int) -> Op:
        """An operator of C in a copy; B's own are the first copy."""
        counted = self._counted(op, max(unit, 2))
        if unit == 1:
            return counted
        return replace(
            counted,
            args=tuple(self._in_copy(arg, unit) for arg in counted.args),
            kwargs=tuple((key, self._in_copy(arg, unit)) for key, arg in op.kwargs),
            results=tuple(Value(self._name(value.name, unit), value.type) for value in op.results),
            module=self._moved(op.module, self.run.kept[2], unit),
        )

    def _counted(self, op: Op, unit: int | None = None) -> Op:
        """An operator with its counts moved up by the copies before it; `unit` is the copy that it is in, if it is in
        one.
        """
        args, seq = op.args, op.seq
        if op.kind == "sennit.uniform":
            args = (args[0], self._moved_up(_number(args[1]), self.draws, self.draw_ranges, unit), *args[2:])
        if seq is not None:
            seq = self._moved_up(seq, self.seqs, self.seq_ranges, unit)
        return replace(op, args=args, seq=seq)

    def _moved_up(self, number: int, step: int, ranges: list[tuple[int, int]], unit: int | None) -> int:
        """A count behind C goes up by all the copies, one inside by the copies before its own; in every pass.

        An operator without a gradient has the sequence number of the one before it, so C's last number may stand behind
        C too.
        """
        more = 0
        for low, high in ranges:
            if number > high or (unit is None and number == high):
                more += self._last - 2
            elif unit is not None and number >= low:
                more += unit - 2
        return number + step * more

    def _ranges(self, count: Callable[[Op], int | None]) -> list[tuple[int, int]]:
        """The least and the greatest count among C's operators, in each forward pass."""
        ranges = []
        for one in self.passes:
            numbers = [] if one.is_backward else [count(self.source.ops[position]) for position in one.segment(2)]
            known = [number for number in numbers if number is not None]
            if known:
                ranges.append((min(known), max(known)))
        return ranges

    def _in_copy(self, arg: Arg, unit: int) -> Arg:
        match arg:
            case Ref(name):
                return Ref(self._ref_in_copy(name, unit))
            case tuple():
                return tuple(self._in_copy(part, unit) for part in arg)
            case _:
                return arg

    def _ref_in_copy(self, name: str, unit: int) -> str:
        where = self.of.get(name)
        if where == 2:
            return self._input_or_value(name, unit)
        if where == 1:
            return name if unit == 2 else self._input_or_value(self.partner[name], unit - 1)
        if name in self.after and unit < self._last:
            return self._input_or_value(self.after[name], unit + 1)
        return name

    def _input_or_value(self, name: str, unit: int) -> str:
        item = self.inputs.get(name)
        return self._name(name, unit) if item is None else self._input_name(item, unit)

    def _input_name(self, item: Input, unit: int) -> str:
        """Inputs go by their path, wherever they are: so does a copy."""
        return item.value.name.replace(item.path, self._moved(item.path, self.run.kept[2], unit), 1)

    # ---- the rest of the graph ---------------------------------------------------------------------------------------

    def _outside(self, position: int) -> Op:
        """An operator of A, of Z or of the rest."""
        op = self.source.ops[position]
        own = next((self.of[value.name] for value in op.results if value.name in self.of), None)
        for name in op.reads:
            near = self.of.get(name)
            if (near == 1 and own != 0 and not self._is_behind(position)) or (near == 2 and own != 3):
                raise NotPeriodic(f"{op.describe()} reads one unit among many")
        counted = self._counted(op)
        return replace(
            counted,
            args=tuple(self._at_end(arg) for arg in counted.args),
            kwargs=tuple((key, self._at_end(arg)) for key, arg in op.kwargs),
        )

    def _is_behind(self, position: int) -> bool:
        """Whether an operator follows the last segment of the backward pass: it continues what A's would."""
        backward = [one for one in self.passes if one.is_backward]
        return bool(backward) and position >= backward[-1].ends

    def _at_end(self, arg: Arg) -> Arg:
        """What Z reads of C is in the last copy."""
        match arg:
            case Ref(name) if self.of.get(name) == 2:
                return Ref(self._input_or_value(name, self._last))
            case tuple():
                return tuple(self._at_end(part) for part in arg)
            case _:
                return arg

    def _inputs(self) -> tuple[Input, ...]:
        def copy(item: Input, unit: int) -> Input:
            path = self._moved(item.path, self.run.kept[2], unit)
            return Input(item.role, Value(self._input_name(item, unit), item.value.type), path)

        return tuple(_with_copies(self.source.inputs, lambda item: self.of.get(item.value.name) == 2, copy, self._last))

    def _outputs(self) -> tuple[Output, ...]:
        for output in self.source.outputs:
            unit = self.of.get(output.name)
            own = output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER) and self._kept_unit(output.path) == unit
            if (unit in (1, 2) or self._kept_unit(output.path) in (1, 2)) and not own:
                raise NotPeriodic(f"{output.kind.value} {output.key!r} comes from one unit among many")

        def copy(output: Output, unit: int) -> Output:
            path = self._moved(output.path, self.run.kept[2], unit)
            return Output(output.kind, self._input_or_value(output.name, unit), path)

        return tuple(_with_copies(self.source.outputs, lambda output: self.of.get(output.name) == 2, copy, self._last))


def _with_copies(
    items: tuple[T, ...], is_unit: Callable[[T], bool], copy: Callable[[T, int], T], last: int
) -> Iterator[T]:
    """Each stretch of items of C becomes as many stretches as there are copies; the others stay."""
    for of_unit, stretch in groupby(items, is_unit):
        kept = list(stretch)
        if of_unit:
            for unit in range(2, last + 1):
                yield from (copy(item, unit) for item in kept)
        else:
            yield from kept


def _number(arg: Arg) -> int:
    assert isinstance(arg, int)
    return arg


def _difference(x: Arg, y: Arg) -> int:
    return _number(y) - _number(x)
