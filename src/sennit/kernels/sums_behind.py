"""Sums over micro-batches of what replicas reduce (ZeRO-2 and 3), added up one bucket behind.

    program                                     source of a rank
    ra = reduce_scatter a                       ra, rb = bucket of a and b, started
    sa = accumulate(sa, ra)                     ...
    ...                                         rc, rd = bucket of c and d, started
    rb = reduce_scatter b                       sa = accumulate(sa, ra); sb = accumulate(sb, rb)
    sb = accumulate(sb, rb)

A program adds each term right behind its reduction. Run so, a rank waits for every message. So additions are put off
until the next run of terms (`buckets.term_runs`) is complete: a run travels while the backward pass makes the next one.
What is held longer are reduced terms, pieces of a bucket. Views of a sum are put off with it. A step that cannot wait
(an output's gather, a message to another stage) finds all that it reads, directly or through what was put off, added up
before it.

No step changes what it reads, and additions of one sum keep their order, so every result has the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

from sennit.ir.program import Collective, Step, defines, reads
from sennit.kernels.buckets import can_wait

__all__ = ["with_sums_behind"]


def with_sums_behind(steps: Sequence[Step], runs: Sequence[tuple[str, ...]]) -> list[Step]:
    """The steps (without frees) with additions behind the run after theirs; `runs` has the terms of each by name."""
    if not runs:
        return list(steps)
    queue = _Queue(runs)
    for step in steps:
        queue.add(step)
    return [*queue.steps, *queue.held]


class _Queue:
    """`held` are steps that were put off; `runs_of` says of what they make, and of terms, which runs lead to it."""

    def __init__(self, runs: Sequence[tuple[str, ...]]) -> None:
        self.run_of = {name: number for number, names in enumerate(runs) for name in names}
        self.left = [len(names) for names in runs]
        self.steps: list[Step] = []
        self.held: list[Step] = []
        self.runs_of: dict[str, frozenset[int]] = {}
        self.completed: dict[int, int] = {}  # by run: how many were complete before it

    def add(self, step: Step) -> None:
        runs = self._runs(step)
        if can_wait(step) and not self._is_old(runs):
            self.held.append(step)
            self.runs_of.update((buffer.name, runs) for buffer in defines(step))
            return
        self._bring(step)
        self.steps.append(step)
        if isinstance(step, Collective) and step.result.name in self.run_of:
            self._under_way(step.result.name)

    def _runs(self, step: Step) -> frozenset[int]:
        return frozenset[int]().union(*(self.runs_of.get(name, ()) for name in reads(step)))

    def _is_old(self, runs: frozenset[int]) -> bool:
        """Whether another run was completed since the last of these."""
        return all(self.completed.get(run, len(self.completed)) + 1 < len(self.completed) for run in runs)

    def _under_way(self, term: str) -> None:
        run = self.run_of[term]
        self.runs_of[term] = frozenset([run])
        self.left[run] -= 1
        if not self.left[run]:
            self.completed[run] = len(self.completed)
            self._release({number for number, step in enumerate(self.held) if self._is_old(self._runs(step))})

    def _bring(self, reader: Step) -> None:
        """What was put off and leads to what a step reads comes before it."""
        needed, chosen = set(reads(reader)), set[int]()
        for number in reversed(range(len(self.held))):
            if any(buffer.name in needed for buffer in defines(self.held[number])):
                chosen.add(number)
                needed.update(reads(self.held[number]))
        self._release(chosen)

    def _release(self, chosen: set[int]) -> None:
        if chosen:
            self.steps += [step for number, step in enumerate(self.held) if number in chosen]
            self.held = [step for number, step in enumerate(self.held) if number not in chosen]
