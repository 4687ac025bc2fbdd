"""Memory that a kernel takes for itself while it runs, beyond its arguments and results.

Measured on an H200 under torch 2.11 (`benchmarks/sim/record_memory.py`, `temporary`), for what is large:

| operator | bytes |
|---|---|
| derivative of softmax | a result more: gradient times output |
| sum over rows, dim 0 of a matrix | 8 an element, 132 MiB at most: partial sums of thread blocks |
| derivative of an embedding | 4.4 for each element of the gradient: sums of rows in f32, sorted indices |
| derivative of fused attention | 4 for each element of the query: its gradient in f32 |

A convolution's workspace depends on what cuDNN chooses (0 to 160 MB in the same table) and is not in here.
"""

from __future__ import annotations

from collections.abc import Mapping

from sennit.ir.dtype import TensorType
from sennit.ir.program import Compute, reads

__all__ = ["workspace"]

MOST_PARTIAL_SUMS = 132 << 20


def workspace(step: Compute, types: Mapping[str, TensorType]) -> int:
    """Bytes that a GPU's kernel for the step takes while it runs."""
    name = step.kind.split(".")[1] if "." in step.kind else step.kind
    names = reads(step)
    match name:
        case "_softmax_backward_data":
            return types[step.results[0].name].bytes
        case "sum":
            source, result = types[names[0]], types[step.results[0].name]
            by_rows = len(source.shape) > 1 and result.elements == source.shape[-1] > 1
            return min(8 * source.elements, MOST_PARTIAL_SUMS) if by_rows else 0
        case "embedding_dense_backward":
            return int(4.4 * types[names[0]].elements)
        case _ if name.startswith("_scaled_dot_product") and name.endswith("backward"):
            return 4 * types[names[1]].elements
        case _:
            return 0
