"""Measures the GPU at hand: operators over a grid, and whole steps of model blocks. One JSON, read without a GPU.

    python benchmarks/sim/profile_h200.py --out h200-profile.json [--budget 280] [--only SECTION ...]

**Operators.** Each row is one call of an ATen operator, by its name and its arguments:

    {"op": "aten.mm.default", "args": [tensor, tensor], "seconds": s, "low": s, "high": s, "warm": s | null, "how": "graph"}
    tensor := {"t": "bf16", "s": [shape], "d": [strides, where it is not contiguous]}

Calls are captured in a CUDA graph and replayed, so that the host does not count; `seconds` is the median over replays
of the time of one call, `low` and `high` the quartiles. The arguments rotate over copies that together exceed the L2
cache twice, so that nothing is found there; `warm` is the same with one copy, which a small operator finds in the cache
as it would right behind the one that made it. What cannot be captured is timed eagerly behind a busy device ("how":
"eager").

**Steps.** Forward and backward of the cases in blocks.py: eager and replayed from a CUDA graph, peak memory beyond what
was there before, and every operator that ran, in order, with what it allocated and what was freed before it. Each
distinct operator of the steps is then measured like those of the grid, in rows of its own ("replayed"): no model is
fitted to these.

A section that fails is noted under "failures" and the others go on; a section that exceeds its share of the budget
stops early, and says how many cases it left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

sys.path.insert(0, str(Path(__file__).parent))
from blocks import CASES, Case, make

Row = dict[str, Any]
L2 = 64 << 20
MOST = 24 << 30  # bytes of one case
NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.uint64: "u64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}


# ---- arguments as data -----------------------------------------------------------------------------------------------


def tensor(dtype: str, *shape: int, strides: Sequence[int] | None = None) -> Row:
    row: Row = {"t": dtype, "s": list(shape)}
    if strides is not None:
        row["d"] = list(strides)
    return row


def transposed(dtype: str, rows: int, columns: int) -> Row:
    """[rows, columns] as a view of [columns, rows]: a weight that a linear layer multiplies by."""
    return tensor(dtype, rows, columns, strides=(1, rows))


def describe(value: Any) -> Any:
    match value:
        case torch.Tensor():
            row = tensor(NAMES.get(value.dtype, str(value.dtype)), *value.shape)
            if not value.is_contiguous():
                row["d"] = list(value.stride())
            return row
        case torch.dtype():
            return {"dtype": NAMES.get(value, str(value))}
        case torch.device():
            return {"device": value.type}
        case torch.layout() | torch.memory_format():
            return {"other": str(value)}
        case list() | tuple():
            return [describe(part) for part in value]
        case None | bool() | int() | str():
            return value
        case float():
            return value if value == value and abs(value) != float("inf") else {"float": str(value)}
        case _:
            return {"other": str(value)}


def is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "t" in value


def size_of(row: Row) -> int:
    shape, strides = row["s"], row.get("d")
    if 0 in shape:
        return 0
    extent = prod(shape) if strides is None else 1 + sum((n - 1) * d for n, d in zip(shape, strides, strict=True))
    return int(extent) * torch.empty(0, dtype=DTYPES[row["t"]]).element_size()


def total_bytes(args: Any) -> int:
    if is_tensor(args):
        return size_of(args)
    if isinstance(args, (list, tuple)):
        return sum(total_bytes(part) for part in args)
    return 0


def high_of(op: str, args: Sequence[Any]) -> int:
    """What integers among the arguments must stay below."""
    name = op.split(".")[1]
    if name in ("embedding", "index_select", "index"):
        return int(args[0]["s"][0])
    if name == "embedding_dense_backward":
        return int(args[2])
    if name.startswith("nll_loss"):
        position = 0 if name.endswith("forward") else 1
        return int(args[position]["s"][1])
    if name == "max_pool2d_with_indices_backward":
        return int(prod(args[1]["s"][-2:]))
    return 1


def realise(value: Any, high: int) -> Any:
    """Random tensors in place of their descriptions."""
    if is_tensor(value):
        dtype = DTYPES[value["t"]]
        shape, strides = value["s"], value.get("d")
        extent = size_of(value) // torch.empty(0, dtype=dtype).element_size() if strides is not None else prod(shape)
        if dtype.is_floating_point:
            flat = torch.empty(extent, device="cuda", dtype=dtype).normal_()
        else:
            flat = torch.randint(0, max(1, high), (extent,), device="cuda").to(dtype)
        return flat.view(shape) if strides is None else flat.as_strided(shape, strides)
    if isinstance(value, dict):
        if "dtype" in value:
            return DTYPES[value["dtype"]]
        if "float" in value:
            return float(value["float"])
        if "device" in value:
            return torch.device("cuda")
        if value.get("other", "").startswith("torch."):
            return getattr(torch, value["other"].removeprefix("torch."))
        raise ValueError(f"an argument {value} cannot be made again")
    if isinstance(value, (list, tuple)):
        return [realise(part, high) for part in value]
    return value


def overload(op: str) -> Callable[..., Any]:
    space, name, kind = op.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, space), name), kind)
    return found


# ---- timing ----------------------------------------------------------------------------------------------------------


def events(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each of `times` calls on the device. A sleep before lets the host run ahead."""
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000)  # about 1 ms
    for start, stop in pairs:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) * 1e-3 for start, stop in pairs]


def graph_of(calls: Sequence[Callable[[], object]], repeats: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(repeats):
            calls[number % len(calls)]()
    return graph


def per_call(calls: Sequence[Callable[[], object]], repeats: int, times: int) -> list[float]:
    graph = graph_of(calls, repeats)
    graph.replay()
    seconds = [value / repeats for value in events(graph.replay, times)]
    del graph
    return seconds


def measure(op: str, args: Sequence[Any], kwargs: Row | None = None, *, tf32: bool = False) -> Row:
    """One row. `args` are descriptions."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    size = total_bytes(args)
    if size > MOST:
        raise MemoryError(f"{size / 1e9:.1f} GB of arguments")
    high = high_of(op, args)
    function = overload(op)
    options = {key: realise(value, high) for key, value in (kwargs or {}).items()}
    copies = max(1, min(16, -(-2 * L2 // max(1, size)))) if size < 2 * L2 else 1
    sets = [realise(list(args), high) for _ in range(copies)]
    calls = [lambda a=a: function(*a, **options) for a in sets]
    return {
        "op": op,
        "args": list(args),
        **({"kwargs": kwargs} if kwargs else {}),
        **({"tf32": True} if tf32 else {}),
        **timed(calls, size),
    }


def timed(calls: Sequence[Callable[[], object]], size: int) -> Row:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    once = min(events(calls[0], 2))
    repeats = max(1, min(24, int(2e-3 / max(once, 1e-6))))
    repeats = max(repeats, min(len(calls), 24)) if once < 1e-3 else repeats
    times = 9 if once < 3e-3 else 5
    try:
        seconds, how = per_call(calls, repeats, times), "graph"
        warm = per_call(calls[:1], repeats, 5) if len(calls) > 1 and size < L2 else None
    except Exception:
        torch.cuda.synchronize()
        seconds, how, warm = events(calls[0], times), "eager", None
    low, _, high = quantiles(seconds, n=4)
    row: Row = {"seconds": median(seconds), "low": low, "high": high, "how": how}
    if warm is not None:
        row["warm"] = median(warm)
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


# ---- sections of the grid: each yields calls to be measured ----------------------------------------------------------

Spec = tuple[str, list[Any], dict[str, Any]]  # operator, arguments, options of `measure`


def products() -> Iterator[Spec]:
    """First what models use, then the grid: those at the end are dropped first if time is short."""
    widths = (768, 1024, 2048, 4096, 8192)
    for tokens, width in product((512, 2048, 8192, 16384), widths):
        for n, k in ((width, width), (3 * width, width), (4 * width, width), (width, 4 * width)):
            yield "aten.addmm.default", [tensor("bf16", n), tensor("bf16", tokens, k), transposed("bf16", k, n)], {}
            if tokens > 512 and tokens * n * k < 2**42:
                yield "aten.mm.default", [tensor("bf16", tokens, n), tensor("bf16", n, k)], {}
                yield "aten.mm.default", [transposed("bf16", n, tokens), tensor("bf16", tokens, k)], {}
    for side in (64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288):
        yield "aten.mm.default", [tensor("bf16", side, side), transposed("bf16", side, side)], {}
    for m, n, k in product((16, 64, 256, 1024, 4096, 16384), (64, 256, 1024, 4096, 16384), (64, 256, 1024, 4096)):
        if m * n * k < 2**40:
            yield "aten.mm.default", [tensor("bf16", m, k), transposed("bf16", k, n)], {}
    for m, n, k in (
        (1000, 1000, 1000),
        (4224, 4096, 4096),
        (8192, 50304, 768),
        (4096, 50304, 2048),
        (8192, 1000, 2048),
    ):
        yield "aten.mm.default", [tensor("bf16", m, k), transposed("bf16", k, n)], {}
        yield "aten.mm.default", [tensor("bf16", m, n), tensor("bf16", n, k)], {}
        yield "aten.mm.default", [transposed("bf16", n, m), tensor("bf16", m, k)], {}
    for rows, (n, k) in product(
        (32768, 65536, 200704),
        ((96, 96), (288, 96), (384, 96), (96, 384), (128, 128), (512, 128), (64, 256), (1024, 256)),
    ):
        yield "aten.addmm.default", [tensor("bf16", n), tensor("bf16", rows, k), transposed("bf16", k, n)], {}
        yield "aten.mm.default", [tensor("bf16", rows, n), tensor("bf16", n, k)], {}
        yield "aten.mm.default", [transposed("bf16", n, rows), tensor("bf16", rows, k)], {}
    for batch, m, n, k in (
        *product((16, 128), (128, 512, 2048), (128, 512), (64, 128)),
        *product((1024, 4096, 12288), (49, 64), (49, 64), (32,)),
        *product((1024, 4096, 12288), (49,), (32,), (49,)),
        *product((32, 128), (256,), (256,), (32, 64, 256)),
        *product((512, 1024, 2048), (128, 256), (128, 256), (32,)),
        *product((512, 1024, 2048), (128, 256), (32,), (128, 256)),
    ):
        yield "aten.bmm.default", [tensor("bf16", batch, m, k), tensor("bf16", batch, k, n)], {}
        right = tensor("bf16", batch, k, n, strides=(n * k, 1, k))
        yield "aten.bmm.default", [tensor("bf16", batch, m, k), right], {}
        left = tensor("bf16", batch, m, k, strides=(m * k, 1, m))
        yield "aten.bmm.default", [left, tensor("bf16", batch, k, n)], {}
    for dtype, tf32 in (("f32", False), ("f32", True), ("f16", False)):
        for side in (128, 256, 512, 1024, 2048, 4096):
            yield "aten.mm.default", [tensor(dtype, side, side), transposed(dtype, side, side)], {"tf32": tf32}
        for tokens, width in product((512, 2048, 8192), (768, 1024, 2048)):
            for n, k in ((width, width), (4 * width, width), (width, 4 * width)):
                yield (
                    "aten.addmm.default",
                    [tensor(dtype, n), tensor(dtype, tokens, k), transposed(dtype, k, n)],
                    {"tf32": tf32},
                )
                yield "aten.mm.default", [transposed(dtype, n, tokens), tensor(dtype, tokens, k)], {"tf32": tf32}
        for m, n, k in product((64, 1024, 8192), (64, 512, 4096), (64, 512, 4096)):
            if m * n * k < 2**36:
                yield "aten.mm.default", [tensor(dtype, m, k), tensor(dtype, k, n)], {"tf32": tf32}
    for side in (128, 256, 512, 1024, 2048):
        yield "aten.mm.default", [tensor("f64", side, side), tensor("f64", side, side)], {}


def convolutions() -> Iterator[Spec]:
    layers = [
        (3, 64, 7, 2, 224), (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 64, 1, 1, 56),
        (256, 128, 1, 1, 56), (128, 128, 3, 2, 56), (128, 512, 1, 1, 28), (256, 512, 1, 2, 56), (512, 128, 1, 1, 28),
        (128, 128, 3, 1, 28), (512, 256, 1, 1, 28), (256, 256, 3, 2, 28), (256, 1024, 1, 1, 14), (1024, 256, 1, 1, 14),
        (256, 256, 3, 1, 14), (1024, 512, 1, 1, 14), (512, 512, 3, 2, 14), (512, 2048, 1, 1, 7), (2048, 512, 1, 1, 7),
        (512, 512, 3, 1, 7), (32, 32, 3, 1, 112), (96, 192, 3, 1, 40), (320, 320, 3, 1, 64),
    ]  # fmt: skip
    for dtype, batch, last in (
        ("bf16", 64, True),
        ("bf16", 16, True),
        ("bf16", 64, False),
        ("f32", 32, False),
        ("f32", 32, True),
    ):
        for before, after, kernel, stride, side in layers:
            out = (side + 2 * (kernel // 2) - kernel) // stride + 1
            x = image(dtype, batch, before, side, last)
            weight = image(dtype, after, before, kernel, last)
            both, pad, one = [stride, stride], [kernel // 2] * 2, [1, 1]
            yield "aten.convolution.default", [x, weight, None, both, pad, one, False, [0, 0], 1], {}
            grad = image(dtype, batch, after, out, last)
            for mask in ([True, False, False], [False, True, False]):
                rest = [None, both, pad, one, False, [0, 0], 1, mask]
                yield "aten.convolution_backward.default", [grad, x, weight, *rest], {}


def image(dtype: str, batch: int, channels: int, side: int, last: bool) -> Row:
    if not last:
        return tensor(dtype, batch, channels, side, side)
    return tensor(dtype, batch, channels, side, side, strides=(channels * side * side, 1, side * channels, channels))


SHAPES = ((64, 256), (512, 768), (2048, 1024), (8192, 768), (8192, 2048), (8192, 4096), (16384, 4096), (65536, 1024),
          (200704, 96), (200704, 128), (65536, 128), (32768, 256), (4096, 8192), (1024, 16384))  # fmt: skip


def normalisations() -> Iterator[Spec]:
    for dtype, (rows, columns) in product(("bf16", "f32"), SHAPES):
        x, w = tensor(dtype, rows, columns), tensor(dtype, columns)
        m = tensor("f32", rows, 1)
        yield "aten.native_layer_norm.default", [x, [columns], w, w, 1e-5], {}
        yield "aten.native_layer_norm_backward.default", [x, x, [columns], m, m, w, w, [True, True, True]], {}
        yield "aten._fused_rms_norm.default", [x, [columns], w, 1e-5], {}
        yield "aten._fused_rms_norm_backward.default", [x, x, [columns], m, w, [True, True]], {}
    for dtype, last in product(("bf16", "f32"), (True, False)):
        for batch, channels, side in ((64, 64, 112), (64, 64, 56), (64, 256, 56), (64, 128, 28), (64, 512, 28),
                                      (64, 256, 14), (64, 1024, 14), (64, 512, 7), (64, 2048, 7), (16, 256, 56), (16, 64, 14)):  # fmt: skip
            x, w, s = image(dtype, batch, channels, side, last), tensor(dtype, channels), tensor("f32", channels)
            yield "aten.native_batch_norm.default", [x, w, w, w, w, True, 0.1, 1e-5], {}
            rest = [w, w, w, s, s, True, 1e-5, [True, True, True]]
            yield "aten.native_batch_norm_backward.default", [x, x, *rest], {}


def softmaxes() -> Iterator[Spec]:
    more = (
        (196608, 49),
        (600000, 49),
        (262144, 256),
        (1048576, 128),
        (131072, 512),
        (32768, 2048),
        (8192, 50304),
        (4096, 32000),
    )
    for dtype, (rows, columns) in product(("bf16", "f32"), (*SHAPES, *more)):
        x = tensor(dtype, rows, columns)
        yield "aten._softmax.default", [x, 1, False], {}
        yield "aten._softmax_backward_data.default", [x, x, 1, {"dtype": dtype}], {}
        if dtype == "f32":
            yield "aten._log_softmax.default", [x, 1, False], {}
            yield "aten._log_softmax_backward_data.default", [x, x, 1, {"dtype": dtype}], {}
            index, total = tensor("i64", rows), tensor("f32")
            yield "aten.nll_loss_forward.default", [x, index, None, 1, -100], {}
            yield "aten.nll_loss_backward.default", [total, x, index, None, 1, -100, total], {}


SIZES = (10**3, 10**4, 10**5, 10**6, 4 * 10**6, 10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9)


def pointwise() -> Iterator[Spec]:
    one = ("gelu", "silu", "sigmoid", "relu", "clone", "neg", "exp", "rsqrt", "tanh")
    for dtype, size in product(("bf16", "f32"), SIZES):
        if size * (2 if dtype == "bf16" else 4) > 2e9:
            continue
        x = tensor(dtype, size)
        for name in one:
            yield f"aten.{name}.default", [x], {}
        yield "aten.add.Tensor", [x, x], {}
        yield "aten.mul.Tensor", [x, x], {}
        yield "aten.mul.Tensor", [x, 0.5], {}
        yield "aten.gelu_backward.default", [x, x], {}
        yield "aten.silu_backward.default", [x, x], {}
        yield "aten.sigmoid_backward.default", [x, x], {}
        yield "aten.threshold_backward.default", [x, x, 0.0], {}
        other = "f32" if dtype == "bf16" else "bf16"
        yield "aten._to_copy.default", [x], {"kwargs": {"dtype": {"dtype": other}}}
        yield "aten.fill.Scalar", [x, 0.0], {}
    for dtype, size in product(("bf16", "f32"), (10**6, 10**7, 10**8)):
        columns = 1024
        x, row = tensor(dtype, size // columns, columns), tensor(dtype, columns)
        yield "aten.add.Tensor", [x, row], {}
        yield "aten.mul.Tensor", [x, row], {}
        yield "aten.mul.Tensor", [x, tensor(dtype, size // columns, 1)], {}
        yield "aten.pow.Tensor_Scalar", [x, 2], {}
        yield "aten.where.self", [tensor("bool", size // columns, columns), x, x], {}
        yield "aten.cat.default", [[x, x], 1], {}
        yield "aten.cat.default", [[x, x], 0], {}


CONTIGUOUS = {"kwargs": {"memory_format": {"other": "torch.contiguous_format"}}}


def transposes() -> Iterator[Spec]:
    for dtype, (rows, columns) in product(
        ("bf16", "f32"), ((256, 256), (1024, 1024), (4096, 4096), (16384, 4096), (65536, 128))
    ):
        yield "aten.clone.default", [transposed(dtype, rows, columns)], CONTIGUOUS
    # heads in front of tokens, and back; windows of an image; channels in front of positions
    for b, h, t, d in (
        (8, 12, 1024, 64),
        (4, 16, 2048, 128),
        (1, 32, 4096, 128),
        (4096, 3, 49, 32),
        (1024, 12, 49, 32),
    ):
        x = tensor("bf16", b, h, t, d, strides=(h * t * d, d, h * d, 1))
        yield "aten.clone.default", [x], CONTIGUOUS
        yield "aten.add.Tensor", [x, tensor("bf16", b, h, t, d)], {}
        yield "aten.mul.Tensor", [x, 0.5], {}
    for a, b, c in ((256, 256, 128), (128, 256, 256), (512, 256, 256)):
        swapped = tensor("bf16", b, a, c, strides=(c, b * c, 1))
        yield "aten.clone.default", [swapped], CONTIGUOUS
        yield "aten.add.Tensor", [swapped, tensor("bf16", b, a, c)], {}
        first = tensor("bf16", c, a, b, strides=(1, b * c, c))
        yield "aten.clone.default", [first], CONTIGUOUS
    for b, side, c in ((64, 56, 96), (32, 56, 128), (32, 28, 256)):
        yield "aten.roll.default", [tensor("bf16", b, side, side, c), [3, 3], [1, 2]], {}


def reductions() -> Iterator[Spec]:
    for dtype, (rows, columns) in product(("bf16", "f32"), SHAPES):
        x = tensor(dtype, rows, columns)
        yield "aten.sum.default", [x], {}
        yield "aten.sum.dim_IntList", [x, [0], True], {}
        yield "aten.sum.dim_IntList", [x, [1], True], {}
        yield "aten.mean.dim", [x, [1], True], {}
        yield "aten.mean.default", [x], {}
    for channels, side in ((256, 56), (2048, 7)):
        yield "aten.mean.dim", [tensor("bf16", 64, channels, side, side), [2, 3]], {}
        yield "aten.mean.dim", [image("bf16", 64, channels, side, True), [2, 3]], {}
    for size in (10**5, 10**7, 10**9):
        yield "aten.sum.default", [tensor("bf16", size)], {}
    for b, c, side in ((64, 64, 112), (32, 64, 112)):
        for last in (True, False):
            x = image("bf16", b, c, side, last)
            yield "aten.max_pool2d_with_indices.default", [x, [3, 3], [2, 2], [1, 1]], {}
            half = side // 2
            index = image("i64", b, c, half, last)
            rest = [[3, 3], [2, 2], [1, 1], [1, 1], False, index]
            yield "aten.max_pool2d_with_indices_backward.default", [image("bf16", b, c, half, last), x, *rest], {}


def embeddings() -> Iterator[Spec]:
    for dtype, (rows, width), tokens in product(
        ("bf16", "f32"), ((1024, 256), (50304, 768), (50304, 2048), (128256, 4096)), (256, 2048, 8192, 16384)
    ):
        yield "aten.embedding.default", [tensor(dtype, rows, width), tensor("i64", tokens)], {}
        grad = tensor(dtype, tokens, width)
        yield "aten.embedding_dense_backward.default", [grad, tensor("i64", tokens), rows, -1, False], {}


GRID: dict[str, tuple[Callable[[], Iterator[Spec]], float]] = {
    # with the part of the budget that each may take
    "products": (products, 0.25),
    "pointwise": (pointwise, 0.08),
    "normalisations": (normalisations, 0.06),
    "softmaxes": (softmaxes, 0.06),
    "convolutions": (convolutions, 0.12),
    "transposes": (transposes, 0.03),
    "reductions": (reductions, 0.05),
    "embeddings": (embeddings, 0.03),
}


# ---- attention and the optimizer, which need more than arguments -----------------------------------------------------


def attention(deadline: float) -> tuple[list[Row], int]:
    kinds = {
        "_scaled_dot_product_flash_attention": ("bf16",),
        "_scaled_dot_product_cudnn_attention": ("bf16",),
        "_scaled_dot_product_efficient_attention": ("f32", "bf16"),
    }
    shapes = [
        (b, h, t, d, causal)
        for causal in (True, False)
        for d in (64, 128)
        for b, h, t in (
            (1, 4, 128),
            (8, 12, 512),
            (8, 12, 1024),
            (4, 16, 2048),
            (1, 32, 4096),
            (2, 32, 2048),
            (1, 16, 8192),
        )
    ]
    rows: list[Row] = []
    left_out = 0
    for op, dtypes in kinds.items():
        for dtype, (b, h, t, d, causal) in product(dtypes, shapes):
            if time.monotonic() > deadline:
                left_out += 1
                continue
            if dtype == "f32" and t > 2048:
                continue
            rows += attention_case(op, dtype, (b, h, t, d), causal)
    return rows, left_out


def attention_case(op: str, dtype: str, shape: tuple[int, int, int, int], causal: bool) -> list[Row]:
    """Forward, and backward from what the forward gave. Arguments go by name: their order differs between versions."""
    b, h, t, d = shape
    # as a linear layer gives them: tokens before heads in memory
    x = tensor(dtype, b, h, t, d, strides=(h * t * d, d, h * d, 1))
    q, k, v, grad = (realise(x, 1) for _ in range(4))
    values: dict[str, Any] = {
        "query": q,
        "key": k,
        "value": v,
        "dropout_p": 0.0,
        "is_causal": causal,
        "attn_bias": None,
    }
    values |= {
        "compute_log_sumexp": True,
        "return_debug_mask": False,
        "scale": None,
        "grad_input_mask": [True] * 3 + [False],
    }
    rows: list[Row] = []
    try:
        forward = by_name(f"aten.{op}.default", values)
        row = timed([forward], 4 * size_of(x))
        rows.append({"op": f"aten.{op}.default", "args": [x, x, x], "causal": causal, **row})
        names = [item.name for item in overload(f"aten.{op}.default")._schema.returns]  # type: ignore[attr-defined]
        made = dict(zip(names, forward(), strict=True))
        values |= made | {"out": made.get("output"), "grad_out": grad, "grad_out_": grad}
        values |= {"logsumexp": made.get("logsumexp", made.get("log_sumexp"))}
        if "rng_state" in made:  # the flash kernel's name for the seed
            values |= {"philox_seed": made["rng_state"], "philox_offset": made.get("unused", made.get("philox_offset"))}
        backward = by_name(f"aten.{op}_backward.default", values)
        row = timed([backward], 8 * size_of(x))
        rows.append({"op": f"aten.{op}_backward.default", "args": [x, x, x, x], "causal": causal, **row})
    except Exception as error:
        torch.cuda.synchronize()
        rows.append({"op": f"aten.{op}.default", "args": [x, x, x], "causal": causal, "error": str(error)[:160]})
    return rows


def by_name(op: str, values: dict[str, Any]) -> Callable[[], Any]:
    function = overload(op)
    arguments = function._schema.arguments  # type: ignore[attr-defined]
    args = [values[item.name] for item in arguments if not item.kwarg_only]
    options = {item.name: values[item.name] for item in arguments if item.kwarg_only and item.name in values}
    return lambda: function(*args, **options)


def optimizers(deadline: float) -> tuple[list[Row], int]:
    """A step of AdamW: fused, over all parameters of a list; seconds of the whole step."""
    rows: list[Row] = []
    for fused, dtype, (count, size) in product(
        (True, False),
        (torch.float32, torch.bfloat16),
        ((10, 10**4), (100, 10**4), (50, 10**6), (20, 10**7), (4, 10**8)),
    ):
        if time.monotonic() > deadline:
            continue
        try:
            rows.append(optimizer_case(fused, dtype, count, size))
        except Exception as error:
            rows.append({"op": "adamw", "fused": fused, "t": NAMES[dtype], "error": str(error)[:160]})
    return rows, 0


def optimizer_case(fused: bool, dtype: torch.dtype, count: int, size: int) -> Row:
    parameters = [torch.randn(size, device="cuda", dtype=dtype).requires_grad_() for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    step = torch.optim.AdamW(parameters, lr=1e-4, fused=fused, foreach=not fused, capturable=True)
    step.step()
    row = timed([step.step], count * size * 16)
    return {"op": "adamw", "fused": fused, "t": NAMES[dtype], "count": count, "size": size, **row}


# ---- whole steps -----------------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Every operator with its arguments, the storages it makes, and those that were gone before it ran.

    `ops` holds rows of [operator, arguments, options, made, freed], where made is a list of [storage, bytes].
    """

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[list[Any]] = []
        self.known: dict[int, int] = {}  # by address of the storage's implementation, its number
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.count = 0

    def note(self, value: torch.Tensor) -> list[int] | None:
        if value.device.type != "cuda":
            return None
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return None
        number = self.known[key] = self.count
        self.count += 1
        self.alive[number] = (StorageWeakRef(storage), key)
        return [number, storage.nbytes()]

    def gone(self) -> list[int]:
        dead = [number for number, (reference, _) in self.alive.items() if reference.expired()]
        for number in dead:
            _, key = self.alive.pop(number)
            self.known.pop(key, None)
        return dead

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        freed = self.gone()
        result = func(*args, **(kwargs or {}))
        made = [
            row for value in tree_flatten(result)[0] if isinstance(value, torch.Tensor) and (row := self.note(value))
        ]
        self.ops.append([str(func), describe(args), describe_options(kwargs or {}), made, freed])
        return result


def describe_options(kwargs: dict[str, Any]) -> Row:
    dropped = ("layout", "pin_memory")
    return {key: describe(value) for key, value in kwargs.items() if key not in dropped and value is not None}


def step_case(case: Case) -> Row:
    gc.collect()
    torch.cuda.empty_cache()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    module, arguments = make(case, "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()

    def step() -> None:
        module.zero_grad(set_to_none=True)
        module(*arguments).backward()

    for _ in range(3):
        step()
    module.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    workspace = torch.cuda.memory_allocated() - before  # what libraries keep from the first step on
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    row: Row = {
        "name": case.name,
        "family": case.family,
        "before": before,
        "workspace": workspace,
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    start = time.perf_counter()
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    row["eager"] = (time.perf_counter() - start) / 5
    row["eager_events"] = sorted(events(step, 7))
    module.zero_grad(set_to_none=True)
    with Recorder() as recorder:
        for value in (*module.parameters(), *module.buffers(), *arguments):
            recorder.note(value)
        row["inputs"] = recorder.count
        step()
    row["ops"] = recorder.ops
    try:
        row["graphed"] = graphed_step(step)
    except Exception as error:
        row["graphed_error"] = str(error)[:200]
    return row


def graphed_step(step: Callable[[], None]) -> list[float]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    return sorted(events(graph.replay, 9))


def library_steps(deadline: float) -> list[Row]:
    """The same of models from other libraries, where they can be imported."""
    rows: list[Row] = []
    makers: dict[str, Callable[[], tuple[torch.nn.Module, tuple[Any, ...]]]] = {}
    try:
        import timm

        for name in ("swin_tiny_patch4_window7_224", "resnet50"):
            makers[f"timm {name}"] = lambda name=name: (timm.create_model(name), (torch.randn(32, 3, 224, 224),))
    except Exception:
        pass
    for name, maker in makers.items():
        if time.monotonic() > deadline:
            break
        try:
            module, arguments = maker()
            module = module.to("cuda", torch.bfloat16)
            moved = tree_map(lambda x: x.to("cuda", torch.bfloat16), arguments)

            def step(module: torch.nn.Module = module, moved: Any = moved) -> None:
                module.zero_grad(set_to_none=True)
                module(*moved).float().square().mean().backward()

            for _ in range(3):
                step()
            with Recorder() as recorder:
                step()
            row = {"name": name, "eager_events": sorted(events(step, 7)), "ops": recorder.ops}
            row["graphed"] = graphed_step(step)
            rows.append(row)
        except Exception as error:
            rows.append({"name": name, "error": str(error)[:200]})
    return rows


def replayed(steps: list[Row], known: list[Row], deadline: float) -> tuple[list[Row], int, list[str]]:
    """Each distinct operator of the steps, measured alone; not those that the grid has, nor views."""
    done = {json.dumps([row["op"], row["args"], row.get("kwargs")]) for row in known if "args" in row}
    rows: list[Row] = []
    skipped: dict[str, None] = {}
    left_out = 0
    for op, args, kwargs, made, _ in (item for step in steps for item in step.get("ops", ())):
        key = json.dumps([op, args, kwargs or None])
        if key in done or not op.startswith("aten.") or (not made and not op.split(".")[1].endswith("_")):
            continue
        done.add(key)
        if "attention" in op:
            continue
        if time.monotonic() > deadline:
            left_out += 1
            continue
        try:
            rows.append(measure(op, args, kwargs or None))
        except Exception as error:
            torch.cuda.synchronize()
            skipped[f"{op}: {str(error).splitlines()[0][:100]}"] = None
    return rows, left_out, list(skipped)


# ---- the whole -------------------------------------------------------------------------------------------------------


def grid_section(specs: Iterator[Spec], deadline: float) -> tuple[list[Row], int, list[str]]:
    rows: list[Row] = []
    failures: list[str] = []
    left_out = 0
    seen: set[str] = set()
    for op, args, options in specs:
        key = json.dumps([op, args, options])
        if key in seen:
            continue
        seen.add(key)
        if time.monotonic() > deadline:
            left_out += 1
            continue
        try:
            rows.append(measure(op, args, options.get("kwargs"), tf32=options.get("tf32", False)))
        except Exception as error:
            torch.cuda.synchronize()
            failures.append(f"{op} {args}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"[:200])
    return rows, left_out, failures


def about() -> Row:
    tiny = torch.zeros(16, device="cuda")
    call = lambda: tiny.add_(1.0)  # noqa: E731
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(2000):
        call()
    torch.cuda.synchronize()
    eager = (time.perf_counter() - start) / 2000
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "memory": properties.total_memory,
        "units": properties.multi_processor_count,
        "host_seconds": eager,
        "graph_seconds": median(per_call([call], 200, 5)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, default=280.0, help="seconds of the whole")
    parser.add_argument("--only", nargs="*", help="sections, out of the grid's and attention, optimizers, steps")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("profile_h200.py measures a GPU, and torch sees none here")
    begin = time.monotonic()
    torch.manual_seed(0)
    result: Row = {"about": about(), "rows": [], "steps": [], "replayed": [], "failures": [], "left_out": {}}

    def wanted(name: str) -> bool:
        return not options.only or name in options.only

    def save() -> None:
        result["seconds"] = round(time.monotonic() - begin, 1)
        options.out.write_text(json.dumps(result, separators=(",", ":")), encoding="utf-8")

    def section(name: str, work: Callable[[], object]) -> None:
        if not wanted(name):
            return
        start = time.monotonic()
        try:
            work()
        except Exception:
            result["failures"].append(f"{name}: {traceback.format_exc()[-600:]}")
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        save()
        print(f"{name}: {time.monotonic() - start:.1f} s, {len(result['rows'])} rows", flush=True)

    def add(name: str, rows: list[Row], left_out: int, failures: Sequence[str] = ()) -> None:
        result["rows"] += rows
        result["failures"] += list(failures)
        if left_out:
            result["left_out"][name] = left_out

    def take(share: float) -> float:
        return min(begin + options.budget, time.monotonic() + share * options.budget)

    def steps() -> None:
        for case in CASES:
            try:
                result["steps"].append(step_case(case))
            except Exception as error:
                torch.cuda.synchronize()
                result["failures"].append(f"step {case.name}: {str(error)[:300]}")
        result["steps"] += library_steps(take(0.05))

    section("steps", steps)
    section("attention", lambda: add("attention", *attention(take(0.12))))
    for name, (specs, share) in GRID.items():
        section(name, lambda name=name, specs=specs, share=share: add(name, *grid_section(specs(), take(share))))
    section("optimizers", lambda: add("optimizers", *optimizers(take(0.05))))
    if wanted("replayed"):
        rows, left_out, skipped = replayed(result["steps"], result["rows"], begin + options.budget + 60)
        result["replayed"], result["left_out"]["replayed"] = rows, left_out
        result["failures"] += [f"replayed {text}" for text in skipped]
    pack(result)
    save()
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB in {time.monotonic() - begin:.0f} s")
    print("\n".join(result["failures"]))


def pack(result: Row) -> None:
    """Operators of steps by number into one table of distinct calls: layers repeat."""
    table: dict[str, int] = {}
    for step in result["steps"]:
        packed = []
        for op, args, kwargs, made, freed in step.get("ops", ()):
            key = json.dumps([op, args, kwargs], separators=(",", ":"))
            packed.append([table.setdefault(key, len(table)), made, freed])
        step["ops"] = packed
    result["calls"] = [json.loads(key) for key in table]


if __name__ == "__main__":
    main()
