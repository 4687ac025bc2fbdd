"""The costs that a search works with: each way of splitting, for each size of micro-batch, probed once when it is first
needed.

`CostBook.fast` gives the items' costs where everything is kept; `CostBook.options` those of every option that an item
has (what it keeps, in how many pieces it runs), as far as pins allow. A way that the model cannot take (a dim that does
not divide, no pair of products to split) gives None, and `refusals` says why.

`Probes` are those costs alone: they depend on the model, the cluster and the optimizer and on no space, so searches of
several spaces (ours, and each baseline's) share one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sennit.errors import SennitError
from sennit.plan.search.probe import ItemCost, Wires, probe
from sennit.plan.search.shallow import Shallow
from sennit.plan.search.ways import Keep, Way, plan_of
from sennit.sim.optimizer import Optimizer

__all__ = ["CostBook", "Probes", "Variant"]


@dataclass(frozen=True, slots=True)
class Variant:
    """One option of an item."""

    keep: Keep
    pieces: int
    cost: ItemCost


class Probes:
    """The costs of each way and size of micro-batch, found when first asked for.

    `fused_attention` takes what a model calls `scaled_dot_product_attention` as one kernel (`kernels/attention.py`).
    """

    def __init__(
        self, model: Shallow, wires: Wires, optimizer: Optimizer, batch: int, *, fused_attention: bool = True
    ) -> None:
        self.model, self.wires, self.optimizer, self.batch = model, wires, optimizer, batch
        self.fused_attention = fused_attention
        self.found: dict[tuple[Way, int], tuple[ItemCost, ...] | None] = {}
        self.refusals: dict[Way, str] = {}

    def of(self, way: Way, size: int) -> tuple[ItemCost, ...] | None:
        """None where the model cannot take the way."""
        key = (way, size)
        if key not in self.found:
            try:
                costs = probe(
                    self.model,
                    plan_of(way, self.model),
                    way.mesh(self.batch // size),
                    self.wires,
                    self.optimizer,
                    {"co": way.pieces} if way.pieces > 1 else None,
                    fused_attention=self.fused_attention,
                )
            except SennitError as error:
                self.refusals[way] = error.what
                costs = None
            self.found[key] = costs
        return self.found[key]


class CostBook:
    def __init__(
        self,
        model: Shallow,
        wires: Wires,
        optimizer: Optimizer,
        batch: int,
        *,
        keeps: tuple[Keep, ...] = tuple(Keep),
        pieces: tuple[int, ...] = (1,),
        pinned: Mapping[int, tuple[tuple[Keep, ...], tuple[int, ...]]] | None = None,
        probes: Probes | None = None,
    ) -> None:
        """`pinned` limits what the items of these numbers may keep, and their pieces."""
        self.model, self.wires = model, wires
        self.probes = probes or Probes(model, wires, optimizer, batch)
        self.keeps, self.pieces, self.pinned = keeps, pieces, pinned or {}

    def probed(self, way: Way, size: int) -> tuple[ItemCost, ...] | None:
        return self.probes.of(way, size)

    def fast(self, way: Way, size: int) -> tuple[ItemCost, ...] | None:
        return self.probed(way, size)

    def options(self, way: Way, size: int) -> tuple[tuple[Variant, ...], ...] | None:
        """The options of each item; None where one has none. What lies outside of units keeps everything."""
        plain = self.probed(way, size)
        if plain is None:
            return None
        variants: list[list[Variant]] = [
            [] if item.modules else [Variant(Keep.ALL, 1, plain[number])]
            for number, item in enumerate(self.model.items)
        ]
        for pieces in self.pieces:
            for keep in self.keeps:
                if pieces > 1 and keep is not Keep.NONE:
                    continue  # pieces save memory only where each is computed again
                if not self._wanted(keep, pieces):
                    continue
                costs = self.probed(replace(way, keep=keep, pieces=pieces), size)
                for number, item in enumerate(self.model.items):
                    if costs is not None and item.modules and self._allowed(number, keep, pieces):
                        variants[number].append(Variant(keep, pieces, costs[number]))
        return tuple(map(tuple, variants)) if all(variants) else None

    def _wanted(self, keep: Keep, pieces: int) -> bool:
        """Whether some item may take this option: one that pins forbid everywhere need not be probed."""
        plain = keep is Keep.ALL and pieces == 1
        return any(
            self._allowed(number, keep, pieces) if item.modules else plain
            for number, item in enumerate(self.model.items)
        )

    def _allowed(self, item: int, keep: Keep, pieces: int) -> bool:
        if item not in self.pinned or not self.model.items[item].modules:
            return True
        keeps, counts = self.pinned[item]
        return keep in keeps and pieces in counts
