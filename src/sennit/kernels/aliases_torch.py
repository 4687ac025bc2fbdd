"""What the schemas of torch say of memory: which operators may return what they were given."""

from __future__ import annotations

import torch

__all__ = ["RESHAPED", "may_share"]

RESHAPED = ("aten.view.default", "aten._unsafe_view.default")  # what we call `reshape` for: a view, or a copy


def may_share(kind: str) -> bool:
    """Whether a result may lie in the memory of something that the operator reads.

    So may that of sennit's own operators, and of any that torch does not know.
    """
    namespace, _, rest = kind.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(torch.ops.aten, name, None) if namespace == "aten" else None
    if packet is None or kind in RESHAPED:
        return True
    return any(result.alias_info is not None for result in getattr(packet, overload)._schema.returns)
