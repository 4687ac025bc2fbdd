"""A communication under way."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Handle"]


class Handle(Protocol):
    """What every call that communicates returns: the result is there when it is waited for."""

    def wait(self) -> Tensor: ...
