"""What decides whether an operator may share a kernel with others.

    view        moves nothing: it only says how a value is looked at
    pointwise   one element of the result is made of the elements that it names: also copies, concatenations and look-ups
    reduction   elements are brought together: sums, softmax, norms, scatters
    product     a matrix product or convolution; libraries have its kernel
    other       anything else, and what no compiler puts beside something: it stays alone

What is not known by name is pointwise if all that it reads broadcasts to its one result, else other.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op
from sennit.ir.operators import is_view

__all__ = [
    "PRODUCTS",
    "Class",
    "classify",
    "draws",
    "is_attention",
    "is_elementwise",
    "looks_up",
    "makes_of_nothing",
    "moves_nothing",
    "picks",
    "stem",
]


class Class(Enum):
    VIEW = "view"
    POINTWISE = "pointwise"
    REDUCTION = "reduction"
    PRODUCT = "product"
    OTHER = "other"


_VIEWS = ("_unsafe_view", "unsafe_split", "unbind", "squeeze")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "linear", "mv", "addmv")
_REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "all",
    "any",
    "var",
    "var_mean",
    "_softmax",
    "_log_softmax",
    "_softmax_backward_data",
    "_log_softmax_backward_data",
    "native_layer_norm",
    "native_layer_norm_backward",
    "_fused_rms_norm",
    "_fused_rms_norm_backward",
    "_native_batch_norm_legit_functional",
    "native_batch_norm",
    "native_batch_norm_backward",
    "cumsum",
    # elements go where indices say: compilers put what is pointwise before them into the same kernel, and a scatter
    # into zeros is a comparison with the index
    "embedding_dense_backward",
    "index_put",
    "scatter",
    "scatter_add",
)
_PICKS = (
    "cat",
    "stack",
    "slice_backward",
    "select_backward",
    "constant_pad_nd",
    "embedding",
    "gather",
    "index",
    "index_select",
    "roll",
    "new_zeros",
    "new_ones",
    "zeros",
    "ones",
    "full",
    "arange",
)
_OPAQUE = (
    "sort",
    "topk",
    "nonzero",
    "as_strided",
    "as_strided_scatter",
    "max_pool2d_with_indices",
    "max_pool2d_with_indices_backward",
)
_DRAWS = (
    "alpha_dropout",
    "bernoulli",
    "binomial",
    "cauchy",
    "dropout",
    "exponential",
    "feature_alpha_dropout",
    "feature_dropout",
    "fused_dropout",
    "geometric",
    "log_normal",
    "multinomial",
    "native_dropout",
    "normal",
    "normal_functional",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "random",
    "randperm",
    "rrelu",
    "rrelu_with_noise",
    "rrelu_with_noise_functional",
    "sample_dirichlet",
    "standard_gamma",
    "uniform",
)
_MAY_DRAW = ("attention", "rnn", "lstm", "gru")  # whole layers with a dropout inside


def stem(kind: str) -> str:
    """`mm` of `aten.mm.default`; empty for operators of other libraries."""
    return kind.split(".")[1] if kind.startswith("aten.") else ""


def moves_nothing(op: Op) -> bool:
    return is_view(op.kind) or stem(op.kind) in _VIEWS


def is_attention(op: Op) -> bool:
    """Whether it is a library's kernel for all of an attention."""
    return stem(op.kind).startswith("_scaled_dot_product")


def draws(op: Op) -> bool:
    """Whether it draws random numbers, or may: called twice it gives two results."""
    name = stem(op.kind).strip("_")
    return name in _DRAWS or any(part in name for part in _MAY_DRAW)


def looks_up(op: Op) -> bool:
    """Whether it takes of its first argument what the others say."""
    return stem(op.kind) in ("embedding", "gather", "index", "index_select")


def makes_of_nothing(op: Op) -> bool:
    """Whether its arguments only say what shape and type to make."""
    return stem(op.kind) in ("new_zeros", "new_ones", "full_like", "zeros_like")


def picks(op: Op) -> bool:
    """Whether it reads of its arguments only what it makes, or nothing: look-ups, and what is made from numbers."""
    return looks_up(op) or makes_of_nothing(op)


def is_elementwise(op: Op, types: Mapping[str, TensorType]) -> bool:
    """Pointwise, and no copy from one place to another or look-up."""
    return classify(op, types) is Class.POINTWISE and stem(op.kind) not in _PICKS


def classify(op: Op, types: Mapping[str, TensorType]) -> Class:
    if moves_nothing(op):
        return Class.VIEW
    name = stem(op.kind)
    if not name or name in _OPAQUE or is_attention(op):
        return Class.OTHER
    if name in PRODUCTS:
        return Class.PRODUCT
    if name in _REDUCTIONS:
        return Class.REDUCTION
    if name in _PICKS:
        return Class.POINTWISE
    if len(op.results) > 1 or draws(op):
        return Class.OTHER  # the order of random numbers is the model's
    shape = op.results[0].type.shape
    broadcast = all(_fits(types[read].shape, shape) for read in op.reads)
    return Class.POINTWISE if broadcast else Class.OTHER


def _fits(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to the result's."""
    if len(shape) > len(result):
        return False
    tail = result[len(result) - len(shape) :]
    return all(size in (1, whole) for size, whole in zip(shape, tail, strict=True))
