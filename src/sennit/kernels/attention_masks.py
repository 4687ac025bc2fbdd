"""The masks that derivatives of attention read, made again behind the forward task that made them first.

A mask with no micro-batch in it (a bias of positions, gathered from a table) is made in the forward task of each
micro-batch. The kernel of the derivative reads it too: from the one task to the other it would be kept, once for each
micro-batch in flight. So the steps that made it are repeated before the first derivative that reads it:

    repeated = the least set of forward operators, each on buffers without a micro-batch, that the mask is made by in that task

What they read in turn stands: parameters, and what was made before the first micro-batch. Derivatives that read one
mask share its copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from sennit.ir.graph import Arg, Phase, Ref
from sennit.ir.program import Buffer, Compute, Step, defines, reads

__all__ = ["masks_made_again"]


def masks_made_again(steps: list[Step], masks: Mapping[str, str]) -> tuple[list[Step], set[str]]:
    """The steps, and the buffers that are new. `masks` are the masks of derivatives, by the first result of each."""
    first = next((at for at, step in enumerate(steps) if any(buffer.times for buffer in defines(step))), len(steps))
    makers = {
        buffer.name: step
        for step in steps[first:]
        if isinstance(step, Compute) and step.phase is Phase.FORWARD and not _has_microbatch(step)
        for buffer in step.results
    }
    again: dict[str, str] = {}
    found: list[Step] = []
    for step in steps:
        mask = masks.get(step.results[0].name) if isinstance(step, Compute) and step.results else None
        if mask is not None and mask in makers:
            assert isinstance(step, Compute)
            found += _repeated(mask, makers, again)
            names = {mask: again[mask]}
            kwargs = tuple((key, _renamed(arg, names)) for key, arg in step.kwargs)
            step = replace(step, args=tuple(_renamed(arg, names) for arg in step.args), kwargs=kwargs)
        found.append(step)
    return found, set(again.values())


def _has_microbatch(step: Compute) -> bool:
    return any(buffer.times for buffer in step.results)


def _repeated(mask: str, makers: Mapping[str, Compute], again: dict[str, str]) -> Iterator[Compute]:
    """The steps that make a mask once more; none where that was done. A chain is a few views and a gather long."""
    if mask in again:
        return
    step = makers[mask]
    for name in reads(step):
        if name in makers:
            yield from _repeated(name, makers, again)
    results = tuple(_copy(buffer) for buffer in step.results)
    again.update(zip((buffer.name for buffer in step.results), (buffer.name for buffer in results), strict=True))
    kwargs = tuple((key, _renamed(arg, again)) for key, arg in step.kwargs)
    args = tuple(_renamed(arg, again) for arg in step.args)
    yield replace(step, args=args, kwargs=kwargs, results=results, phase=Phase.BACKWARD)


def _copy(buffer: Buffer) -> Buffer:
    return replace(buffer, name=f"{buffer.name}.for_derivative")


def _renamed(arg: Arg, names: Mapping[str, str]) -> Arg:
    match arg:
        case Ref(name):
            return Ref(names.get(name, name))
        case tuple():
            return tuple(_renamed(part, names) for part in arg)
        case _:
            return arg
