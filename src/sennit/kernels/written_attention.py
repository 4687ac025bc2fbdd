"""Attention as capture writes it down, found in a lane: what it reads, what it makes, and which steps it is made of.

`F.scaled_dot_product_attention(q, k, v, mask, scale=f²)` is captured as the operators that torch's mathematical form
calls, and autograd's derivatives of them. On one device, for its pieces of q, k and v (... is batch and heads, N their
product):

    Q [N, L, D] = flat(q f)              K [N, D, S] = flat(kᵀ f)             V [N, S, D] = flat(v)
    scores [..., L, S] = view(Q K) + mask
    p = softmax(scores)                  or, as torch guards rows without keys: where(all(scores = -∞), 0, softmax(scores))
    out = view(flat(p) V)

    g = flat(the gradient of out)        dv = view(flat(p)ᵀ g)                dp = view(g Vᵀ)
    ds = softmax_backward(dp, p)         dq = view(flat(ds) Kᵀ) f             dk = (view(Qᵀ flat(ds)) f)ᵀ

`flat` merges the leading dims: an expansion that expands nothing, a copy, a view. In half precision all of it is in
f32, between casts of q, k, v and g and casts of out, dq, dk and dv. Key and value heads that several query heads share
are repeated first, and their gradients summed:

    k = view(clone(expand(unsqueeze(k₀, 2))))                              dk₀ = squeeze(sum(view(dk), 2))

Only this form is found: a model that writes attention by hand says `scores * s` and keeps its operators, as it does in
eager torch. The match is by name, operator by operator, so that what is found is this function and no other; and
nothing but the steps of the attention itself may read what it makes on the way (`Attention.is_closed`). So dropout
between p and V, statistics that devices exchange because keys are split, or scores that the model returns are not
found, and stay as they are.

All of this is on the pieces of one device: the program was proved before, and the kernel computes the same function of
the same pieces.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref
from sennit.ir.program import Buffer, Compute, reads
from sennit.kernels.attention_parts import (
    ADD,
    PERMUTE,
    PRODUCT,
    Operand,
    Way,
    before_repeating,
    find_product,
    flattened,
    leaving,
    operand,
    operands,
    product_above,
    source_of,
)
from sennit.kernels.causal_mask import is_causal_mask
from sennit.kernels.lane_code import LaneCode

__all__ = ["SOFTMAX", "Attention", "Derivative", "written_attention"]

SOFTMAX = "aten._softmax.default"
SOFTMAX_BACKWARD = "aten._softmax_backward_data.default"
WHERE = "aten.where.self"


@dataclass(frozen=True, slots=True)
class Derivative:
    """`mask` is the gradient of the mask, in the shape of the scores; `products` are where dq, dk, dv and dp are
    computed.
    """

    gradient: str
    query: Buffer
    key: Buffer
    value: Buffer
    mask: Buffer | None
    products: tuple[int, ...]
    covers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention: softmax(scale · query keyᵀ + mask) value, at the position `at` of the lane.

    `causal` stands for a mask that is the causal one (`causal_mask.py`); `mask` is then None. `covers` are the
    positions of the steps that it is made of, without those of its derivative. Where key and value have fewer heads
    than the query, each serves as many neighbouring ones.
    """

    query: str
    key: str
    value: str
    mask: str | None
    causal: bool
    scale: float
    out: Buffer
    at: int
    covers: frozenset[int]
    derivative: Derivative | None

    @property
    def results(self) -> tuple[Buffer, ...]:
        made = self.derivative
        return (self.out,) if made is None else (self.out, made.query, made.key, made.value)

    def is_closed(self, code: LaneCode) -> bool:
        """Whether nobody else reads what its steps make, but for its results."""
        inside = self.covers | (self.derivative.covers if self.derivative else frozenset())
        own = {buffer.name for buffer in self.results}
        if self.derivative and self.derivative.mask:
            own.add(self.derivative.mask.name)
        for position in inside:
            step = code.compute(position)
            assert step is not None
            for buffer in step.results:
                if buffer.name in own:
                    continue
                if buffer.name in code.outputs or not inside.issuperset(code.readers.get(buffer.name, ())):
                    return False
        return True


def written_attention(code: LaneCode, softmax: int, *, group: bool = True) -> Attention | None:
    """The attention around a softmax; None if it is another thing.

    With `group`, key and value heads are taken before they are repeated, where that is possible.
    """
    found = _Forward.find(code, softmax)
    if found is None:
        return None
    attention = (found.attention(group=True) if group else None) or found.attention(group=False)
    return attention if attention is not None and attention.is_closed(code) else None


@dataclass(frozen=True, slots=True)
class _Forward:
    """The forward part, in the names of the module's text. `covers` lacks how the result leaves."""

    code: LaneCode
    flat_query: str
    flat_key: str
    flat_value: str
    query: Operand
    key: Operand
    value: Operand
    mask: str | None
    weights: str
    flat_weights: str
    product: int
    covers: frozenset[int]

    @classmethod
    def find(cls, code: LaneCode, softmax: int) -> _Forward | None:
        step = code.compute(softmax)
        assert step is not None
        (scores,) = reads(step)
        if step.args[1] not in (-1, len(code.shape(scores)) - 1) or step.args[2] is not False:
            return None
        before, (weights, guard) = _scores(code, scores), _guarded(code, scores, step.results[0].name)
        flat = flattened(code, weights)
        mixes = code.reading(flat.name, PRODUCT) if flat is not None else []
        mixes = [(position, mix) for position, mix in mixes if flat is not None and mix.args[0] == Ref(flat.name)]
        if before is None or flat is None or len(mixes) != 1:
            return None
        ((product, mix),) = mixes
        (flat_query, flat_key), (_, flat_value) = operands(before.product), operands(mix)
        query = operand(code, flat_query, scaled=True)
        key = operand(code, flat_key, scaled=True, swapped=True)
        value = operand(code, flat_value)
        if query is None or key is None or value is None or query.factor != key.factor:
            return None
        covers = frozenset({softmax, *before.steps, *guard, *flat.steps})
        return cls(
            code, flat_query, flat_key, flat_value, query, key, value, before.mask, weights, flat.name, product, covers
        )  # fmt: skip

    def attention(self, *, group: bool) -> Attention | None:
        code = self.code
        narrow = self._narrow()
        left = leaving(code, self.product, Way(cast=narrow))
        if left is None and narrow is not None:  # in half precision by the model's own casts
            narrow, left = None, leaving(code, self.product, Way())
        if left is None:
            return None
        (out, steps), taken = left, self._taken(narrow)
        query, key, value = taken
        if group:
            shared = before_repeating(code, key), before_repeating(code, value)
            if shared[0] is None or shared[1] is None:
                return None
            key, value = shared[0], shared[1]
        derivative: Derivative | None = None
        backwards = code.reading(self.weights, SOFTMAX_BACKWARD)
        if backwards:
            derivative = self._derivative(*backwards[0], narrow, group)
            if derivative is None:
                return None
        causal = self.mask is not None and is_causal_mask(code, self.mask, code.shape(query)[-2], code.shape(key)[-2])
        mask = None if causal else self.mask
        scale = _square(self.query.factor, code.shape(query)[-1])
        return Attention(
            query, key, value, mask, causal, scale, out, self.product, self.covers | steps, derivative
        )  # fmt: skip

    def _taken(self, narrow: DType | None) -> list[str]:
        """q, k and v, before casts to f32 where they are `narrow`."""
        given = (self.query, self.key, self.value)
        return [item.name if narrow is None or item.narrow is None else item.narrow for item in given]

    def _narrow(self) -> DType | None:
        """The type of q, k and v where torch casts all three to f32 to compute with."""
        code = self.code
        found = {code.dtype(item.narrow) if item.narrow else None for item in (self.query, self.key, self.value)}
        dtype = next(iter(found))
        return dtype if len(found) == 1 and dtype in (DType.BF16, DType.F16) else None

    def _derivative(self, at: int, step: Compute, narrow: DType | None, grouped: bool) -> Derivative | None:
        """The part of autograd, from the step that differentiates the softmax; `narrow` as above."""
        code, factor = self.code, self.query.factor
        (given, weights), slopes = operands(step), step.results[0].name
        above, flat_slopes = product_above(code, given), flattened(code, slopes)
        product = code.compute(above[0]) if above is not None else None
        if weights != self.weights or above is None or product is None or flat_slopes is None:
            return None
        flat_gradient, turned = operands(product)
        gradient = operand(code, flat_gradient)
        if gradient is None or source_of(code, turned) != (self.flat_value, True):
            return None
        slope = (flat_slopes.name, False)
        places = (
            find_product(code, slope, (self.flat_key, True)),
            find_product(code, (self.flat_query, True), slope),
            find_product(code, (self.flat_weights, True), (flat_gradient, False)),
        )
        ways = (
            Way(factor, cast=narrow),
            Way(factor, swapped=True, cast=narrow, grouped=grouped),
            Way(cast=narrow, grouped=grouped),
        )
        left = [leaving(code, place, way) for place, way in zip(places, ways, strict=True) if place is not None]
        made = [item for item in left if item is not None]
        source = gradient.name if narrow is None else gradient.narrow
        if len(made) != 3 or source is None or code.dtype(source) is not made[0][0].dtype:
            return None
        (query, for_query), (key, for_key), (value, for_value) = made
        turns = (position for position, _ in code.reading(self.flat_weights, PERMUTE))
        covers = frozenset({at, *above, *flat_slopes.steps, *turns}) | for_query | for_key | for_value
        is_read = slopes in code.outputs or set(code.readers[slopes]) - {flat_slopes.steps[0]}
        mask = replace(code.buffers[slopes], dtype=query.dtype) if is_read else None
        products = tuple(sorted(place for place in (above[0], *places) if place is not None))
        return Derivative(source, query, key, value, mask, products, covers)


@dataclass(frozen=True, slots=True)
class _Scores:
    product: Compute
    mask: str | None
    steps: tuple[int, ...]


def _scores(code: LaneCode, name: str) -> _Scores | None:
    """The product that makes the scores, and the mask that was added to them."""
    masked = code.made_by(name, ADD)
    pairs: list[tuple[str, str | None]] = [(name, None)]
    if masked is not None and not masked.kwargs and len(reads(masked)) == 2:
        one, other = reads(masked)
        pairs = [(one, other), (other, one)]
    for scores, mask in pairs:
        above = product_above(code, scores)
        product = code.compute(above[0]) if above is not None else None
        if above is not None and product is not None and code.shape(scores) == code.shape(name):
            return _Scores(product, mask, (*above, code.maker[name]) if mask is not None else above)
    return None


def _guarded(code: LaneCode, scores: str, weights: str) -> tuple[str, tuple[int, ...]]:
    """The weights after rows that see no key were set to zero, and the steps that did it; as they are where none did."""
    for position, step in code.reading(weights, WHERE):
        empty, zero = (code.made_by(arg.name) if isinstance(arg, Ref) else None for arg in step.args[:2])
        if step.args[2] != Ref(weights) or empty is None or zero is None or empty.kind != "aten.all.dim":
            continue
        never = code.made_by(reads(empty)[0], "aten.eq.Scalar")
        is_row = empty.args[1:] == (-1, True)
        is_zero = zero.kind in ("aten.full.default", "aten.scalar_tensor.default") and zero.args[-1] == 0
        if is_row and is_zero and never is not None and never.args == (Ref(scores), -math.inf):
            inner = (code.maker[reads(empty)[0]], code.maker[empty.results[0].name])
            return step.results[0].name, (*inner, position)
    return weights, ()


def _square(factor: Arg, width: int) -> float:
    """The scale whose root the factor is: torch's own for heads of this width, else the shortest number with this root."""
    assert isinstance(factor, int | float)
    usual = 1 / math.sqrt(width)
    if math.sqrt(usual) == factor:
        return usual
    near = (float(f"{factor * factor:.{digits}g}") for digits in range(1, 18))
    return next((scale for scale in near if math.sqrt(scale) == factor), float(factor * factor))
