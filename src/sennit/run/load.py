"""Emitted source to a function that can be called.

Compiling a text of 15,000 lines takes 57 MB of syntax tree for 2 MB of code, and the code is allocated between the
nodes: when they are gone, their memory is full of holes and stays. So the code is written out (`code_of`) and read back
(`load_code`), once they are gone or in another process, into memory of its own (10 MB of resident set to 4, CPython
3.11). The text is kept packed; tracebacks unpack it.
"""

from __future__ import annotations

import linecache
import marshal
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["Code", "StepFunction", "code_of", "load_code", "load_source"]

StepFunction = Callable[..., Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Code:
    """An emitted lane: its text, packed, and what Python compiled it to. Only the Python that wrote it can read it."""

    name: str
    packed: bytes
    code: bytes

    def text(self) -> str:
        return zlib.decompress(self.packed).decode()


def code_of(source: str, name: str) -> Code:
    """`name` is what tracebacks call the file."""
    return Code(name, zlib.compress(source.encode(), 1), marshal.dumps(compile(source, name, "exec")))


def load_code(code: Code) -> StepFunction:
    """The `step` function of an emitted lane; tracebacks show its lines."""
    namespace: dict[str, Any] = {}
    exec(marshal.loads(code.code), namespace)
    linecache.cache[code.name] = (code.text,)  # asked for when a traceback is printed
    step: StepFunction = namespace["step"]
    return step


def load_source(source: str, name: str) -> StepFunction:
    return load_code(code_of(source, name))
