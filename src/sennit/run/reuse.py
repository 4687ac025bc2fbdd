"""Where the source writes a result into memory that is there, and where it leaves a copy out.

The program stays as it was checked.

    y = add(x, b); free x        the source:  y = add(x, b, out=x)

The program has two tensors there, for the length of the step; the source has one. That is a tensor less at the peak
where scores are computed or differentiated, and no fresh memory, which a CPU must clear before it is written.

Result r of a step may take the memory of its operand x where

1. the step computes element by element, r[i] from x[i] (`_POINTWISE`, `_FIRST`); or x is the gradient that comes in,
   and the kernel computes element by element or reads all
   of a row before it writes any of it, as that of a softmax does (`_GRADIENTS`);
2. x has the type and the local shape of r, on every device;
3. x is, through views that keep every element once (`_WHOLE_VIEWS`), all of what an operator of torch made in memory of
   its own: no input, and
   nothing that a collective or a transfer has touched, which may still be reading it;
4. nothing looks at that memory later: neither a later step nor an output reads x or any other view of it, and this step
   reads it through x alone.

What may share memory is counted generously: sennit's own operators share that of everything they read, and torch's
where their schema says that a result may alias.

**Copies.** `view(clone(x))` is how torch says that elements must be put in order first. The source calls `reshape`,
which does that where it must, so a copy that such views alone read is left out (`Reuses.spared`): its name is another
one for what it would copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sennit.ir.graph import Ref
from sennit.ir.program import Buffer, Compute, Free, Lane, Step, defines, reads
from sennit.kernels.aliases_torch import RESHAPED, may_share
from sennit.kernels.shared_memory import SharedMemory, Touch

__all__ = ["Reuse", "Reuses", "reused"]


@dataclass(frozen=True, slots=True)
class Reuse:
    """The operand whose memory a result takes; the buffer that is all of that memory, the operand itself or what it is
    a view of; and the form of the operator that writes there, with the name of its argument (None where the form writes
    into its first).
    """

    operand: str
    memory: str
    kind: str
    out: str | None


@dataclass(frozen=True, slots=True)
class Reuses:
    """Of a lane: `taken` by the name of the result; `spared` are results of copies that are not made."""

    taken: Mapping[str, Reuse]
    spared: frozenset[str]


_POINTWISE: Mapping[str, tuple[str, str | None]] = {
    "aten.add.Tensor": ("aten.add.out", "out"),
    "aten.sub.Tensor": ("aten.sub.out", "out"),
    "aten.mul.Tensor": ("aten.mul.out", "out"),
    "aten.div.Tensor": ("aten.div.out", "out"),
    "aten.gelu.default": ("aten.gelu.out", "out"),
}
_FIRST: Mapping[str, tuple[str, str | None]] = {
    "aten.mul.Scalar": ("aten.mul_.Scalar", None),
    "aten.scatter.value": ("aten.scatter_.value", None),
}
_GRADIENTS: Mapping[str, tuple[str, str | None]] = {
    "aten._softmax_backward_data.default": ("rank.softmax_gradient", None),
    "aten.gelu_backward.default": ("aten.gelu_backward.grad_input", "grad_input"),
}
_WRITES: Mapping[str, tuple[str, str | None]] = {**_POINTWISE, **_FIRST, **_GRADIENTS}

_WHOLE_VIEWS = frozenset(
    {
        *RESHAPED,
        "aten.alias.default",
        "aten.permute.default",
        "aten.reshape.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.t.default",
        "aten.transpose.int",
        "aten.unsqueeze.default",
    }
)


def reused(lane: Lane) -> Reuses:
    spared = _spared(lane)
    memory, buffers = _Memory(lane, spared), lane.buffers()
    found: dict[str, Reuse] = {}
    for number, step in enumerate(lane.steps):
        if not isinstance(step, Compute) or step.kind not in _WRITES:
            continue
        kind, out = _WRITES[step.kind]
        for name in _candidates(step):
            if _alike(buffers[name], step.results[0]) and memory.is_last_look(name, number):
                found[step.results[0].name] = Reuse(name, memory.whole[name], kind, out)
                break
    return Reuses(found, spared)


def _spared(lane: Lane) -> frozenset[str]:
    readers: dict[str, set[str]] = {output.name: {"result"} for output in lane.outputs}
    for step in lane.steps:
        if not isinstance(step, Free):
            for name in reads(step):
                readers.setdefault(name, set()).add(step.kind if isinstance(step, Compute) else "transfer")
    return frozenset(
        step.results[0].name
        for step in lane.steps
        if isinstance(step, Compute)
        and (step.kind == "aten.alias.default" or (step.kind == "aten.clone.default" and not step.kwargs))
        and readers.get(step.results[0].name, set()) <= {*RESHAPED}
    )


def _candidates(step: Compute) -> tuple[str, ...]:
    operands = step.args if step.kind in _POINTWISE else step.args[:1]
    return tuple(arg.name for arg in operands if isinstance(arg, Ref))


def _alike(one: Buffer, other: Buffer) -> bool:
    even = one.layout.is_even and other.layout.is_even
    return even and one.dtype == other.dtype and one.layout.local_shape() == other.layout.local_shape()


class _Memory:
    """Who looks at the memory of a lane last (`kernels/shared_memory.py`), which buffers are all of it, and which of it
    a transfer may be reading.
    """

    def __init__(self, lane: Lane, spared: frozenset[str]) -> None:
        # buffers that are, through whole views, all that a step of ours made: to what it made
        self.whole: dict[str, str] = {}
        line = [self._touch(step, spared) for step in lane.steps]
        self.shared = SharedMemory([*line, Touch(tuple(output.name for output in lane.outputs), (), shares=False)])
        moved = (reads(step) for step in lane.steps if not isinstance(step, Compute | Free))
        self.touched = self.shared.under(*(name for names in moved for name in names))

    def _touch(self, step: Step, spared: frozenset[str]) -> Touch:
        results = tuple(buffer.name for buffer in defines(step))
        if isinstance(step, Free):
            return Touch((), (), shares=False)
        if not isinstance(step, Compute):
            return Touch(reads(step), results, shares=False)
        source = step.args[0].name if step.args and isinstance(step.args[0], Ref) else None
        is_view = step.kind in _WHOLE_VIEWS or step.results[0].name in spared
        shares = is_view or may_share(step.kind)
        if is_view and source in self.whole:
            self.whole.update((name, self.whole[source]) for name in results)
        elif not shares:
            self.whole.update((name, name) for name in results)
        return Touch(reads(step), results, shares)

    def is_last_look(self, name: str, number: int) -> bool:
        is_ours = name in self.whole and self.shared.under(name).isdisjoint(self.touched)
        return is_ours and self.shared.is_last_look(name, number)
