"""Which dim of a buffer lies side by side in memory, as far as views tell.

What a step writes is in order: its last dim is innermost. A view moves dims without moving values, so the innermost one may end up
elsewhere, and a copy that reads it then gathers. A program's types have shapes and no strides; this is what is kept of them.
`None` means that no dim is innermost for certain: a view split or merged one that lay out of order.
"""

from __future__ import annotations

from sennit.ir.program import Compute

__all__ = ["innermost"]


def innermost(step: Compute, inner: int | None, rank: int) -> int | None:
    """The innermost dim of a view's result, from that of what it looks at, which has `rank` dims."""
    if inner is None:
        return None
    name = step.kind.split(".")[1]
    result = len(step.results[0].layout.shape)
    match name:
        case "permute":
            dims = step.args[1]
            if not isinstance(dims, tuple):
                return None
            order = [int(dim) % rank for dim in dims if isinstance(dim, int)]
            return order.index(inner) if inner in order else None
        case "transpose":
            left, right = (int(arg) % rank for arg in step.args[1:3] if isinstance(arg, int))
            return {left: right, right: left}.get(inner, inner)
        case "t":
            return 1 - inner if rank == 2 else inner
        case "unsqueeze":
            at = int(step.args[1]) % (rank + 1) if isinstance(step.args[1], int) else 0
            return inner + 1 if at <= inner else inner
        case "select":
            dim = int(step.args[1]) % rank if isinstance(step.args[1], int) else 0
            return None if dim == inner else inner - (dim < inner)
        case "expand":
            return inner + result - rank
        case "view" | "squeeze":
            return result - 1 if inner == rank - 1 else None
        case _:
            return inner  # slices, splits, other names
