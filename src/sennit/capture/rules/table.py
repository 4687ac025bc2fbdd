"""The hand-written rules: an operator to its rule, family by family.

| family | file | operators |
|---|---|---|
| pointwise | here | arithmetic, comparisons, activations and their derivatives, casts, copies, fills |
| products, reductions, normalisation, softmax, pooling, convolution | `table_reduce.py` | what contracts or needs a dim whole |
| shapes | `table_shape.py` | views, permutations, slices, concatenations, paddings, and their derivatives |
| indexing | `table_index.py` | embeddings, gathers, scatters, sorts, positions, random numbers |

`own_rule(op, types)` is the table. None: it has no rule for the operator, and other sources are asked (`lookup.py`). A
rule with no letters is an answer too: the operator needs everything whole.
"""

from __future__ import annotations

from sennit.capture.rules.letters import pointwise
from sennit.capture.rules.rule import Letters, Rule, Shapes, Types
from sennit.capture.rules.table_index import index_rule
from sennit.capture.rules.table_reduce import reduce_rule
from sennit.capture.rules.table_shape import shape_rule
from sennit.ir.dtype import DType
from sennit.ir.graph import Op

__all__ = ["aten_name", "own_rule"]


def aten_name(kind: str) -> str:
    """`mm` of `aten.mm.default`; other kinds keep their name."""
    return kind.split(".")[1] if kind.startswith("aten.") else kind


def own_rule(op: Op, types: Types) -> Rule | None:
    """The rule of the table, or None where it has none."""
    reads = [types[name].shape for name in op.reads]
    results = [value.type.shape for value in op.results]
    name = aten_name(op.kind)
    for family in (reduce_rule, shape_rule, index_rule):
        rule = family(name, op, reads, results)
        if rule is not None:
            return rule
    if name in _POINTWISE and results:
        return _pointwise_rule(name, op, types, reads, results)
    return None


_POINTWISE = frozenset(
    """
    add sub rsub mul div neg exp exp2 expm1 log log2 log1p log10 tanh erf erfc sqrt rsqrt pow reciprocal sigmoid relu relu6 gelu
    silu elu leaky_relu hardswish hardsigmoid hardtanh softplus mish celu log_sigmoid logit
    gelu_backward tanh_backward threshold_backward sigmoid_backward silu_backward elu_backward leaky_relu_backward
    hardswish_backward hardsigmoid_backward hardtanh_backward softplus_backward mish_backward
    where eq ne lt le gt ge logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    maximum minimum fmax fmin clamp clamp_min clamp_max masked_fill clone copy fill zeros_like ones_like full_like empty_like
    _to_copy lift_fresh_copy sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh abs sgn sign floor ceil round trunc
    frac fmod remainder floor_divide square addcmul addcdiv lerp isnan isinf isfinite nan_to_num hypot xlogy
    smooth_l1_loss_backward mse_loss_backward huber_loss_backward native_dropout_backward
    """.split()  # noqa: SIM905  (a list of literals is six times as long)
)


def _pointwise_rule(name: str, op: Op, types: Types, reads: Shapes, results: Shapes) -> Letters | None:
    if name in ("smooth_l1_loss_backward", "mse_loss_backward", "huber_loss_backward") and op.args[3] == 1:
        return None  # the mean divides by the number of elements, which a piece does not know
    rule = pointwise(reads, results)
    linear, carries = _linear(name, op, types, reads)
    structural = name in ("clone", "lift_fresh_copy")
    return Letters(rule.reads, rule.results, linear=linear, structural=structural, carries=carries)


def _linear(name: str, op: Op, types: Types, reads: Shapes) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """The sets of reads in which a pointwise operator is linear, and whether it should carry pending sums in space."""
    overload = op.kind.rsplit(".", 1)[-1]
    if name == "_to_copy" and not _cast_is_linear(types[op.reads[0]].dtype, op.results[0].type.dtype):
        return (), False
    if overload in ("Tensor_mode", "Scalar_mode"):
        return (), False  # a division that rounds
    match name, len(reads):
        case ("neg" | "clone" | "zeros_like" | "_to_copy" | "mul" | "div" | "lift_fresh_copy", 1):
            return ((0,),), True
        case ("add" | "sub", 2):
            return ((0, 1),), True
        case ("mul", 2):
            return ((0,), (1,)), () in reads
        case ("div", 2):
            return ((0,),), reads[1] == ()
        case ("where", 3):
            return ((1, 2),), False
        case ("masked_fill", _) if op.args[-1] == 0:
            return ((0,),), False
        case ("copy", 2):
            return ((1,),), True
        case (_, _) if name.endswith("_backward"):
            return ((0,),), False
        case _:
            return (), False


def _cast_is_linear(source: DType, target: DType) -> bool:
    """Whether casting parts and adding them is casting their sum: not where a cast drops fractions or counts truths."""
    return source is not DType.BOOL and target is not DType.BOOL and (target.is_float or not source.is_float)
