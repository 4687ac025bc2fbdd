"""Kernels that were measured, and an estimator for all others; each structure is asked once.

A search asks for thousands of kernels, and most have the structure (`signature.py`) of one that was asked before.
`KnownCost` remembers by structure. Where a time was measured it is the answer, with no deviation: that is how an
estimate that is unsure is replaced (`unsure` lists them, the widest first).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from sennit.fuse.kernel_cost import Estimate, KernelCost
from sennit.fuse.signature import signature
from sennit.ir.dtype import TensorType
from sennit.ir.strategy_check import Kernel

__all__ = ["KnownCost", "ManyKernels", "Question"]

Question = tuple[Kernel, frozenset[str]]


@runtime_checkable
class ManyKernels(Protocol):
    """A cost that answers many questions faster together than one by one."""

    def estimate_all(self, questions: Sequence[Question]) -> list[Estimate]: ...


class KnownCost:
    """`measured` are seconds by signature. The memory is of this object; `types` are those of one graph."""

    def __init__(self, types: Mapping[str, TensorType], estimator: KernelCost, measured: Mapping[str, float]) -> None:
        self.types, self.estimator = types, estimator
        self.answers = {key: Estimate(seconds) for key, seconds in measured.items()}

    def estimate(self, kernel: Kernel, written: frozenset[str]) -> Estimate:
        return self.estimate_all([(kernel, written)])[0]

    def estimate_all(self, questions: Sequence[Question]) -> list[Estimate]:
        keys = [signature(kernel, written, self.types) for kernel, written in questions]
        new = {key: question for key, question in zip(keys, questions, strict=True) if key not in self.answers}
        if new:
            if isinstance(self.estimator, ManyKernels):
                found = self.estimator.estimate_all(list(new.values()))
            else:
                found = [self.estimator.estimate(kernel, written) for kernel, written in new.values()]
            self.answers.update(zip(new, found, strict=True))
        return [self.answers[key] for key in keys]

    def unsure(self, questions: Iterable[Question], least: float) -> list[Question]:
        """One kernel of each structure whose deviation is `least` or more, the widest first."""
        asked = {signature(kernel, written, self.types): (kernel, written) for kernel, written in questions}
        wide = [key for key in asked if key in self.answers and self.answers[key].deviation >= least]
        return [asked[key] for key in sorted(wide, key=lambda key: (-self.answers[key].deviation, key))]

    def learn(self, kernel: Kernel, written: frozenset[str], seconds: float) -> None:
        """What a measurement gave."""
        self.answers[signature(kernel, written, self.types)] = Estimate(seconds)

    def trust(self, kernel: Kernel, written: frozenset[str]) -> None:
        """Take the estimate as it is: the kernel cannot be measured, and is not to be asked for again."""
        key = signature(kernel, written, self.types)
        self.answers[key] = Estimate(self.answers[key].seconds)
