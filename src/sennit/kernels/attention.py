"""Attention as one kernel: a program in which `scaled_dot_product_attention` was captured in its mathematical form, as
eager torch runs it.

Capture takes `F.scaled_dot_product_attention(q, k, v, mask)` apart, because every operator of its mathematical form has
a rule that splits it. Eager torch calls a kernel that never stores the scores. `fuse_attention` gives the program that
does the same: after lowering, whatever plan chose the pieces, the operators of one attention on one device become
`aten._scaled_dot_product_*_attention` and its derivative, which read q, k, v as the model made them, in their own
element type. The ranks run that program, and the simulator times it.

`written_attention.py` says what is found, `causal_mask.py` which masks are the causal one. Which kernel it becomes,
`attention_kernels.py` says. Where a kernel does not compute the same function, the attention stays as it was written.
An attention that the backward pass computes again (`plan/recompute.py`) is found there a second time, and its
derivative belongs to that one.

**Where a kernel goes.** The forward one where p v was. The derivative where the last of its products was that comes
before the first reader of a result, if all that it reads is there by then: so it stays in the task of the schedule that
needs it (`B` of a zero-bubble schedule). Else the attention stays as it was.

**A mask that is trained** (a bias of relative positions, a pair representation). torch's memory-efficient kernel takes
any mask, and gives its gradient in the shape of the scores and the type of the query; what sums it over the batch
follows as before. So no scores are kept, and the gradient lies in memory while it is summed. The other kernels have no
such result. The derivative reads the mask once more, where the mathematical form does not. A mask that the forward task
of a micro-batch made of values that no micro-batch is in (`plan/propagate_time.py`) is made again for it: kept, there
would be one for each micro-batch in flight.

**What is left out** besides: whatever nobody reads any more (masks made of `arange`, copies to float32), and the copies
that put heads and tokens in their order, since a kernel writes its results in the order that the model's view asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sennit.ir.program import Compute, Free, Lane, Program, Step, defines, reads
from sennit.kernels.attention_kernels import AttentionKernel, kernel_for
from sennit.kernels.attention_masks import masks_made_again
from sennit.kernels.lane_code import LaneCode, with_frees
from sennit.kernels.written_attention import SOFTMAX, Attention, written_attention

__all__ = ["fuse_attention"]

COPY = "aten.clone.default"


def fuse_attention(program: Program, device_type: str = "cuda") -> Program:
    """The program with each attention as one kernel of `device_type` ("cuda" or "cpu"), and another for its derivative."""
    codes: dict[str, LaneCode] = {}
    for lane in program.lanes:
        codes[lane.name] = LaneCode(lane, codes)
    return replace(program, lanes=tuple(_fuse(code, device_type) for code in codes.values()))


@dataclass(frozen=True, slots=True)
class _Placed:
    """A step that stands for others: where it goes, and which steps it takes the place of.

    `mask` is what a derivative reads as that.
    """

    at: int
    step: Compute
    covers: frozenset[int]
    mask: str | None = None


def _fuse(code: LaneCode, device_type: str) -> Lane:
    placed: list[_Placed] = []
    for position, step in enumerate(code.lane.steps):
        if isinstance(step, Compute) and step.kind == SOFTMAX:
            placed += _kernels(code, position, device_type)
    return _replaced(code, placed) if placed else code.lane


def _kernels(code: LaneCode, softmax: int, device_type: str) -> list[_Placed]:
    """The forward kernel of the attention around a softmax, and the backward one where there is one; none if it stays."""
    for group in (True, False):
        found = written_attention(code, softmax, group=group)
        kernel = kernel_for(device_type, found, code) if found is not None else None
        if found is not None and kernel is not None:
            return _placed(code, found, kernel)
    return []


def _placed(code: LaneCode, found: Attention, kernel: AttentionKernel) -> list[_Placed]:
    mix = code.compute(found.at)
    assert mix is not None
    forward = kernel.forward(found, mix)
    kernels = [_Placed(found.at, forward, found.covers)]
    if found.derivative is not None:
        at = _place_of_derivative(code, found)
        last = code.compute(at) if at is not None else None
        if at is None or last is None:
            return []
        kernels.append(_Placed(at, kernel.backward(found, forward, last), found.derivative.covers, found.mask))
    return kernels


def _place_of_derivative(code: LaneCode, found: Attention) -> int | None:
    made = found.derivative
    assert made is not None
    results = [item.name for item in (made.query, made.key, made.value, made.mask) if item is not None]
    behind = found.covers | made.covers
    readers = [item for name in results for item in code.readers.get(name, ()) if item not in behind]
    before = [product for product in made.products if product < min(readers, default=len(code.lane.steps))]
    given = [name for name in (made.gradient, found.query, found.key, found.value, found.mask) if name is not None]
    ready = max(found.at, *(code.maker.get(name, -1) for name in given))
    return before[-1] if before and before[-1] > ready else None


# ---- the new lane ----------------------------------------------------------------------------------------------------


def _replaced(code: LaneCode, kernels: Sequence[_Placed]) -> Lane:
    at = {kernel.at: kernel.step for kernel in kernels}
    covered = frozenset[int]().union(*(kernel.covers for kernel in kernels))
    steps: list[Step] = []
    for position, step in enumerate(code.lane.steps):
        if position in at:
            steps.append(at[position])
        elif position not in covered:
            steps.append(step)
    own = {buffer.name for kernel in kernels for buffer in kernel.step.results}
    steps = _without_copies(_without_unread(steps, code.outputs), own)
    masks = {kernel.step.results[0].name: kernel.mask for kernel in kernels if kernel.mask is not None}
    steps, again = masks_made_again(steps, masks)
    freed = {step.source for step in code.lane.steps if isinstance(step, Free)} | own | again
    return replace(code.lane, steps=tuple(with_frees(steps, freed - code.outputs)))


def _without_unread(steps: list[Step], outputs: frozenset[str]) -> list[Step]:
    """Without what nobody reads any more, and without frees."""
    needed = set(outputs)
    kept: list[Step] = []
    for step in reversed(steps):
        if isinstance(step, Free):
            continue
        made = defines(step)
        if isinstance(step, Compute) and made and not any(buffer.name in needed for buffer in made):
            continue
        needed.update(reads(step))
        kept.append(step)
    return kept[::-1]


def _without_copies(steps: list[Step], own: set[str]) -> list[Step]:
    """A copy of a kernel's permuted result is a view: the kernel writes it in that order."""
    permuted: set[str] = set()
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Compute) and step.results:
            names = reads(step)
            if step.kind == "aten.permute.default" and names[0] in own:
                permuted.add(step.results[0].name)
            elif step.kind == COPY and names[0] in permuted:
                step = replace(step, kind="aten.alias.default", kwargs=())
        found.append(step)
    return found
