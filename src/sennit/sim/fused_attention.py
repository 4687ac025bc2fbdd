"""Attention as one kernel: a program in which `scaled_dot_product_attention` was captured in its mathematical form, as a GPU runs it.

Capture takes `F.scaled_dot_product_attention(q, k, v, mask)` apart, because every operator of

    scores = (q √s) (k √s)ᵀ + mask;   p = softmax(scores);   out = p v
    dv = pᵀ g;   dp = g vᵀ;   dscores = p (dp - Σ p dp);   dq = s dscores k;   dk = s dscoresᵀ q

has a rule that splits it. Eager torch on a GPU calls a kernel that never stores `scores` or `p`. `fuse_attention` gives the program that
does the same: the operators above become `aten._scaled_dot_product_*_attention` and its derivative, which read q, k, v as the model
made them, in their own element type. It is for asking what a model takes with such kernels; the program itself is what runs.

**What is found.** Both operands of the product before a softmax are multiplied by one same number: only torch's own decomposition does
that, a model that writes attention by hand says `scores * s` and keeps its operators, as it does in eager torch. From the softmax on, all that
passes scores-sized arrays along is followed, up to the products: the two of the first line are one kernel, the four of the second
the other. Where such an array is read by anything else, or the products are not those above, the attention stays as it is.
An attention that the backward pass computes again (`plan/recompute.py`) is found there a second time, and its derivative belongs to
that one.

**A mask that is trained** (a bias of relative positions, a pair representation). torch's memory-efficient kernel takes any mask, and gives its
gradient in the shape of the scores and the type of the query; what sums it over the batch follows as before. So no scores are kept, and the
gradient lies in memory while it is summed. cuDNN's and FlashAttention's kernels have no such result.

**What is left out** besides: whatever nobody reads any more (masks made of `arange`, copies to float32), and the copies that put heads and
tokens in their order, since a kernel writes its results in the order that the model's view asks for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref
from sennit.ir.operators import is_view
from sennit.ir.program import Buffer, Compute, Free, Lane, Program, Step, defines, reads

__all__ = ["fuse_attention"]

PRODUCT = "aten.bmm.default"
SOFTMAX = "aten._softmax.default"
DERIVATIVE = "aten._softmax_backward_data.default"
SCALED = "aten.mul.Scalar"
CAST = "aten._to_copy.default"
COPY = "aten.clone.default"
UNSAFE = "aten._unsafe_view.default"
POINTWISE = (
    "aten.add.Tensor",
    "aten.mul.Tensor",
    "aten.mul.Scalar",
    "aten.where.self",
    "aten.masked_fill.Scalar",
    SOFTMAX,
    DERIVATIVE,
    "aten.eq.Scalar",
    "aten.all.dim",
)


def fuse_attention(program: Program) -> Program:
    """The program with each attention that the module's text describes as one kernel, and another for its derivative."""
    return replace(program, lanes=tuple(_fuse(lane) for lane in program.lanes))


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A step that stands for others: where it goes, and which steps it takes the place of."""

    at: int
    step: Compute
    covers: frozenset[int]


def _fuse(lane: Lane) -> Lane:
    code = _Code(lane)
    kernels: list[_Kernel] = []
    for position, step in enumerate(lane.steps):
        if isinstance(step, Compute) and step.kind == SOFTMAX:
            kernels += _kernels(code, position)
    return _replaced(code, kernels) if kernels else lane


class _Code:
    """A lane with who makes and who reads each buffer."""

    def __init__(self, lane: Lane) -> None:
        self.lane, self.buffers = lane, lane.buffers()
        self.maker: dict[str, int] = {}
        self.readers: dict[str, list[int]] = {}
        for position, step in enumerate(lane.steps):
            for buffer in defines(step):
                self.maker[buffer.name] = position
            if not isinstance(step, Free):
                for name in reads(step):
                    self.readers.setdefault(name, []).append(position)
        self.outputs = {item.name for item in lane.outputs}

    def made_by(self, name: str) -> Compute | None:
        step = self.lane.steps[self.maker[name]] if name in self.maker else None
        return step if isinstance(step, Compute) else None

    def compute(self, position: int) -> Compute | None:
        step = self.lane.steps[position]
        return step if isinstance(step, Compute) else None

    def elements(self, name: str) -> int:
        return self.buffers[name].type.elements

    def only_reader(self, name: str) -> int | None:
        found = self.readers.get(name, [])
        return found[0] if len(found) == 1 and name not in self.outputs else None


# ---- what belongs to an attention ----------------------------------------------------------------------------------------


class _Scores:
    """The scores-sized arrays around a softmax, the steps that pass them along, and the products at their ends. `derived` are those of the
    gradient of the scores, `leaks` those among them that something else reads: the gradient of a mask."""

    def __init__(self, code: _Code, softmax: int) -> None:
        self.code = code
        step = code.compute(softmax)
        assert step is not None
        self.result = step.results[0].name
        self.size = code.elements(self.result)
        self.steps: set[int] = set()
        self.products: set[int] = set()
        self.arrays: set[str] = set()
        self.derived: set[str] = set()
        self.leaks: set[str] = set()
        self.exposed = False
        waiting = [name for name in (*reads(step), self.result) if code.elements(name) == self.size]
        while waiting:
            name = waiting.pop()
            if name not in self.arrays:
                self.arrays.add(name)
                waiting += self._around(name)

    def _around(self, name: str) -> Iterable[str]:
        code = self.code
        self.exposed |= name in code.outputs
        if name in code.maker and self._from_product(name):
            yield from self._step(code.maker[name])
        for position in code.readers.get(name, ()):
            if name in self.derived and not self._ends_in_products(position):
                self.leaks.add(name)
            else:
                yield from self._step(position)

    def _ends_in_products(self, position: int) -> bool:
        """Whether a reader is a product, or passes what it reads along to products alone."""
        step = self.code.compute(position)
        if step is None or not (step.kind == PRODUCT or _moves(step.kind)):
            return False
        readers = self.code.readers.get(step.results[0].name, ())
        return step.kind == PRODUCT or (bool(readers) and all(map(self._ends_in_products, readers)))

    def _step(self, position: int) -> Iterable[str]:
        """The scores-sized arrays that a step passes along."""
        code = self.code
        step = code.compute(position)
        if step is None or not (step.kind == PRODUCT or _moves(step.kind) or step.kind in POINTWISE):
            self.exposed = True
        elif step.kind == PRODUCT:
            self.products.add(position)
        else:
            self.steps.add(position)
            results = [b.name for b in step.results if code.elements(b.name) == self.size or b.dtype is DType.BOOL]
            if step.kind == DERIVATIVE or any(name in self.derived for name in reads(step)):
                self.derived.update(results)
            yield from results
            yield from (name for name in reads(step) if code.elements(name) == self.size and self._from_product(name))

    def weighs_values(self, position: int) -> bool:
        """Whether a product is p v: its left operand is the softmax's result, not transposed."""
        step = self.code.compute(position)
        assert step is not None
        name, swapped = reads(step)[0], False
        while name in self.arrays and name not in self.derived:
            if name == self.result:
                return not swapped
            maker = self.code.made_by(name)
            if maker is None:
                return False
            swapped ^= maker.kind == "aten.permute.default" and _swaps(maker)
            passed = [item for item in reads(maker) if item in self.arrays and self.code.elements(item) == self.size]
            if not passed:
                return False
            name = passed[-1]  # of `where(no scores, 0, p)`, p
        return False

    def comes_before(self, position: int) -> bool:
        """Whether a product makes scores that the softmax reads, and no gradient of them."""
        step = self.code.compute(position)
        assert step is not None
        name, seen = step.results[0].name, set[str]()
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name == self.result:
                return True
            seen.add(name)
            for reader in self.code.readers.get(name, ()):
                made = self.code.compute(reader)
                if reader in self.steps and made is not None and made.kind != DERIVATIVE:
                    waiting += [b.name for b in made.results if b.name in self.arrays and b.name not in seen]
        return False

    def _from_product(self, name: str) -> bool:
        """Whether an array comes from a product by steps that only pass it along."""
        step = self.code.made_by(name)
        if step is None or self.code.elements(name) != self.size:
            return step is not None and name in self.arrays
        if step.kind == PRODUCT:
            return True
        if not (_moves(step.kind) or step.kind in POINTWISE):
            return False
        return any(self._from_product(item) for item in reads(step) if item != name)


def _moves(kind: str) -> bool:
    return is_view(kind) or kind in (CAST, COPY, UNSAFE)


def _kernels(code: _Code, softmax: int) -> list[_Kernel]:
    """The forward kernel of the attention around a softmax, and the backward one where there is one; none if it is another thing."""
    scores = _Scores(code, softmax)
    if scores.exposed:
        return []
    first = [position for position in scores.products if scores.comes_before(position)]
    second = [position for position in scores.products if scores.weighs_values(position)]
    backward = sorted(scores.products - {*first, *second})
    if len(first) != 1 or len(second) != 1 or len(backward) not in (0, 4):
        return []
    query_key, mix = code.compute(first[0]), code.compute(second[0])
    assert query_key is not None
    assert mix is not None
    query, key = (_entry(code, name) for name in reads(query_key))
    value = _entry(code, reads(mix)[1])
    if query is None or key is None or value is None or query.factor is None or query.factor != key.factor:
        return []
    out, result_steps = _exit(code, mix.results[0].name)
    inputs = (Ref(query.name), Ref(key.name), Ref(value.name))
    mask = _mask(code, scores, query.name)
    name = _name(code.buffers[query.name].dtype, mask)
    statistics = _statistics(out, f"{out.name}.logsumexp")
    causal = mask is None and _masked(code, scores)
    bias: Arg = Ref(mask) if mask is not None else None
    attention = Compute(
        f"aten.{name}.default",
        (*inputs, bias, True, 0.0, causal),
        (),
        (out, statistics),
        mix.phase,
        mix.module,
        mix.op,
    )
    kernels = [_Kernel(second[0], attention, frozenset(scores.steps | {first[0], second[0]} | result_steps))]
    if backward:
        last = _backward(code, scores, backward, attention, name, second[0])
        if last is None:
            return []
        kernels.append(last)
    return kernels


def _backward(
    code: _Code, scores: _Scores, products: Sequence[int], attention: Compute, name: str, attends: int
) -> _Kernel | None:
    """The derivative: its products are pᵀ g, g vᵀ, and the two of dscores. `attends` is where the attention itself runs."""
    covers = set(products)
    found: dict[str, Buffer] = {}  # dq, dk and dv
    steps = [step for step in map(code.compute, products) if step is not None]
    gradients = [_entry(code, reads(step)[0]) for step in steps if step.results[0].name in scores.arrays]
    for step in steps:
        _, right = reads(step)
        if step.results[0].name not in scores.arrays:
            # scores by k, qᵀ by scores; pᵀ by the gradient
            which = "dk" if right in scores.arrays else "dv" if _entry(code, right) in gradients else "dq"
            found[which], passed = _exit(code, step.results[0].name)
            covers |= passed
    bias = attention.args[3]
    if len(gradients) != 1 or gradients[0] is None or len(found) != 3 or len(scores.leaks) > (bias is not None):
        return None
    gradient, results = gradients[0], [found[which] for which in ("dq", "dk", "dv")]
    narrow = code.buffers[gradient.name].dtype
    results += [replace(code.buffers[leak], dtype=narrow) for leak in scores.leaks]
    behind = covers | scores.steps
    readers = [item for made in results for item in code.readers.get(made.name, ()) if item not in behind]
    # at the last product that comes before whoever reads a result, and behind all that the kernel reads
    at = max((product for product in products if product < min(readers, default=len(code.lane.steps))), default=-1)
    given = (gradient.name, *(arg.name for arg in attention.args if isinstance(arg, Ref)))
    if at <= max(attends, *(code.maker.get(name, -1) for name in given)):
        return None
    out, statistics = attention.results
    args: tuple[Arg, ...] = (Ref(gradient.name), *attention.args[:3])
    args += (bias,) if "efficient" in name else ()
    args += (Ref(out.name), Ref(statistics.name))
    places = {"_scaled_dot_product_efficient_attention": 11, "_scaled_dot_product_cudnn_attention": 14}
    args += (None,) * (places[name] - len(args)) + (attention.args[6],)
    last = code.compute(at)
    assert last is not None
    step = Compute(f"aten.{name}_backward.default", args, (), tuple(results), last.phase, last.module, last.op)
    return _Kernel(at, step, frozenset(covers))


def _name(dtype: DType, mask: str | None) -> str:
    """What torch calls on a recent GPU: cuDNN's kernel for 16 bits, the efficient one else and with a mask of its own."""
    narrow = dtype in (DType.BF16, DType.F16) and mask is None
    return "_scaled_dot_product_cudnn_attention" if narrow else "_scaled_dot_product_efficient_attention"


def _masked(code: _Code, scores: _Scores) -> bool:
    """Whether something is added to the scores: with no mask that the model gave, the causal one."""
    steps = [step for step in map(code.compute, scores.steps) if step is not None]
    kinds = {step.kind for step in steps if step.results[0].name not in scores.derived}
    return bool(kinds & {"aten.add.Tensor", "aten.masked_fill.Scalar"})


def _mask(code: _Code, scores: _Scores, query: str) -> str | None:
    """The mask that was added to the scores, if anything that the model was given went into it."""
    for position in sorted(scores.steps):
        step = code.compute(position)
        if step is None or step.kind != "aten.add.Tensor" or step.results[0].name in scores.derived:
            continue
        for name in reads(step):
            if name not in scores.arrays and not _constant(code, name):
                return name
    return None


def _constant(code: _Code, name: str) -> bool:
    """Whether an array depends on nothing that the lane was given."""
    step = code.made_by(name)
    return step is not None and all(_constant(code, item) for item in reads(step))


# ---- where it begins and ends ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    factor: Arg = None


def _entry(code: _Code, operand: str) -> _Entry | None:
    """What the model gave: the operand of a product, before copies, a change of type and the factor √s."""
    least = 4  # dims of what a model gives; the products' operands have three
    name, factor = operand, None
    found: str | None = None
    while (step := code.made_by(name)) is not None:
        above = reads(step)[0] if reads(step) else None
        if above is None or not (_moves(step.kind) or step.kind == SCALED):
            break
        if step.kind == SCALED:
            factor = step.args[1]
        if step.kind in (CAST, SCALED, COPY) or (found is None and step.kind == "aten.expand.default"):
            found = above
        if step.kind == CAST or (factor is not None and not _moves(_kind_above(code, above))):
            break
        if step.kind == "aten.permute.default" and len(code.buffers[above].layout.shape) >= least and found is not None:
            found = above if _swaps(step) and found == name else found
            if not _swaps(step):
                break
        name = above
    return _Entry(found, factor) if found is not None else None


def _kind_above(code: _Code, name: str) -> str:
    step = code.made_by(name)
    return step.kind if step is not None else ""


def _swaps(step: Compute) -> bool:
    """Whether a permutation swaps the last two dims and leaves the others."""
    order = step.args[1]
    return isinstance(order, tuple) and order == (*range(len(order) - 2), len(order) - 1, len(order) - 2)


def _exit(code: _Code, product: str) -> tuple[Buffer, set[int]]:
    """What the model takes: the result of a product in its four dims, times √s, in the model's type; and the steps up to there."""
    name, steps = product, set[int]()
    order = ("aten.view.default", SCALED, "aten.permute.default", CAST)
    reached = -1
    while (reader := code.only_reader(name)) is not None:
        step = code.compute(reader)
        if step is None or step.kind not in order or order.index(step.kind) <= reached:
            break
        if step.kind == "aten.permute.default" and not _swaps(step):
            break
        reached = order.index(step.kind)
        steps.add(reader)
        name = step.results[0].name
    return code.buffers[name], steps


def _statistics(out: Buffer, name: str) -> Buffer:
    """A number for each query, in f32."""
    layout = replace(out.layout, shape=(*out.layout.shape[:-1], 1))
    return Buffer(name, name, DType.F32, layout, out.times)


# ---- the new lane ----------------------------------------------------------------------------------------------------------


def _replaced(code: _Code, kernels: Sequence[_Kernel]) -> Lane:
    at = {kernel.at: kernel.step for kernel in kernels}
    covered = frozenset[int]().union(*(kernel.covers for kernel in kernels))
    steps: list[Step] = []
    for position, step in enumerate(code.lane.steps):
        if position in at:
            steps.append(at[position])
        elif position not in covered:
            steps.append(step)
    own = {buffer.name for kernel in kernels for buffer in kernel.step.results}
    steps = _without_copies(_without_unread(steps, code.outputs), own)
    freed = {step.source for step in code.lane.steps if isinstance(step, Free)} | own
    return replace(code.lane, steps=tuple(_with_frees(steps, freed - code.outputs)))


def _without_unread(steps: list[Step], outputs: set[str]) -> list[Step]:
    """Without what nobody reads any more, and without frees."""
    needed = set(outputs)
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Free):
            continue
        made = defines(step)
        if isinstance(step, Compute) and made and not any(buffer.name in needed for buffer in made):
            continue
        needed.update(reads(step))
        kept.append(step)
    return kept[::-1]


def _without_copies(steps: list[Step], own: set[str]) -> list[Step]:
    """A copy of a kernel's permuted result is a view: the kernel writes it in that order."""
    permuted: set[str] = set()
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Compute) and step.results:
            names = reads(step)
            if step.kind == "aten.permute.default" and names[0] in own:
                permuted.add(step.results[0].name)
            elif step.kind == COPY and names[0] in permuted:
                step = replace(step, kind="aten.alias.default", kwargs=())
        found.append(step)
    return found


def _with_frees(steps: list[Step], freed: set[str]) -> list[Step]:
    """Each of `freed` behind the last step that reads or makes it."""
    last: dict[str, int] = {}
    for position, step in enumerate(steps):
        for name in (*reads(step), *(buffer.name for buffer in defines(step))):
            last[name] = position
    ending: dict[int, list[str]] = {}
    for name, position in last.items():
        if name in freed:
            ending.setdefault(position, []).append(name)
    return [item for position, step in enumerate(steps) for item in (step, *map(Free, ending.get(position, ())))]
