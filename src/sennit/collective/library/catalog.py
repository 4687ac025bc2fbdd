"""The library by name: what there is for a collective on `nodes` of `per_node` ranks, and with which options.

A recipe builds an algorithm from the shape of the cluster and `Options`. `candidates` are what a selection by size
tries: each recipe that fits the shape, with each of its options worth trying.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from sennit.collective.library.all_pairs import (
    all_pairs_all_gather,
    all_pairs_all_reduce,
    all_pairs_reduce_scatter,
    direct_all_to_all,
)
from sennit.collective.library.all_to_all import three_step_all_to_all, two_step_all_to_all
from sennit.collective.library.all_to_next import direct_all_to_next, spread_all_to_next
from sennit.collective.library.direct import direct_all_reduce, direct_broadcast, direct_reduce_scatter
from sennit.collective.library.hierarchical import hierarchical_all_gather, hierarchical_all_reduce
from sennit.collective.library.nvls import nvls_all_gather, nvls_all_reduce, nvls_reduce_scatter
from sennit.collective.library.reads import one_shot_all_reduce, read_all_reduce, read_reduce_scatter
from sennit.collective.library.recursive import halving_doubling_all_reduce
from sennit.collective.library.rings import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from sennit.collective.library.trees import chain_broadcast, double_tree_all_reduce, tree_broadcast
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName

__all__ = ["Candidate", "Options", "Recipe", "candidates", "recipe", "recipes"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """`channels`: rings side by side.

    `instances`: every transfer cut once more. `pieces`: of a pipeline down a tree.
    """

    channels: int = 1
    instances: int = 1
    pieces: int = 1

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name in self.__struct_fields__ if (value := getattr(self, name)) != 1]
        return f"({', '.join(parts)})" if parts else ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """`build(nodes, per_node, options)`. `across`: only for more than one node. `one_sided`: made for the one-sided
    form, or for a multicast switch; a selection by the cost of schedules does not try it."""

    name: str
    collective: CollectiveName
    summary: str
    build: Callable[[int, int, Options], Algorithm]
    worth_trying: tuple[Options, ...] = (Options(),)
    across: bool = False
    one_sided: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    recipe: Recipe
    options: Options

    def __str__(self) -> str:
        return f"{self.recipe.name}{self.options}"


def recipes() -> tuple[Recipe, ...]:
    """All of the library; of equal ones, the selection takes the first."""
    cut = tuple(Options(instances=count) for count in (1, 4))
    wide = tuple(Options(channels=channels, instances=count) for channels, count in ((1, 1), (2, 1), (4, 1), (8, 1)))
    piped = tuple(Options(pieces=count) for count in (1, 4, 16))
    reduce, gather, scatter = CollectiveName.ALL_REDUCE, CollectiveName.ALL_GATHER, CollectiveName.REDUCE_SCATTER
    exchange, spread, following = CollectiveName.ALL_TO_ALL, CollectiveName.BROADCAST, CollectiveName.ALL_TO_NEXT
    return (
        Recipe(
            "ring_all_reduce",
            reduce,
            "round a ring twice: least bytes",
            lambda m, g, o: ring_all_reduce(m * g, channels=o.channels, instances=o.instances, per_node=g),
            wide,
        ),
        Recipe(
            "all_pairs_all_reduce",
            reduce,
            "two steps between all pairs: least latency",
            lambda m, g, o: all_pairs_all_reduce(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "halving_doubling_all_reduce",
            reduce,
            "log2 steps, least bytes",
            lambda m, g, o: halving_doubling_all_reduce(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "double_tree_all_reduce",
            reduce,
            "two binary trees, pipelined",
            lambda m, g, o: double_tree_all_reduce(m * g, pieces=o.pieces),
            piped,
        ),
        Recipe(
            "hierarchical_all_reduce",
            reduce,
            "rings inside nodes and across them",
            lambda m, g, o: hierarchical_all_reduce((g, m), channels=o.channels, instances=o.instances),
            wide,
            across=True,
        ),
        Recipe(
            "ring_all_gather",
            gather,
            "once round a ring",
            lambda m, g, o: ring_all_gather(m * g, channels=o.channels, instances=o.instances, per_node=g),
            wide,
        ),
        Recipe(
            "all_pairs_all_gather",
            gather,
            "one step between all pairs",
            lambda m, g, o: all_pairs_all_gather(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "hierarchical_all_gather",
            gather,
            "across nodes first, then inside",
            lambda m, g, o: hierarchical_all_gather((g, m), instances=o.instances),
            cut,
            across=True,
        ),
        Recipe(
            "ring_reduce_scatter",
            scatter,
            "once round a ring",
            lambda m, g, o: ring_reduce_scatter(m * g, channels=o.channels, instances=o.instances, per_node=g),
            wide,
        ),
        Recipe(
            "all_pairs_reduce_scatter",
            scatter,
            "one step between all pairs",
            lambda m, g, o: all_pairs_reduce_scatter(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "direct_all_reduce",
            reduce,
            "each rank adds up its part of all where they lie: least memory traffic",
            lambda m, g, o: direct_all_reduce(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "direct_reduce_scatter",
            scatter,
            "each rank adds up its part of all where they lie",
            lambda m, g, o: direct_reduce_scatter(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "direct_broadcast",
            spread,
            "the root to all at once",
            lambda m, g, o: direct_broadcast(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "direct_all_to_all",
            exchange,
            "one step between all pairs",
            lambda m, g, o: direct_all_to_all(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "two_step_all_to_all",
            exchange,
            "gathered inside the node, one message a node and rank",
            lambda m, g, o: two_step_all_to_all(m, g, instances=o.instances),
            cut,
            across=True,
        ),
        Recipe(
            "three_step_all_to_all",
            exchange,
            "gathered at one rank, one message a pair of nodes",
            lambda m, g, o: three_step_all_to_all(m, g, instances=o.instances),
            across=True,
        ),
        Recipe(
            "chain_broadcast",
            spread,
            "down a chain, pipelined: least bytes",
            lambda m, g, o: chain_broadcast(m * g, pieces=o.pieces),
            piped,
        ),
        Recipe(
            "tree_broadcast",
            spread,
            "down a binary tree, pipelined",
            lambda m, g, o: tree_broadcast(m * g, pieces=o.pieces),
            piped,
        ),
        Recipe(
            "direct_all_to_next",
            following,
            "each rank to the next",
            lambda m, g, o: direct_all_to_next(m * g, instances=o.instances),
            cut,
        ),
        Recipe(
            "spread_all_to_next",
            following,
            "between nodes through all NICs",
            lambda m, g, o: spread_all_to_next(m, g, instances=o.instances),
            cut,
            across=True,
        ),
        Recipe(
            "one_shot_all_reduce",
            reduce,
            "every rank reads and adds up everything: one step",
            lambda m, g, o: one_shot_all_reduce(m * g, instances=o.instances),
            cut,
            one_sided=True,
        ),
        Recipe(
            "read_all_reduce",
            reduce,
            "a part read from all, added in one pass, written to all",
            lambda m, g, o: read_all_reduce(m * g, instances=o.instances),
            cut,
            one_sided=True,
        ),
        Recipe(
            "read_reduce_scatter",
            scatter,
            "a part read from all, added in one pass",
            lambda m, g, o: read_reduce_scatter(m * g, instances=o.instances),
            cut,
            one_sided=True,
        ),
        Recipe(
            "nvls_all_reduce",
            reduce,
            "summed and multicast by the switch, in two steps",
            lambda m, g, o: nvls_all_reduce(m * g, pieces=o.pieces, instances=o.instances),
            piped,
            one_sided=True,
        ),
        Recipe(
            "nvls_all_gather",
            gather,
            "multicast by the switch",
            lambda m, g, o: nvls_all_gather(m * g, instances=o.instances),
            one_sided=True,
        ),
        Recipe(
            "nvls_reduce_scatter",
            scatter,
            "summed by the switch",
            lambda m, g, o: nvls_reduce_scatter(m * g, instances=o.instances),
            one_sided=True,
        ),
    )


def recipe(name: str) -> Recipe:
    known = {item.name: item for item in recipes()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise CollectiveError(f"no algorithm {name!r} in the library", fix=f"{hint}there are {', '.join(known)}")
    return known[name]


def candidates(collective: CollectiveName, nodes: int) -> Iterator[Candidate]:
    """What is worth trying for a collective on so many nodes."""
    for item in recipes():
        if item.collective is collective and (nodes > 1 or not item.across) and not item.one_sided:
            for options in item.worth_trying:
                yield Candidate(item, options)
