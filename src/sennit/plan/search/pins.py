"""Pins: decisions that a user takes, by module name, before the search takes the others.

    pins={"*.mlp*": {"keep": "none"}, "*": {"tp": 4, "schedule": "1f1b"}}

A key of the mapping is a glob of module paths (`|` separates alternatives); it must match a module of the model. `keep` and `co` hold for the units
that the glob matches. All other words hold for the whole plan, because all units share their devices: two pins that give one of them different
values contradict each other.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan.search.choice import Kind
from sennit.plan.search.shallow import Shallow
from sennit.plan.search.ways import Keep, Way

if TYPE_CHECKING:
    from sennit.plan.search.search import Space

__all__ = ["Pins"]

_WORDS = ("tp", "sp", "cp", "ep", "vocab", "keep", "co", "pp", "dp", "size", "zero", "schedule")


@dataclass(frozen=True, slots=True)
class Pins:
    """`given` is word -> value for the whole plan; `units` is item -> what its units may keep and their pieces."""

    given: Mapping[str, object]
    units: Mapping[int, tuple[tuple[Keep, ...], tuple[int, ...]]]

    @classmethod
    def read(cls, pins: Mapping[str, Mapping[str, object]], graph: Graph, model: Shallow) -> Pins:
        given: dict[str, object] = {}
        by: dict[str, str] = {}  # word -> the glob that gave it
        units: dict[int, tuple[tuple[Keep, ...], tuple[int, ...]]] = {}
        unit_by: dict[tuple[int, str], tuple[str, object]] = {}
        for glob, words in pins.items():
            items = _matched(glob, graph, model)
            for word, value in words.items():
                _check(glob, word, value)
                if word not in ("keep", "co"):
                    if given.setdefault(word, value) != value:
                        raise _contradiction(by[word], given[word], glob, value, word, "all units share their devices")
                    by.setdefault(word, glob)
                    continue
                for item in items:
                    first = unit_by.setdefault((item, word), (glob, value))
                    if first[1] != value:
                        name = model.items[item].name
                        raise _contradiction(first[0], first[1], glob, value, word, f"both match {name!r}")
                    keeps, pieces = units.get(item, (tuple(Keep), ()))
                    keeps = (Keep(value),) if word == "keep" else keeps
                    pieces = (int(str(value)),) if word == "co" else pieces
                    units[item] = (keeps, pieces)
        return cls(given, units)

    def allows(self, **numbers: int) -> bool:
        return all(self.given.get(word, value) == value for word, value in numbers.items())

    def allows_way(self, way: Way) -> bool:
        have = {"tp": way.tp, "cp": way.cp, "ep": way.ep, "sp": way.sequence, "vocab": way.vocabulary}
        return all(self.given.get(word, value) == value for word, value in have.items())

    def limit(self, space: Space) -> Space:
        """The space with what pins name in it."""
        given = self.given
        if "tp" in given:
            space = replace(space, tps=(_number(given["tp"]),))
        if "cp" in given:
            space = replace(space, contexts=(_number(given["cp"]),))
        if "ep" in given:
            space = replace(space, experts=(_number(given["ep"]),))
        if "sp" in given:
            space = replace(space, sequence=(bool(given["sp"]),))
        if "size" in given:
            space = replace(space, sizes=(_number(given["size"]),))
        if "zero" in given:
            space = replace(space, zeros=(_number(given["zero"]),))
        if "schedule" in given:
            space = replace(space, kinds=(Kind(given["schedule"]),))
        more = {count for _, counts in self.units.values() for count in counts}
        pieces = tuple(sorted({*space.pieces, *more}))
        object.__setattr__(
            self,
            "units",
            {item: (keeps, counts or space.pieces) for item, (keeps, counts) in self.units.items()},
        )
        return replace(space, pieces=pieces)

    def __str__(self) -> str:
        return ", ".join(f"{word}={value}" for word, value in self.given.items()) or "none"


def _number(value: object) -> int:
    return int(str(value))


def _matched(glob: str, graph: Graph, model: Shallow) -> tuple[int, ...]:
    """The items of the modules that a glob matches."""
    modules = sorted({op.module for op in graph.ops if op.module})
    found = [module for module in modules if any(fnmatch.fnmatchcase(module, pattern) for pattern in glob.split("|"))]
    if not found:
        near = difflib.get_close_matches(glob.replace("*", ""), modules, n=3, cutoff=0.3) or modules[:3]
        raise PlanError(
            f"the pin {glob!r} matches no module", where=f"graph {graph.name!r}", fix=f"it has {', '.join(near)}, ..."
        )
    return tuple(
        number
        for number, item in enumerate(model.items)
        if any(module == unit or module.startswith(f"{unit}.") for unit in item.modules for module in found)
    )


def _check(glob: str, word: str, value: object) -> None:
    if word not in _WORDS:
        near = difflib.get_close_matches(word, _WORDS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PlanError(f"the pin {glob!r} names {word!r}", fix=f"{hint}use one of {', '.join(_WORDS)}")
    allowed: dict[str, tuple[object, ...]] = {
        "keep": tuple(keep.value for keep in Keep),
        "schedule": tuple(kind.value for kind in Kind),
        "sp": (True, False),
        "vocab": (True, False),
        "zero": (0, 1, 2, 3),
    }
    if word in allowed and value not in allowed[word]:
        raise PlanError(
            f"the pin {glob!r} gives {word} = {value!r}", fix=f"use one of {', '.join(map(str, allowed[word]))}"
        )
    if word not in allowed and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise PlanError(f"the pin {glob!r} gives {word} = {value!r}", fix="use a whole number of at least 1")


def _contradiction(one: str, value: object, other: str, another: object, word: str, why: str) -> PlanError:
    return PlanError(
        f"the pins {one!r} ({word} = {value}) and {other!r} ({word} = {another}) contradict each other: {why}",
        fix=f"give {word} once",
    )
