"""Boosted trees as arrays: what a library trained, evaluated without it.

A tree is a run of nodes. An inner node compares one feature with a threshold and goes on to the left where it is at
most that, else to the right; a leaf has a value. The prediction is a constant and the sum of one leaf of each tree. All
trees and all rows walk at the same time, one level a step, so that a few hundred groups take some milliseconds.

`flat` is what the trees of the estimator see of a group (`features.py`): the features of the whole, and the sums and
the maxima over its nodes. Groups whose operators were measured one by one have trees of their own (`Forests`): what is
left to correct there is smaller and of another sort than where times come from a profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sennit.fuse.features import GroupFeatures

__all__ = ["BoostedTrees", "Forests", "flat"]


def flat(groups: Sequence[GroupFeatures]) -> NDArray[np.float32]:
    rows = [np.concatenate([group.whole, group.nodes.sum(0), group.nodes.max(0)]) for group in groups]
    return np.stack(rows).astype(np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class BoostedTrees:
    """`roots` are the first nodes of the trees.

    Of each node: its feature (-1 in a leaf), threshold, the nodes to its left and right, and the value of a leaf.
    """

    constant: float
    roots: NDArray[np.int64]
    feature: NDArray[np.int64]
    threshold: NDArray[np.float64]
    left: NDArray[np.int64]
    right: NDArray[np.int64]
    value: NDArray[np.float64]

    @classmethod
    def mean(cls, several: Sequence[BoostedTrees]) -> BoostedTrees:
        """Trees whose prediction is the mean of those of several."""
        starts = np.cumsum([0, *(len(one.feature) for one in several[:-1])])
        shifted = [
            (one.roots + start, one.left + start, one.right + start) for one, start in zip(several, starts, strict=True)
        ]
        roots, left, right = (np.concatenate(parts) for parts in zip(*shifted, strict=True))
        return cls(
            float(np.mean([one.constant for one in several])),
            roots,
            np.concatenate([one.feature for one in several]),
            np.concatenate([one.threshold for one in several]),
            left,
            right,
            np.concatenate([one.value for one in several]) / len(several),
        )

    def predict(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        at = np.broadcast_to(self.roots, (len(rows), len(self.roots))).copy()
        every = np.arange(len(rows))[:, None]
        while True:
            feature = self.feature[at]
            inner = feature >= 0
            if not inner.any():
                total: NDArray[np.float64] = self.constant + self.value[at].sum(1)
                return total
            goes_left = rows[every, np.maximum(feature, 0)] <= self.threshold[at]
            at = np.where(inner, np.where(goes_left, self.left[at], self.right[at]), at)


@dataclass(frozen=True, slots=True, eq=False)
class Forests:
    """Trees for groups most of whose operators were measured, and for all others; of each kind, those of the time and
    those of its error (the logarithm of its absolute value).
    """

    measured: BoostedTrees
    guessed: BoostedTrees
    measured_spread: BoostedTrees
    guessed_spread: BoostedTrees

    def predict(self, groups: Sequence[GroupFeatures]) -> NDArray[np.float64]:
        return self._of(groups, self.measured, self.guessed)

    def spread(self, groups: Sequence[GroupFeatures]) -> NDArray[np.float64]:
        """How far off the prediction may be: what trees learned of the errors of others on models that those had not
        seen.
        """
        return np.exp(self._of(groups, self.measured_spread, self.guessed_spread))

    @staticmethod
    def _of(groups: Sequence[GroupFeatures], measured: BoostedTrees, guessed: BoostedTrees) -> NDArray[np.float64]:
        rows, is_measured = flat(groups), np.array([group.measured for group in groups], dtype=bool)
        found = np.zeros(len(rows))
        for trees, mine in ((measured, is_measured), (guessed, ~is_measured)):
            if mine.any():
                found[mine] = trees.predict(rows[mine])
        return found
