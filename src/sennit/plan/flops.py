"""Floating point operations of a whole operator: enough to balance stages before anything is simulated."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from sennit.ir.dtype import TensorType
from sennit.ir.graph import Op
from sennit.plan.propagate_index import is_product

__all__ = ["flops_of"]


def flops_of(op: Op, types: Mapping[str, TensorType]) -> float:
    """Of products and convolutions, forward and backward; one for each element of any other result."""
    made = sum(prod(value.type.shape) for value in op.results)
    if is_product(op):
        return 2.0 * made * types[op.reads[-1]].shape[-2]
    if op.kind == "aten.convolution.default":
        return 2.0 * made * prod(types[op.reads[1]].shape[1:])
    if op.kind == "aten.convolution_backward.default":
        gradient, _, weight = (types[name].shape for name in op.reads[:3])
        return 2.0 * 2.0 * prod(gradient) * prod(weight[1:])
    return float(made)
