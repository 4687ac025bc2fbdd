"""Which of torch's attention kernels computes an attention, and the call of it.

The one place that chooses, for ranks and for the simulator.

| kernel | device | element types | mask | gradient of the mask |
|---|---|---|---|---|
| `flash_attention_for_cpu` | CPU | all | 2 or 4 dims | no |
| `cudnn_attention` | CUDA | 16 bits | none, or causal | no |
| `efficient_attention` | CUDA | all but f64 | any | yes |

This is what eager torch would choose on a recent GPU; where none fits, eager torch computes the mathematical form too.
On the CPU a kernel takes q, k and v of four dims and one head size; key and value may have fewer heads. The CUDA
kernels are called with as many heads (`attention_calls_torch.py` merges further leading dims).

A step has the arguments of the aten operator. Of the results of the CUDA kernels it has the two that carry values, and
those that the derivative must be given back with them; what follows from shapes (lengths of sequences) is None in its
arguments.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

from sennit.ir.dtype import DType
from sennit.ir.graph import Arg, Ref
from sennit.ir.layout import Layout
from sennit.ir.program import Buffer, Compute
from sennit.kernels.lane_code import LaneCode
from sennit.kernels.written_attention import Attention

__all__ = ["AttentionKernel", "kernel_for"]


class AttentionKernel(Enum):
    CPU = "_scaled_dot_product_flash_attention_for_cpu"
    CUDNN = "_scaled_dot_product_cudnn_attention"
    EFFICIENT = "_scaled_dot_product_efficient_attention"

    def forward(self, found: Attention, origin: Compute) -> Compute:
        """The step that computes an attention; `origin` says whose phase and module it has."""
        given, mask = _given(found), _mask(found)
        scale: tuple[tuple[str, Arg], ...] = (("scale", found.scale),)
        results: tuple[Buffer, ...] = (found.out, _statistics(found.out))
        args: tuple[Arg, ...]
        if self is AttentionKernel.CPU:
            args, kwargs = (*given, 0.0, found.causal), (("attn_mask", mask), *scale)
        else:
            args, kwargs = (*given, mask, found.derivative is not None, 0.0, found.causal), scale
            results += tuple(_scalar(found.out, name) for name in ("seed", "offset"))
        return Compute(f"aten.{self.value}.default", args, kwargs, results, origin.phase, origin.module, origin.op)

    def backward(self, found: Attention, forward: Compute, origin: Compute) -> Compute:
        """The step that computes its derivative."""
        made = found.derivative
        assert made is not None
        head = (Ref(made.gradient), *_given(found))
        kept, mask = tuple(Ref(item.name) for item in forward.results), _mask(found)
        scale: tuple[tuple[str, Arg], ...] = (("scale", found.scale),)
        results: tuple[Buffer, ...] = (made.query, made.key, made.value)
        args: tuple[Arg, ...]
        match self:
            case AttentionKernel.CPU:
                args, kwargs = (*head, *kept, 0.0, found.causal), (("attn_mask", mask), *scale)
            case AttentionKernel.CUDNN:
                args, kwargs = (*head, *kept, mask, None, None, None, None, 0.0, found.causal), scale
            case AttentionKernel.EFFICIENT:
                wanted = (True, True, True, made.mask is not None)
                args, kwargs = (*head, mask, *kept, 0.0, wanted, found.causal), scale
                results += (made.mask,) if made.mask is not None else ()
        return Compute(
            f"aten.{self.value}_backward.default", args, kwargs, results, origin.phase, origin.module, origin.op
        )


def kernel_for(device_type: str, found: Attention, code: LaneCode) -> AttentionKernel | None:
    """The kernel that computes an attention on devices of a type; None where the written form stays."""
    shapes = [code.shape(name) for name in (found.query, found.key, found.value)]
    dtype, trained = code.dtype(found.query), found.derivative is not None and found.derivative.mask is not None
    query, key, value = shapes
    if len({len(shape) for shape in shapes}) > 1 or key != value or query[-1] != key[-1]:
        return None
    if any(not code.buffers[name].layout.is_even for name in (found.query, found.key, found.value)):
        return None
    if device_type == "cpu":
        fits = len(query) == 4 and not trained and _takes_mask(found, code)
        return AttentionKernel.CPU if fits else None
    if device_type != "cuda" or dtype is DType.F64 or query[-3] != key[-3]:
        return None
    narrow = dtype in (DType.BF16, DType.F16) and found.mask is None
    return AttentionKernel.CUDNN if narrow else AttentionKernel.EFFICIENT


def _takes_mask(found: Attention, code: LaneCode) -> bool:
    """The kernel of the CPU takes a mask of all heads and samples or of each, in f32 or in the type of the query."""
    if found.mask is None:
        return True
    return len(code.shape(found.mask)) in (2, 4) and code.dtype(found.mask) in (DType.F32, code.dtype(found.query))


def _given(found: Attention) -> tuple[Ref, Ref, Ref]:
    return Ref(found.query), Ref(found.key), Ref(found.value)


def _mask(found: Attention) -> Arg:
    return Ref(found.mask) if found.mask is not None else None


def _statistics(out: Buffer) -> Buffer:
    """The logarithm of the sum of exponentials: a number for each query, in f32 at least."""
    name, dtype = f"{out.name}.logsumexp", out.dtype if out.dtype is DType.F64 else DType.F32
    return Buffer(name, name, dtype, replace(out.layout, shape=out.layout.shape[:-1]), out.times)


def _scalar(out: Buffer, what: str) -> Buffer:
    """Where the kernel's own generator of random numbers stood: unused without dropout, and an argument of the
    derivative.
    """
    name = f"{out.name}.{what}"
    return Buffer(name, name, DType.I64, Layout.make(out.layout.mesh, ()))
