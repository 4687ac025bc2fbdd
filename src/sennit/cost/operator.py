"""What one operator costs on one device by the roofline, where no profile (`cost/profile.py`) has its family:

    seconds = max(flops / (peak * efficiency), bytes / bandwidth, elements / special) + launch

**flops** are counted for products and convolutions, from the local shapes; other operators are taken to be bound by
memory. **bytes** are those of the distinct buffers read and those written. Operators that pick from a buffer (a slice,
a look-up in an embedding) read of it no more than they write. Views cost nothing; sennit's own local operators move
their bytes.

`bandwidth` is that of the cache where the device has one and all the bytes fit: a CPU rank's activations often do.
**elements / special** counts for operators that evaluate special functions or normalise (gelu, softmax, layer norm,
their derivatives), where the device says how many elements of these it does in a second.

**efficiency** of a product of m x k by k x n (and b of them) is that of a large one, less what its shape loses:

- *tiles*: a kernel computes tiles of t x t. A dim that fills its last tile in part wastes the rest. A library has
  smaller
  tiles too, so the waste is counted in quarters of a tile: d / (ceil(d / q) * q) for m and n, q = t / 4.
- *waves*: the tiles run on the device's u units in waves. With b * ceil(m/t) * ceil(n/t) tiles the last wave leaves
  units
  idle: tiles / (ceil(tiles / u) * u). Where there are fewer tiles than units, libraries cut k into pieces of at least two
  tiles, so up to k / (2 t) as many pieces count.
- *depth*: filling and draining a tile's pipeline takes as long as `depth` elements of k: k / (k + depth).

A convolution is the product that its implicit form is: m output positions, n output channels, k inputs of one output.
`benchmarks/sim/compare_gpu.py` compares it with measured products; docs/cluster.md has the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod

from sennit.cluster import Device, Figure
from sennit.cost.value import Cost, weakest
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Ref
from sennit.ir.operators import is_view
from sennit.ir.program import Compute, reads

__all__ = ["Product", "efficiency", "memory_time", "moved_bytes", "operator_cost", "products"]


@dataclass(frozen=True, slots=True)
class Product:
    """`batch` matrix products of m x k by k x n."""

    m: int
    n: int
    k: int
    batch: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


def operator_cost(step: Compute, types: Mapping[str, TensorType], device: Device) -> Cost:
    """The cost of a step on a device; `types` are the local types of the buffers that it reads and writes."""
    if is_view(step.kind):
        return Cost(0.0, device.launch.basis, "a view moves nothing")
    moved = moved_bytes(step, types)
    basis = weakest(device.bandwidth.basis, device.bandwidth_efficiency.basis, device.launch.basis)
    seconds, source = memory_time(moved, device)
    if device.special is not None and _is_special(step.kind):
        elements = max(types[name].elements for name in (*reads(step), *(buffer.name for buffer in step.results)))
        if elements / device.special.value > seconds:
            seconds = elements / device.special.value
            source = f"{elements} elements at {device.special.value:.3g} elements/s"
            basis = weakest(device.special.basis, device.launch.basis)
    work = products(step, types)
    if work and moved:
        peak = _peak(types[step.results[0].name].dtype, device)
        flops = sum(item.flops for item in work)
        seconds = max(seconds, sum(item.flops / (peak.value * efficiency(item, device)) for item in work if item.flops))
        source = f"roofline of {flops} flop at up to {peak.value:.3g}/s and {source}"
        basis = weakest(peak.basis, device.matmul.efficiency.basis, basis)
    return Cost(seconds + device.launch.value, basis, source)


def _peak(dtype: DType, device: Device) -> Figure:
    """That of the type, else of the nearest that the device has."""
    peak = device.peak
    found = peak.of(dtype) or peak.f32 or peak.bf16 or peak.f16 or peak.f64 or peak.i8
    assert found is not None  # a checked device has one
    return found


def memory_time(moved: int, device: Device) -> tuple[float, str]:
    """Seconds to move bytes through the device's memory, and that in words."""
    rate = device.bandwidth.value * device.bandwidth_efficiency.value
    if device.cache is not None and device.cache_bandwidth is not None and moved <= device.cache.value:
        rate = max(rate, device.cache_bandwidth.value)
    return moved / rate, f"{moved} bytes at {rate:.3g} bytes/s"


def _is_special(kind: str) -> bool:
    name = kind.split(".")[1] if "." in kind else kind
    stem = name.strip("_").removesuffix("_backward_data").removesuffix("_backward")
    return stem in (
        "erf",
        "exp",
        "gelu",
        "log",
        "log_softmax",
        "native_batch_norm",
        "native_group_norm",
        "native_layer_norm",
        "sigmoid",
        "silu",
        "softmax",
        "tanh",
    )


def moved_bytes(step: Compute, types: Mapping[str, TensorType]) -> int:
    """Bytes that an operator reads and writes, by the module's text."""
    written = sum(types[buffer.name].bytes for buffer in step.results)
    names = reads(step)
    name = step.kind.split(".")[1] if "." in step.kind else step.kind
    match name:
        case "slice" | "embedding" | "index_select" | "gather":
            return written + sum(min(types[item].bytes, written) for item in names)
        case "nll_loss_forward":  # a value of each row, with what lies beside it
            return 32 * types[names[0]].shape[0] + types[names[1]].bytes
        case "nll_loss_backward" | "embedding_dense_backward":  # the first names its shape only, the others are small
            return written + sum(min(types[item].bytes, written) for item in names if types[item].bytes != written)
        case _:
            return written + sum(types[item].bytes for item in names)


def efficiency(product: Product, device: Device) -> float:
    """The part of the peak that a product of this shape reaches, by the module's formula."""
    curve = device.matmul
    tile, units = int(curve.tile.value), int(curve.units.value)
    quarter = max(1, tile // 4)
    fill = _fill(product.m, quarter) * _fill(product.n, quarter)
    tiles = product.batch * ceil(product.m / tile) * ceil(product.n / tile)
    if tiles < units:
        tiles *= max(1, min(units // tiles, product.k // (2 * tile)))
    waves = tiles / (ceil(tiles / units) * units)
    return curve.efficiency.value * fill * waves * product.k / (product.k + curve.depth.value)


def _fill(size: int, step: int) -> float:
    return size / (ceil(size / step) * step)


def products(step: Compute, types: Mapping[str, TensorType]) -> tuple[Product, ...]:
    """The matrix products inside an operator; none where memory alone decides."""

    def shape(position: int) -> tuple[int, ...]:
        return types[_name(step.args[position])].shape

    result = types[step.results[0].name].shape
    name = step.kind.split(".")[1] if "." in step.kind else step.kind
    match name:
        case "mm" | "addmm" | "linear":
            (left, right) = (shape(1), result) if name == "addmm" else (shape(0), result)
            return (Product(prod(result[:-1]), right[-1], left[-1]),) if len(result) > 1 else ()
        case "mv" | "addmv":
            left = shape(1) if name == "addmv" else shape(0)
            return (Product(left[0], 1, left[1]),)
        case "bmm" | "baddbmm":
            left = shape(1) if name == "baddbmm" else shape(0)
            return (Product(result[-2], result[-1], left[-1], prod(result[:-2])),)
        case "convolution" | "conv2d" | "conv1d" | "_convolution":
            return (_convolution(result, shape(1)),)
        case "convolution_backward":
            # grad_output, input, weight, ..., output_mask: the two products that are asked for cost as the forward one
            mask = step.args[-1]
            wanted = sum(map(bool, mask[:2])) if isinstance(mask, tuple) else 2
            return (_convolution(shape(0), shape(2)),) * wanted
        case _ if name.startswith("_scaled_dot_product") or name == "scaled_dot_product_attention":
            return _attention(name, shape)
        case _:
            return ()


def _name(arg: Arg) -> str:
    assert isinstance(arg, Ref), f"expected a buffer, got {arg!r}"
    return arg.name


def _convolution(output: tuple[int, ...], weight: tuple[int, ...]) -> Product:
    """The weight is [out, in / groups, *kernel], so a grouped convolution needs no group count."""
    return Product(prod(output) // max(1, output[1]), output[1], prod(weight[1:]))


def _attention(name: str, shape: Callable[[int], tuple[int, ...]]) -> tuple[Product, ...]:
    """Query by key and weights by value; the backward has five such products, two of them recomputed."""
    backward = name.endswith("backward")
    query, key, value = (shape(position + 1 if backward else position) for position in range(3))
    batch = prod(query[:-2])
    scores = Product(query[-2], key[-2], query[-1], batch)
    mixed = Product(query[-2], value[-1], key[-2], batch)
    return (scores, mixed) if not backward else (scores, scores, mixed, mixed, scores)
