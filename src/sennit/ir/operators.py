"""What must be known of an operator by its name alone, in every layer."""

from __future__ import annotations

__all__ = ["is_local_form", "is_local_move", "is_view"]


def is_view(kind: str) -> bool:
    """Whether the result aliases the first argument: no bytes are moved and no memory is taken."""
    return kind in (
        "aten.alias.default",
        "aten.detach.default",
        "aten.expand.default",
        "aten.permute.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.split.Tensor",
        "aten.split_with_sizes.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.t.default",
        "aten.transpose.int",
        "aten.unsqueeze.default",
        "aten.view.default",
        "sennit.parts",
    )


def is_local_move(kind: str) -> bool:
    """Whether it is one of sennit's own operators, which `ir/program.py` defines."""
    return kind in ("sennit.slice", "sennit.take", "sennit.partial", "sennit.accumulate", "sennit.concat")


def is_local_form(kind: str) -> bool:
    """Whether it stands for an operator on pieces whose positions matter: `ir/local_forms_numpy.py` defines it."""
    return kind.startswith("sennit.") and not is_local_move(kind)
