"""Pins: decisions that a user takes, by module name, before the search takes the others.

    pins={"*.mlp*": {"keep": "none"}, "decoder.block.0*": {"cut": True}, "*": {"tp": 4, "schedule": "1f1b"}}

A key of the mapping is a glob of module paths (`|` separates alternatives); it must match a module of the model.

| word | holds for | says |
|---|---|---|
| `keep`, `co` | the units that the glob matches | what is kept for backward; in how many pieces they run |
| `stage` | the units that the glob matches | the stage that they are in, counted from 0 in the order of the data |
| `cut` | the first unit that the glob matches | a stage begins there |
| all others | the whole plan, because all units share their devices | |

What lies outside of units (an embedding, the head) has a stage too, under the names of its modules. In an interlaced
plan stages are the runs of layers. Pins that cannot all hold contradict each other: the error names both.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan.search.choice import Kind
from sennit.plan.search.config import Fixed, units_of
from sennit.plan.search.shallow import Shallow
from sennit.plan.search.ways import Keep, Way

if TYPE_CHECKING:
    from sennit.plan.search.space import Space

__all__ = ["Pins"]

_WHOLE = ("tp", "sp", "cp", "ep", "vocab", "pp", "dp", "size", "zero", "schedule")
_WORDS = (*_WHOLE, "keep", "co", "stage", "cut")


@dataclass(frozen=True, slots=True)
class Pins:
    """`given` is word -> value for the whole plan; `units` is item -> what its units may keep and their pieces; `fixed`
    is what is known of the stages, and `fixed_by` says which pin each of its units is from, for errors.
    """

    given: Mapping[str, object]
    units: Mapping[int, tuple[tuple[Keep, ...], tuple[int, ...]]]
    fixed: Fixed = field(default_factory=Fixed)
    fixed_by: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def read(cls, pins: Mapping[str, Mapping[str, object]], graph: Graph, model: Shallow) -> Pins:
        reader = _Reader(graph, model)
        for glob, words in pins.items():
            matched = reader.matched(glob)
            for word, value in words.items():
                _check(glob, word, value)
                if word in _WHOLE:
                    reader.whole(glob, word, value)
                elif word in ("keep", "co"):
                    reader.unit(glob, word, value, matched)
                else:
                    reader.stage(glob, word, value, matched)
        return reader.pins()

    def cannot_be_cut(self, stages: list[int]) -> PlanError:
        """No plan that the other pins and the devices allow has stages as these pins say."""
        named = ", ".join(dict.fromkeys(self.fixed_by.values()))
        return PlanError(
            f"no cut into {' or '.join(map(str, stages))} stages keeps the pins {named}",
            where=f"pins {self}" if self.given else "",
            fix="pin fewer stages, or a larger pp",
        )

    def allows(self, **numbers: int) -> bool:
        if numbers.get("pp") == 1 and "schedule" in self.given:
            return False  # one stage has no schedule
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
            kind = Kind(given["schedule"])
            found = kind is Kind.INTERLACED
            space = replace(space, kinds=() if found else (kind,), interlaced=found)
        more = {count for _, counts in self.units.values() for count in counts}
        pieces = tuple(sorted({*space.pieces, *more}))
        object.__setattr__(
            self,
            "units",
            {item: (keeps, counts or space.pieces) for item, (keeps, counts) in self.units.items()},
        )
        named = {keep for keeps, _ in self.units.values() if len(keeps) == 1 for keep in keeps}
        named |= {Keep.NONE} if max(more, default=1) > 1 else set()  # pieces are computed again
        keeps = tuple(keep for keep in Keep if keep in named or keep in space.keeps)
        return replace(space, pieces=pieces, keeps=keeps)

    def __str__(self) -> str:
        return ", ".join(f"{word}={value}" for word, value in self.given.items()) or "none"


def _number(value: object) -> int:
    return int(str(value))


class _Reader:
    """Takes pins one by one, and refuses those that contradict earlier ones."""

    def __init__(self, graph: Graph, model: Shallow) -> None:
        self.graph, self.model, self.places = graph, model, units_of(model)
        self.modules = sorted({op.module for op in graph.ops if op.module})
        self.given: dict[str, object] = {}
        self.by: dict[str, str] = {}  # word -> the glob that gave it
        self.units: dict[int, tuple[tuple[Keep, ...], tuple[int, ...]]] = {}
        self.unit_by: dict[tuple[int, str], tuple[str, object]] = {}
        self.stages: dict[int, int] = {}  # by position
        self.begins: dict[int, str] = {}  # position -> glob
        self.stage_by: dict[int, str] = {}

    def matched(self, glob: str) -> tuple[int, ...]:
        """The positions of the units that have modules which a glob matches; of what lies outside of units, where it
        matches one there.
        """
        patterns = glob.split("|")
        found = [name for name in self.modules if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        if not found:
            near = difflib.get_close_matches(glob.replace("*", ""), self.modules, n=3, cutoff=0.3) or self.modules[:3]
            raise PlanError(
                f"the pin {glob!r} matches no module",
                where=f"graph {self.graph.name!r}",
                fix=f"it has {', '.join(near)}, ...",
            )
        inside = {prefix for name in found for prefix in _prefixes(name)}
        outside = {self.model.item_of[op.name] for op in self.model.graph.ops if op.module in found}
        return tuple(
            position
            for position, unit in enumerate(self.places)
            if (unit.module in inside if unit.module is not None else unit.item in outside)
        )

    def whole(self, glob: str, word: str, value: object) -> None:
        if self.given.setdefault(word, value) != value:
            raise _contradiction(
                self.by[word], self.given[word], glob, value, word, "all units share their devices", f"give {word} once"
            )
        self.by.setdefault(word, glob)

    def unit(self, glob: str, word: str, value: object, matched: tuple[int, ...]) -> None:
        for item in dict.fromkeys(self.places[position].item for position in matched):
            if not self.model.items[item].modules:
                continue
            first = self.unit_by.setdefault((item, word), (glob, value))
            if first[1] != value:
                name = self.model.items[item].name
                raise _contradiction(*first, glob, value, word, f"both match {name!r}", f"give {word} once")
            keeps, pieces = self.units.get(item, (tuple(Keep), ()))
            keeps = (Keep(value),) if word == "keep" else keeps
            pieces = (int(str(value)),) if word == "co" else pieces
            self.units[item] = (keeps, pieces)

    def stage(self, glob: str, word: str, value: object, matched: tuple[int, ...]) -> None:
        if not matched:
            raise PlanError(
                f"the pin {glob!r} gives {word}, and matches no unit",
                fix=f"units are {self.name(0)}, {self.name(1)}, ...",
            )
        if word == "cut":
            if value:
                self.begins.setdefault(matched[0], glob)
            return
        for position in matched:
            stage = self.stages.setdefault(position, int(str(value)))
            by = self.stage_by.setdefault(position, glob)
            if stage != value:
                raise _contradiction(
                    by, stage, glob, value, "stage", f"both match {self.name(position)!r}", "give its stage once"
                )

    def name(self, position: int) -> str:
        unit = self.places[min(position, len(self.places) - 1)]
        return unit.module or self.model.items[unit.item].name

    def pins(self) -> Pins:
        if self.given.get("pp") == 1 and "schedule" in self.given:
            raise PlanError(
                f"the pins {self.by['pp']!r} (pp = 1) and {self.by['schedule']!r} (schedule = {self.given['schedule']}) "
                "contradict each other: one stage has no schedule",
                fix="pin a larger pp, or no schedule",
            )
        self._check_order()
        named = {position: f"{glob!r} (stage = {self.stages[position]})" for position, glob in self.stage_by.items()}
        named |= {position: f"{glob!r} (cut)" for position, glob in self.begins.items() if position not in named}
        return Pins(
            self.given, self.units, Fixed(tuple(sorted(self.stages.items())), tuple(sorted(self.begins))), named
        )

    def _check_order(self) -> None:
        """Stages follow the data: a unit behind another is in its stage or a later one, with units enough between them,
        and a cut lies between stages.
        """
        pinned = sorted(self.stages.items())
        for (one, stage), (other, later) in pairwise(pinned):
            cut = next((place for place in sorted(self.begins) if one < place <= other), None)
            why, fix = "", "give stages that rise with the data"
            if later < stage:
                why = f"{self.name(one)!r} comes before {self.name(other)!r}"
            elif later - stage > other - one:
                why = f"there are {other - one - 1} units between {self.name(one)!r} and {self.name(other)!r}"
                fix = "no stage is empty: give stages that are nearer to each other"
            elif later == stage and cut is not None:
                raise PlanError(
                    f"the pins {self.stage_by[one]!r} (stage = {stage}) and {self.begins[cut]!r} (cut at {self.name(cut)!r}) contradict each "
                    f"other: {self.name(one)!r} and {self.name(other)!r} are in one stage",
                    fix="cut elsewhere, or give them two stages",
                )
            if why:
                raise _contradiction(self.stage_by[one], stage, self.stage_by[other], later, "stage", why, fix)
        if pinned and pinned[0][1] > pinned[0][0]:
            position, stage = pinned[0]
            raise PlanError(
                f"the pin {self.stage_by[position]!r} gives stage = {stage} to {self.name(position)!r}, which has {position} units before it",
                fix=f"no stage is empty: give it at most stage {position}",
            )


def _prefixes(path: str) -> Iterator[str]:
    """`h.3.mlp`, `h.3`, `h` of `h.3.mlp`."""
    while path:
        yield path
        path = path.rpartition(".")[0]


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
        "cut": (True, False),
    }
    if word in allowed and value not in allowed[word]:
        raise PlanError(
            f"the pin {glob!r} gives {word} = {value!r}", fix=f"use one of {', '.join(map(str, allowed[word]))}"
        )
    least = 0 if word == "stage" else 1
    if word not in allowed and (not isinstance(value, int) or isinstance(value, bool) or value < least):
        raise PlanError(f"the pin {glob!r} gives {word} = {value!r}", fix=f"use a whole number of at least {least}")


def _contradiction(one: str, value: object, other: str, another: object, word: str, why: str, fix: str) -> PlanError:
    return PlanError(
        f"the pins {one!r} ({word} = {value}) and {other!r} ({word} = {another}) contradict each other: {why}", fix=fix
    )
