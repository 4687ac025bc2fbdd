"""Rules of operators that contract a dim or need it whole: products, reductions, softmax, normalisation, pooling,
convolution.

A contraction over a split dim leaves a pending sum. A mean or a variance over one does not (a mean of parts is no
mean), so the dim is needed whole; `capture/rewrite.py` takes such operators apart into sums where a plan splits them.
"""

from __future__ import annotations

from sennit.capture.rules.letters import alphabet, argument, independent, named_dims, pointwise, sums, whole
from sennit.capture.rules.rule import Dims, Letters, Rule, Shapes
from sennit.ir.graph import Op
from sennit.ir.layout import Reduction

__all__ = ["reduce_rule"]


def reduce_rule(name: str, op: Op, reads: Shapes, results: Shapes) -> Rule | None:
    match name:
        case "mm":
            return _contraction("m k, k n -> m n")
        case "bmm":
            return _contraction("b m k, b k n -> b m n")
        case "mv":
            return _contraction("m k, k -> m")
        case "dot" | "vdot":
            return _contraction("k, k -> ")
        case "addmm" | "baddbmm" | "addbmm" | "addmv":
            return _with_bias(name, reads)
        case "sum" | "amax" | "amin" | "any" | "all" | "mean" | "prod" | "logsumexp" | "linalg_vector_norm" | "std":
            return _reduction(name, op, reads[0], results)
        case "var" | "var_mean":
            dims = argument(op, 1, "dim")
            return _reduced(named_dims(dims, len(reads[0])), reads[0], results)
        case "max" | "min" | "median" | "argmax" | "argmin" | "mode" if len(reads) == 1:
            dim = argument(op, 1, "dim")
            return _reduced(named_dims(dim, len(reads[0])) if dim is not None else (), reads[0], results)
        case "_softmax" | "_log_softmax" | "_softmax_backward_data" | "_log_softmax_backward_data":
            rule = pointwise(reads, results, frozen=named_dims(op.args[len(reads)], len(reads[0])))
            return Letters(rule.reads, rule.results, linear=((0,),) if name.endswith("backward_data") else ())
        case "native_layer_norm" | "native_layer_norm_backward" | "_fused_rms_norm" | "_fused_rms_norm_backward":
            return _layer_norm(name, op, reads, results)
        case "native_group_norm" | "native_group_norm_backward":
            return _group_norm(name, reads, results)
        case (
            "native_batch_norm"
            | "_native_batch_norm_legit"
            | "_native_batch_norm_legit_functional"
            | "_native_batch_norm_legit_no_training"
            | "native_batch_norm_backward"
        ):
            return _batch_norm(name, op, reads, results)
        case "convolution" | "convolution_backward":
            return _convolution(name, op, reads, results)
        case _ if name in _PLANES:
            leading = range(2, len(reads[0])) if len(reads[0]) > 3 else range(1, len(reads[0]))
            rule = independent(reads, results, tuple(leading))
            return Letters(rule.reads, rule.results, linear=((0,),) if name.endswith("_backward") else ())
        case "_scaled_dot_product_flash_attention_for_cpu":
            return _attention(op, reads)
        case _:
            return None


_PLANES = frozenset(
    """
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward avg_pool1d avg_pool3d
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
    upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward
    reflection_pad2d reflection_pad2d_backward replication_pad2d pixel_shuffle pixel_unshuffle grid_sampler_2d
    """.split()  # noqa: SIM905  (a list of literals is six times as long)
)


# ---- products --------------------------------------------------------------------------------------------------------


def _contraction(text: str) -> Letters:
    left, right = text.split("->")
    reads = tuple(tuple(part.split()) for part in left.split(","))
    return Letters(reads, (tuple(right.split()),), sums("k"), linear=((0,), (1,)))


def _with_bias(name: str, reads: Shapes) -> Letters:
    """The bias is aligned from the right, and has no letter where it is broadcast."""
    operands, result, summed = {
        "addmm": ((("m", "k"), ("k", "n")), ("m", "n"), ("k",)),
        "addmv": ((("m", "k"), ("k",)), ("m",), ("k",)),
        "baddbmm": ((("b", "m", "k"), ("b", "k", "n")), ("b", "m", "n"), ("k",)),
        "addbmm": ((("b", "m", "k"), ("b", "k", "n")), ("m", "n"), ("b", "k")),
    }[name]
    tail = result[len(result) - len(reads[0]) :]
    bias: Dims = tuple(None if size == 1 else letter for size, letter in zip(reads[0], tail, strict=True))
    return Letters((bias, *operands), (result,), sums(*summed), addends=(0,), linear=((0, 1), (0, 2)))


def _attention(op: Op, reads: Shapes) -> Letters:
    """Whole attention: heads and batch are independent; so are queries, where no mask counts them."""
    query, key = reads[0], reads[1]
    causal = bool(argument(op, 4, "is_causal", False)) or len(reads) > 3
    head = "h" if query[1] == key[1] else None
    rows = None if causal else "s"
    q: Dims = ("b", head, rows, None)
    kv: Dims = ("b", head, None, None)
    extra: tuple[Dims, ...] = tuple((None,) * len(shape) for shape in reads[3:])
    if any(len(shape) and shape[0] != 1 for shape in reads[3:]):
        return whole(reads, (query, query[:3]))  # a mask of its own for each sequence or head
    return Letters((q, kv, kv, *extra), (q, q[:3]))


# ---- reductions ------------------------------------------------------------------------------------------------------


def _reduction(name: str, op: Op, shape: tuple[int, ...], results: Shapes) -> Letters:
    position = 2 if name == "linalg_vector_norm" else 1
    given = argument(op, position, "dim")
    dims = named_dims(given, len(shape)) if given is not None and not isinstance(given, bool) else ()
    dims = dims or tuple(range(len(shape)))  # no dims means all of them
    ops = {"sum": Reduction.SUM, "amax": Reduction.MAX, "amin": Reduction.MIN}
    if name not in ops:
        return _reduced(dims, shape, results)
    letters = alphabet(len(shape))
    keeps = len(results[0]) == len(shape) and bool(shape)
    kept = tuple(None if dim in dims else letter for dim, letter in enumerate(letters) if keeps or dim not in dims)
    summed = tuple((letters[dim], ops[name]) for dim in dims)
    return Letters((letters,), (kept,), summed, linear=((0,),) if name == "sum" else (), carries=True)


def _reduced(dims: tuple[int, ...], shape: tuple[int, ...], results: Shapes) -> Letters:
    """Along the reduced dims the whole must be there."""
    dims = dims or tuple(range(len(shape)))
    letters: Dims = tuple(None if dim in dims else letter for dim, letter in enumerate(alphabet(len(shape))))

    def of(result: tuple[int, ...]) -> Dims:
        keeps = len(result) == len(shape)
        return tuple(letter for dim, letter in enumerate(letters) if keeps or dim not in dims)

    return Letters((letters,), tuple(map(of, results)))


# ---- normalisation ---------------------------------------------------------------------------------------------------


def _layer_norm(name: str, op: Op, reads: Shapes, results: Shapes) -> Letters:
    """Leading dims are independent of each other; the normalised ones are needed whole. Weight and bias gradients are
    sums over the leading dims."""
    backward = name.endswith("backward")
    normalised = op.args[2 if backward else 1]
    assert isinstance(normalised, tuple)
    leading = alphabet(len(reads[0]) - len(normalised))

    def dims(shape: tuple[int, ...]) -> Dims:
        return (*leading, *[None] * len(normalised)) if len(shape) == len(reads[0]) else (None,) * len(shape)

    summed = sums(*leading) if backward else ()
    linear = ((0,),) if backward else ()
    return Letters(tuple(map(dims, reads)), tuple(map(dims, results)), summed, linear=linear)


def _group_norm(name: str, reads: Shapes, results: Shapes) -> Letters:
    """Samples are independent of each other."""
    backward = name.endswith("backward")
    samples = reads[0][0]

    def dims(shape: tuple[int, ...]) -> Dims:
        return ("b", *[None] * (len(shape) - 1)) if len(shape) > 1 and shape[0] == samples else (None,) * len(shape)

    return Letters(
        tuple(map(dims, reads)),
        tuple(map(dims, results)),
        sums("b") if backward else (),
        linear=((0,),) if backward else (),
    )


def _batch_norm(name: str, op: Op, reads: Shapes, results: Shapes) -> Letters:
    """Channels are independent of each other.

    Statistics are of the whole batch, so the batch is split only where they are given (evaluation).
    """
    backward = name.endswith("backward")
    flags = [arg for arg in op.args if isinstance(arg, bool)]
    training = name != "_native_batch_norm_legit_no_training" and flags[0]
    batch = None if training else "b"

    def dims(shape: tuple[int, ...]) -> Dims:
        if len(shape) == len(reads[0]):
            return (batch, "c", *[None] * (len(shape) - 2))
        return ("c",) if len(shape) == 1 and shape[0] == reads[0][1] else (None,) * len(shape)

    return Letters(
        tuple(map(dims, reads)),
        tuple(map(dims, results)),
        sums("b") if backward and batch else (),
        linear=((0,),) if backward else (),
    )


# ---- convolution -----------------------------------------------------------------------------------------------------


def _convolution(name: str, op: Op, reads: Shapes, results: Shapes) -> Letters:
    """b: samples, o: output channels, c: input channels, summed.

    With one group per channel, c is independent. Output positions (x0, x1, ...) are split by a local form that reads
    the input whole and takes the window that its outputs see.
    """
    backward = name.endswith("backward")
    shift = 1 if backward else 0  # the backward form has the gradient first
    transposed, groups = bool(op.args[6 + shift]), op.args[8 + shift]
    image = reads[shift]
    outer = reads[0] if backward else results[0]
    spatial = len(image) - 2
    channel_in: str | None
    channel_out: str | None
    fan: str | None
    if transposed or groups not in (1, image[1]) or (groups != 1 and outer[1] != image[1]):
        channel_in = channel_out = fan = None
    elif groups == 1:
        channel_in, channel_out, fan = "c", "o", "c"
    else:
        channel_in = channel_out = "c"
        fan = None
    positions: tuple[str | None, ...] = tuple(f"x{dim}" for dim in range(spatial))
    if transposed or groups != 1:
        positions = (None,) * spatial
    places: Dims = (None,) * spatial
    x: Dims = ("b", channel_in, *places)
    w: Dims = (channel_out, fan, *places)
    y: Dims = ("b", channel_out, *positions)
    bias: Dims = (channel_out,)
    contracted = groups == 1 and not transposed
    moving = tuple(letter for letter in positions if letter is not None)
    forms = tuple((letter, name) for letter in moving)
    if not backward:
        has_bias = len(reads) > 2
        return Letters(
            (x, w, bias) if has_bias else (x, w),
            (y,),
            sums("c") if contracted else (),
            addends=(2,) if has_bias else (),
            linear=((0, 2), (1, 2)) if has_bias else ((0,), (1,)),
            forms=forms,
        )
    mask = op.args[10]
    assert isinstance(mask, tuple)
    kept = tuple(dims for dims, wanted in zip((x, w, bias), mask, strict=True) if wanted)
    summed = ("b", "o") if contracted else ("b",)
    return Letters((y, x, w), kept, sums(*summed, *moving), linear=((0,),), forms=forms)
