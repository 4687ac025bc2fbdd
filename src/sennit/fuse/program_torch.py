"""The kernels of a strategy as two Python functions, one for each pass.

    def forward(values, settle):                 def backward(values, gradient, product, rows):
        settle(4)                                    a0 = values.pop('tangent')
        a0 = values['tokens.weight']                 ...
        a1 = values.pop('tokens')                    a7 = aten_mm_default(a5, a6)
        a2 = aten_embedding_default(a0, a1)          gradient('head.weight', a7)
        ...                                          ...

`values` holds tensors by the names of the graph: at first its inputs, then what one pass leaves to the other or to the
caller. Everything else is a local variable, and each goes with a `del` after its last use: memory is freed where it can
be, and a sum is written over an operand that nothing reads again (`in_place_torch.py`). `settle(b)` stands before the
first kernel that reads a parameter of bucket b, where b is waited for in the next step; `gradient(path, tensor)`
follows the kernel that makes it. A gradient that a product makes is not made here: whoever takes it gets the factors,
and computes it where it is wanted, in one piece or, where the strategy cuts it, in blocks of rows
(`products_torch.py`):

        product('head.weight', rows_head_weight, a5, a6)

Nor is that of a look-up of which packed rows travel (`looked_up.py`): whoever takes it gets the rows to add up and
their places, and adds those of the head where the table is the head too.

        rows('tokens.weight:rows', a9, a1)

A product that is the first to read a weight which the strategy cuts waits for it block by block of rows
(`row_uses.py`):

        a12 = reads_head_weight(settle, a11, a3, a4)

Terms of sums that need not be written first are not (`running_sums.py`).

A step of a small model runs thousands of operators of some microseconds each. Straight code costs less beside them than
a loop over kernels with a dictionary of values would, and it can be read: `StepProgram.source` is what runs.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from sennit.capture.element_types import torch_dtype
from sennit.errors import RunError
from sennit.fuse.in_place_torch import IN_PLACE, handed_on, overwriting
from sennit.fuse.kernel_torch import (
    CompiledKernel,
    direct_of,
    is_worth_compiling,
    kernel_module,
    returns_several,
    signature,
    takes_device,
    wanted_results,
)
from sennit.fuse.looked_up import ROWS, LookUp, in_one_piece, parameter_of
from sennit.fuse.products_torch import ProductSum, ReadInBlocks, RowBlocks, added_at, from_zeros
from sennit.fuse.row_blocks import RowProduct, blocks, cut_spans, row_products
from sennit.fuse.row_uses import RowUse, UseBlock, use_blocks
from sennit.fuse.running_sums import ProductTerm, SliceStart, SliceTerm, Term, running_sums
from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Graph, Op, OutputKind, Phase, Ref, Role
from sennit.ir.strategy import Strategy, WaitAt
from sennit.ir.strategy_check import Kernel, kernels

__all__ = ["StepProgram", "first_needs"]

Settle = Callable[[int], None]
TakeGradient = Callable[[str, Tensor], None]
TakeProduct = Callable[[str, RowBlocks, Tensor, Tensor], None]  # path, and left @ right
TakeRows = Callable[[str, Tensor, Tensor], None]  # path, rows to add up, and their places


@dataclass(frozen=True, slots=True)
class _Line:
    """One statement: the variables that it sets and reads, for the `del` after their last use."""

    text: str
    sets: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(slots=True)
class _Pass:
    """One function being written.

    `env` gives the variable of a value, `stays` the values that are needed after this pass.
    """

    stays: frozenset[str]
    lines: list[_Line] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def variable(self) -> str:
        self.count += 1
        return f"a{self.count - 1}"

    def add(self, text: str, sets: Sequence[str] = (), reads: Sequence[str] = ()) -> None:
        self.lines.append(_Line(text, tuple(sets), tuple(dict.fromkeys(reads))))

    def read(self, name: str) -> str:
        """The variable of a value, taken from `values` where it is first read."""
        if name not in self.env:
            variable = self.env[name] = self.variable()
            source = f"values[{name!r}]" if name in self.stays else f"values.pop({name!r})"
            self.add(f"{variable} = {source}", sets=(variable,))
        return self.env[name]

    def source(self, header: str) -> str:
        last = {variable: place for place, line in enumerate(self.lines) for variable in (*line.sets, *line.reads)}
        text = [header]
        for place, line in enumerate(self.lines):
            done = [variable for variable in (*line.sets, *line.reads) if last[variable] == place]
            text.append(f"    {line.text}")
            if done:
                text.append(f"    del {', '.join(dict.fromkeys(done))}")
        return "\n".join([*text, "    return", ""])


class StepProgram:
    """What one strategy runs on one rank."""

    def __init__(
        self,
        graph: Graph,
        strategy: Strategy,
        device: torch.device,
        *,
        packed: Mapping[str, LookUp] | None = None,
        uses: Mapping[str, RowUse] | None = None,
        artifacts: dict[Any, Any] | None = None,
    ) -> None:
        """Of the gradients in `packed`, rows travel; weights in `uses` may be read in blocks of rows.

        `artifacts` holds what was compiled, and takes more; with None, operators run as they are.
        """
        self.graph, self.strategy, self.device = graph, strategy, device
        found = kernels(strategy, graph)
        self._refuse_reordered_draws(found)
        self.inputs = tuple(item for item in graph.inputs if item.role not in (Role.TANGENT, Role.SEED))
        (self.loss,) = [output.name for output in graph.outputs if output.kind is OutputKind.LOSS]
        (tangent,) = [item.value for item in graph.inputs if item.role is Role.TANGENT]
        self.tangent, self._of_loss = tangent.name, torch_dtype(tangent.type.dtype)
        count = [kernel.ops[0].phase for kernel in found].count(Phase.FORWARD)
        assert all(
            kernel.ops[0].phase is Phase.BACKWARD for kernel in found[count:]
        )  # it reads the tangent of the loss
        self._gradients: dict[str, list[str]] = {}  # two parameters may have one gradient
        for output in graph.outputs:
            if output.kind is OutputKind.GRADIENT:
                self._gradients.setdefault(output.name, []).append(output.path)
        self._paths = {path for paths in self._gradients.values() for path in paths}
        self._namespace: dict[str, Any] = {"torch": torch, "inf": inf, "nan": nan, "device": device}
        self._namespace |= {"added_at": added_at, "from_zeros": from_zeros}
        self._artifacts = artifacts
        # weights that are read in blocks of rows, each when its bucket is there
        self.read_in_blocks = use_blocks(strategy.buckets, uses or {}, self._called_alone(found))
        self._reading = {use.product: (path, use) for path, use in (uses or {}).items() if path in self.read_in_blocks}
        needs = first_needs(found[:count], graph, strategy, self.read_in_blocks)
        # by operator: what whoever takes a gradient makes in its place; None for operators that go into another
        self._in_rows: dict[str, tuple[str, RowProduct | LookUp] | None] = {}
        if device.type == "cpu":
            self._leave_to_taker(found, in_one_piece(packed or {}, strategy.buckets))
        self._returned = {output.name for output in graph.outputs if output.kind is not OutputKind.GRADIENT}
        later = {name for kernel in found[count:] for name in kernel.reads}
        left = frozenset(later | self._returned)
        self.settled: dict[int, bool] = {}  # the buckets that the forward pass waits for, in its order
        forward = self._written(found[:count], left, needs)
        own = handed_on(found[:count], left, self._inside(found[:count])) - self._returned
        backward = self._written(found[count:], frozenset(), {}, own)
        self.source = "\n\n".join(
            (
                forward.source("def forward(values, settle):"),
                backward.source("def backward(values, gradient, product, rows):"),
            )
        )
        name = f"<sennit.DataParallel of {graph.name}: {strategy.name}>"
        exec(compile(self.source, name, "exec"), self._namespace)
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(keepends=True), name)
        self.forward: Callable[[dict[str, Tensor], Settle], None] = self._namespace["forward"]
        self.backward: Callable[[dict[str, Tensor], TakeGradient, TakeProduct, TakeRows], None]
        self.backward = self._namespace["backward"]

    def one(self) -> Tensor:
        """What the backward pass begins with: the gradient of the loss by itself."""
        return torch.ones((), dtype=self._of_loss, device=self.device)

    @staticmethod
    def _refuse_reordered_draws(found: Sequence[Kernel]) -> None:
        """Random numbers come from torch's generator, in the order of the model."""
        drawn = [op.name for kernel in found for op in kernel.body if op.kind.startswith("sennit.")]
        again = [
            op.name for kernel in found for op in kernel.body if op.kind.startswith("sennit.") and len(kernel.body) > 1
        ]
        if again or len(set(drawn)) < len(drawn):
            raise RunError(
                f"random operators %{', %'.join(dict.fromkeys(again or drawn))} share a kernel or are drawn twice",
                fix="leave operators that draw random numbers out of the strategy's groups",
            )

    def _leave_to_taker(self, found: Sequence[Kernel], packed: Mapping[str, LookUp]) -> None:
        """Products that make a gradient, and look-ups of which packed rows travel.

        Each with a kernel of its own, that is, and a gradient of one parameter.
        """
        alone = frozenset(kernel.body[0].name for kernel in found if len(kernel.body) == 1)
        products = {
            path: product
            for path, product in row_products(self.graph).items()
            if alone.issuperset((product.product, *product.views))
        }
        heads = {parameter_of(path): item for path, item in packed.items() if item.total is not None}
        for output in self.graph.outputs:
            path = output.path
            if (item := packed.get(path)) is not None and item.total is None and self._is_taken(item, path, alone):
                self._in_rows[item.table] = (path, item)
            if (product := products.get(path)) is None:
                continue
            if (item := heads.get(path)) is not None:  # the sum is made with the look-up's rows, or neither is
                rows = path + ROWS
                if not self._is_taken(item, rows, alone):
                    continue
                assert item.total is not None
                self._in_rows |= {item.table: (rows, item), item.total: None}
            elif path + ROWS in self._paths:  # the sum reads it, and travels whole
                continue
            self._in_rows[product.product] = (path, product)
            self._in_rows.update(dict.fromkeys(product.views))

    def _is_taken(self, item: LookUp, path: str, alone: frozenset[str]) -> bool:
        """Whether nothing but this gradient comes of a look-up's operators."""
        names = [item.table] if item.total is None else [item.table, item.total]
        readers = [op.name for op in self.graph.ops if set(names).intersection(op.reads)]
        return alone.issuperset(names) and readers == names[1:] and self._gradients.get(names[-1]) == [path]

    def _written(
        self,
        found: Sequence[Kernel],
        stays: frozenset[str],
        needs: Mapping[int, Sequence[int]],
        own: frozenset[str] = frozenset(),
    ) -> _Pass:
        writing = _Pass(stays)
        read_at: dict[str, set[int]] = {}
        for place, kernel in enumerate(found):
            for name in kernel.reads:
                read_at.setdefault(name, set()).add(place)
        kept, inside = stays | self._gradients.keys(), self._inside(found)
        over = overwriting(found, kept, self.graph.types(), inside, own)
        sums = running_sums(found, over, kept, inside) if self.device.type == "cpu" else {}
        for place, kernel in enumerate(found):
            for bucket in needs.get(place, ()):
                writing.add(f"settle({bucket})")
                self.settled[bucket] = True
            if kernel.body[0].name in self._in_rows:
                self._write_rows(writing, self._in_rows[kernel.body[0].name])
                continue
            made = [value.name for op in kernel.ops for value in op.results]
            given = [name for name in made if name in stays or name in self._gradients]
            written = frozenset(name for name in made if read_at.get(name, set()) - {place}) | frozenset(given)
            if self._is_compiled(kernel):
                self._write_compiled(writing, kernel, written)
            elif (name := kernel.body[0].name) in self._reading:
                self._write_reading(writing, name, *self._reading[name])
            elif name in sums:
                self._write_term(writing, name, sums[name])
            else:
                self._write_operators(writing, kernel, over)
            for name in given:
                variable = writing.env[name]
                if name in stays:
                    writing.add(f"values[{name!r}] = {variable}", reads=(variable,))
                for path in self._gradients.get(name, ()):
                    writing.add(f"gradient({path!r}, {variable})", reads=(variable,))
        return writing

    def _inside(self, found: Sequence[Kernel]) -> set[str]:
        """Operators that are not called one by one."""
        compiled = {op.name for kernel in found if self._is_compiled(kernel) for op in kernel.body}
        return compiled | self._in_rows.keys() | self._reading.keys()

    def _is_compiled(self, kernel: Kernel) -> bool:
        return self._artifacts is not None and is_worth_compiling(kernel)

    def _called_alone(self, found: Sequence[Kernel]) -> frozenset[str]:
        return frozenset(
            kernel.body[0].name for kernel in found if len(kernel.body) == 1 and not self._is_compiled(kernel)
        )

    def _write_operators(self, writing: _Pass, kernel: Kernel, over: frozenset[str]) -> None:
        """The kernel's operators as they are, those in `over` over their first operand.

        What it repeats gets variables of its own: others hold the first results.
        """
        private = _made([op for op in kernel.body if op.name in kernel.repeated])
        outer = {name: variable for name, variable in writing.env.items() if name in private}
        for op in kernel.body:
            arguments = [_show(arg, writing) for arg in op.args]
            arguments += [f"{key}={_show(arg, writing)}" for key, arg in op.kwargs]
            arguments += ["device=device"] if takes_device(op) else []
            if op.kind == "aten.clone.default":  # in order: else the view behind it copies a second time
                arguments.append("memory_format=torch.contiguous_format")
            reads = [writing.env[name] for name in op.reads]
            call = f"{self._target(op, in_place=op.name in over)}({', '.join(arguments)})"
            variables = [writing.variable() for _ in op.results]
            if not returns_several(op):
                writing.add(f"{variables[0]} = {call}", variables, reads)
            else:
                several = writing.variable()
                writing.add(f"{several} = {call}", (several,), reads)
                parts = [f"{several}[{place}]" for place in wanted_results(op)]
                writing.add(f"{', '.join(variables)} = {', '.join(parts)}", variables, (several,))
            writing.env.update({value.name: variable for value, variable in zip(op.results, variables, strict=True)})
        for name in private:
            del writing.env[name]
        writing.env.update(outer)

    def _write_rows(self, writing: _Pass, what: tuple[str, RowProduct | LookUp] | None) -> None:
        match what:
            case None:  # a view behind a product, or the sum of a head's gradient and rows
                return
            case path, RowProduct() as product:
                name = f"rows_{path.replace('.', '_')}"
                spans = cut_spans(self.strategy.buckets).get(path, [(0, product.rows * product.width)])
                self._namespace[name] = RowBlocks(blocks(spans, product), product.width)
                left, right = writing.read(product.left), writing.read(product.right)
                writing.add(f"product({path!r}, {name}, {left}, {right})", reads=(left, right))
            case path, LookUp() as item:
                source, places = writing.read(item.source), writing.read(item.places)
                writing.add(f"rows({path!r}, {source}, {places})", reads=(source, places))

    def _write_reading(self, writing: _Pass, name: str, path: str, use: RowUse) -> None:
        call = f"reads_{path.replace('.', '_')}"
        self._namespace[call] = ReadInBlocks(self.read_in_blocks[path])
        self.settled |= dict.fromkeys((block.bucket for block in self.read_in_blocks[path]), True)
        reads = [writing.read(value) for value in (use.x, use.weight, use.bias) if value is not None]
        writing.env[name] = writing.variable()
        writing.add(f"{writing.env[name]} = {call}(settle, {', '.join(reads)})", (writing.env[name],), reads)

    def _write_term(self, writing: _Pass, name: str, term: Term | None) -> None:
        match term:
            case None:  # it goes into a sum
                return
            case ProductTerm(total, left, right):
                call = f"sum_{sum(key.startswith('sum_') for key in self._namespace)}"
                self._namespace[call] = ProductSum()
                reads = [writing.read(value) for value in (total, left, right)]
                arguments = reads
            case SliceTerm(total, of, dim, index):
                call, reads = "added_at", [writing.read(value) for value in (total, of)]
                arguments = [*reads, str(dim), str(index)]
            case SliceStart(of, shape, dim, index):
                call, reads = "from_zeros", [writing.read(of)]
                arguments = [*reads, str(list(shape)), str(dim), str(index)]
        writing.env[name] = writing.variable()
        writing.add(f"{writing.env[name]} = {call}({', '.join(arguments)})", (writing.env[name],), reads)

    def _write_compiled(self, writing: _Pass, kernel: Kernel, written: frozenset[str]) -> None:
        assert self._artifacts is not None
        module, reads, writes = kernel_module(kernel, written, self.device)
        name = f"kernel_{sum(key.startswith('kernel_') for key in self._namespace)}"
        key = signature(kernel, written, self.graph.types())
        self._namespace[name] = CompiledKernel(module, key, self._artifacts)
        inputs = [writing.read(name) for name in reads]
        variables = [writing.variable() for _ in writes]
        targets = "".join(f"{variable}, " for variable in variables)
        writing.add(f"{targets}= {name}({', '.join(inputs)})", variables, inputs)
        writing.env.update(zip(writes, variables, strict=True))

    def _target(self, op: Op, *, in_place: bool) -> str:
        kind = IN_PLACE[op.kind] if in_place else op.kind
        name = kind.replace(".", "_")
        if name not in self._namespace:
            self._namespace[name] = getattr(torch.Tensor, kind.split(".")[1]) if in_place else direct_of(op)
        return name


def _made(ops: Sequence[Op]) -> set[str]:
    return {value.name for op in ops for value in op.results}


def first_needs(
    forward: Sequence[Kernel],
    graph: Graph,
    strategy: Strategy,
    in_blocks: Mapping[str, Sequence[UseBlock]] | None = None,
) -> dict[int, list[int]]:
    """By kernel, the buckets that wait in the next step and whose parameters it is the first to read.

    A bucket that no kernel reads is settled when the backward pass begins; rows of a parameter in `in_blocks` are
    settled by the product that reads them.
    """
    names = {item.value.name: item.path for item in graph.inputs if item.role is Role.PARAM}
    first: dict[str, int] = {}
    for place, kernel in enumerate(forward):
        for name in kernel.reads:
            if name in names:
                first.setdefault(names[name], place)
    needs: dict[int, list[int]] = {}
    for number, bucket in enumerate(strategy.buckets):
        paths = [parameter_of(part.path) for part in bucket.parts if part.path not in (in_blocks or {})]
        uses = [first[path] for path in paths if path in first]
        if bucket.wait is WaitAt.NEXT and uses:
            needs.setdefault(min(uses), []).append(number)
    return needs


def _show(arg: Arg, writing: _Pass) -> str:
    match arg:
        case Ref(name):
            return writing.read(name)
        case DType():
            return str(torch_dtype(arg))
        case tuple():
            return f"[{', '.join(_show(part, writing) for part in arg)}]"
        case _:
            return repr(arg)
