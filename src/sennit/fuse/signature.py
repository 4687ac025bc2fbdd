"""The name of a kernel by its structure: what it does to inputs of which types, without the names of its values.

    signature := input "\\n" ... operator "\\n" ...
    input     := %N ":" TYPE
    operator  := result ("," result)* "=" KIND "(" argument ("," argument)* ")"
    result    := %N "!"?                                  "!" where something outside reads it

Values are numbered in the order in which they first occur. Layers repeat, and so do their kernels: what was compiled,
measured or estimated for one is so for all with its signature.
"""

from __future__ import annotations

from collections.abc import Mapping

from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Arg, Ref
from sennit.ir.strategy_check import Kernel

__all__ = ["signature"]


def signature(kernel: Kernel, written: frozenset[str], types: Mapping[str, TensorType]) -> str:
    """Equal for kernels that compute the same function of inputs of the same types."""
    number: dict[str, int] = {}

    def label(name: str) -> str:
        if name not in number:
            number[name] = len(number)
        return f"%{number[name]}"

    def show(arg: Arg) -> str:
        match arg:
            case Ref(name):
                return label(name)
            case tuple():
                return "[" + ",".join(map(show, arg)) + "]"
            case DType():
                return arg.value
            case _:
                return repr(arg)

    lines = [f"{label(name)}:{types[name]}" for name in kernel.reads]
    for op in kernel.body:
        call = ",".join([*map(show, op.args), *(f"{key}={show(arg)}" for key, arg in op.kwargs)])
        results = ",".join(
            f"{label(value.name)}{'!' if value.name in written and op.name not in kernel.repeated else ''}"
            for value in op.results
        )
        lines.append(f"{results}={op.kind}({call})")
    return "\n".join(lines)
