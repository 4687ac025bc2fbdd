"""What a search may choose from."""

from __future__ import annotations

from dataclasses import dataclass

from sennit.plan.search.choice import Kind
from sennit.plan.search.relax import Counted
from sennit.plan.search.ways import Keep

__all__ = ["Space"]


@dataclass(frozen=True, slots=True)
class Space:
    """What a search may choose from.

    `sizes` are the samples of a micro-batch on a replica; `pieces` the co-shard factors; `most_tp` is the node where
    none is given. `estimates` is the most schedules that are estimated, best guesses first, `effort` the most linear
    programs that the certificate may take: the bound holds in any case. `fused_attention` counts what a model calls
    `scaled_dot_product_attention` as one kernel, as torch and our own ranks run it; without, its mathematical form with
    all scores. `unequal` lets stages have different numbers of replicas, where units differ (`unequal.py`).
    `equal_stages` gives stages equally many units; `counted` says what the bounds count (`relax.py`). The baselines are
    spaces too (`baselines.py`).
    """

    name: str = "all"
    tps: tuple[int, ...] | None = None
    sequence: tuple[bool, ...] = (False, True)
    contexts: tuple[int, ...] = (1,)
    experts: tuple[int, ...] = (1,)
    sizes: tuple[int, ...] = (1, 2, 4)
    zeros: tuple[int, ...] = (0, 1, 2, 3)
    keeps: tuple[Keep, ...] = tuple(Keep)
    pieces: tuple[int, ...] = (1,)
    most_pp: int | None = None
    kinds: tuple[Kind, ...] = (
        Kind.ONE_F_ONE_B,
        Kind.INTERLEAVED,
        Kind.ZERO_BUBBLE_H1,
        Kind.ZERO_BUBBLE_H2,
        Kind.DUAL_PIPE_V,
        Kind.SEVERAL_FORWARD,
    )
    chunks: tuple[int, ...] = (2, 3, 4, 6, 8)
    interlaced: bool = False
    unequal: bool = True
    effort: int = 1000
    estimates: int = 120
    fused_attention: bool = True
    equal_stages: bool = False
    counted: Counted | None = None
