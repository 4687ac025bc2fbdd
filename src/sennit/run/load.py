"""Emitted source to a function that can be called."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

__all__ = ["StepFunction", "load_source"]

StepFunction = Callable[..., Mapping[str, Tensor]]


def load_source(source: str, name: str) -> StepFunction:
    """The `step` function of an emitted lane; tracebacks show its lines under `name`."""
    namespace: dict[str, Any] = {}
    exec(compile(source, name, "exec"), namespace)
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    step: StepFunction = namespace["step"]
    return step
