"""Collective algorithms, written in the language of `collective/language.py`."""

from sennit.collective.library.all_pairs import (
    all_pairs_all_gather,
    all_pairs_all_reduce,
    all_pairs_reduce_scatter,
    direct_all_to_all,
)
from sennit.collective.library.all_to_all import three_step_all_to_all, two_step_all_to_all
from sennit.collective.library.all_to_next import direct_all_to_next, spread_all_to_next
from sennit.collective.library.catalog import Candidate, Options, Recipe, candidates, recipe, recipes
from sennit.collective.library.hierarchical import (
    hierarchical_all_gather,
    hierarchical_all_reduce,
    level_all_reduce,
)
from sennit.collective.library.nvls import nvls_all_gather, nvls_all_reduce, nvls_reduce_scatter
from sennit.collective.library.reads import one_shot_all_reduce, read_all_reduce, read_reduce_scatter
from sennit.collective.library.recursive import (
    halving_doubling_all_reduce,
    recursive_doubling,
    recursive_halving,
)
from sennit.collective.library.rings import (
    node_ring,
    ring_all_gather,
    ring_all_reduce,
    ring_gather,
    ring_reduce,
    ring_reduce_scatter,
)
from sennit.collective.library.trees import (
    binary_tree,
    chain_broadcast,
    double_tree_all_reduce,
    tree_broadcast,
    tree_reduce,
    tree_spread,
)

__all__ = [
    "Candidate",
    "Options",
    "Recipe",
    "all_pairs_all_gather",
    "all_pairs_all_reduce",
    "all_pairs_reduce_scatter",
    "binary_tree",
    "candidates",
    "chain_broadcast",
    "direct_all_to_all",
    "direct_all_to_next",
    "double_tree_all_reduce",
    "halving_doubling_all_reduce",
    "hierarchical_all_gather",
    "hierarchical_all_reduce",
    "level_all_reduce",
    "node_ring",
    "nvls_all_gather",
    "nvls_all_reduce",
    "nvls_reduce_scatter",
    "one_shot_all_reduce",
    "read_all_reduce",
    "read_reduce_scatter",
    "recipe",
    "recipes",
    "recursive_doubling",
    "recursive_halving",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_gather",
    "ring_reduce",
    "ring_reduce_scatter",
    "spread_all_to_next",
    "three_step_all_to_all",
    "tree_broadcast",
    "tree_reduce",
    "tree_spread",
    "two_step_all_to_all",
]
