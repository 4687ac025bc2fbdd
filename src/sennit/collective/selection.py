"""Which algorithm for which size: a table for a cluster, filled by ranking, saved as TOML, and explained.

    cluster, basis
    [[row]]   collective, from_bytes, to_bytes, algorithm, options, seconds, why

A row serves arrays of `from_bytes` and more, below `to_bytes` (without it: any larger). The rows of a collective follow
one another without a gap, from 0 upwards. `seconds` is what the algorithm takes at the row's first size that was tried;
`why` says it in words, with the next best. `basis` says how costs were come by, so that nobody takes a simulated table
for a measured one.

`fill` ranks with any cost function: the closed form of `alpha_beta.py`, the simulator, or measurements.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from sennit.collective.alpha_beta import AlgorithmCost
from sennit.collective.library import Candidate, Options, candidates, recipe
from sennit.errors import CollectiveError
from sennit.ir.collective import Algorithm, CollectiveName

__all__ = ["Row", "SelectionTable", "fill"]


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    collective: CollectiveName
    from_bytes: int
    algorithm: str
    seconds: float
    why: str
    to_bytes: int | None = None
    options: Options = Options()

    def serves(self, collective: CollectiveName, size: int) -> bool:
        above = self.to_bytes is not None and size >= self.to_bytes
        return self.collective is collective and self.from_bytes <= size and not above


class SelectionTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`str(table)` is its TOML; `SelectionTable.parse` reads it back."""

    cluster: str
    nodes: int
    per_node: int
    basis: str
    row: tuple[Row, ...]

    def __post_init__(self) -> None:
        where = f"the selection table for {self.cluster!r}"
        if self.nodes < 1 or self.per_node < 1:
            raise CollectiveError(f"{self.nodes} nodes of {self.per_node} ranks", where=where, fix="use 1 or more")
        for row in self.row:
            if recipe(row.algorithm).collective is not row.collective:
                raise CollectiveError(
                    f"{row.algorithm} is no {row.collective.value}", where=where, fix="name an algorithm for it"
                )
        for name in dict.fromkeys(row.collective for row in self.row):
            _check_rows([row for row in self.row if row.collective is name], f"{where}, {name.value}")

    def choose(self, collective: CollectiveName, size: int) -> Row:
        """The row for an array of `size` bytes."""
        for row in self.row:
            if row.serves(collective, size):
                return row
        have = ", ".join(dict.fromkeys(row.collective.value for row in self.row)) or "nothing"
        raise CollectiveError(
            f"no row for {collective.value} of {size} bytes",
            where=f"the selection table for {self.cluster!r}",
            fix=f"it has rows for {have}; fill it for {collective.value} too",
        )

    def build(self, collective: CollectiveName, size: int) -> Algorithm:
        row = self.choose(collective, size)
        return recipe(row.algorithm).build(self.nodes, self.per_node, row.options)

    def why(self, collective: CollectiveName, size: int) -> str:
        row = self.choose(collective, size)
        upto = f"below {_bytes(row.to_bytes)}" if row.to_bytes is not None else "and more"
        span = f"{collective.value} of {_bytes(row.from_bytes)} {upto}"
        about = recipe(row.algorithm).summary
        return f"{span} on {self.cluster}: {row.algorithm}{row.options} ({about}). {row.why}. Costs are {self.basis}."

    def __str__(self) -> str:
        head = [f"{name} = {_value(getattr(self, name))}" for name in ("cluster", "nodes", "per_node", "basis")]
        return "\n".join([*head, *(_print_row(row) for row in self.row)]) + "\n"

    @classmethod
    def parse(cls, text: str, where: str = "a selection table") -> SelectionTable:
        try:
            return msgspec.toml.decode(text, type=cls)
        except CollectiveError as error:
            raise CollectiveError(error.what, where=f"{where}, {error.where}", fix=error.fix) from None
        except (msgspec.MsgspecError, tomllib.TOMLDecodeError) as error:
            raise CollectiveError(
                f"the text is no selection table: {error}", where=where, fix="fill a table and save str(table)"
            ) from None


def _check_rows(rows: Sequence[Row], where: str) -> None:
    fault = None
    if rows[0].from_bytes != 0:
        fault = f"the first row begins at {rows[0].from_bytes} bytes"
    if rows[-1].to_bytes is not None:
        fault = f"the last row ends at {rows[-1].to_bytes} bytes"
    for before, after in pairwise(rows):
        if before.to_bytes != after.from_bytes:
            fault = f"a row ends at {before.to_bytes} bytes and the next begins at {after.from_bytes}"
    if fault is not None or any(row.to_bytes is not None and row.to_bytes <= row.from_bytes for row in rows):
        raise CollectiveError(
            fault or "a row is empty", where=where, fix="let rows follow one another, from 0 to no end"
        )


# ---- filling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Ranked:
    size: int
    order: tuple[tuple[float, Candidate], ...]  # the fastest first


def fill(
    cluster: str,
    nodes: int,
    per_node: int,
    cost: AlgorithmCost,
    basis: str,
    *,
    collectives: Iterable[CollectiveName],
    sizes: Sequence[int],
) -> SelectionTable:
    """Rank the library's candidates at each size, and join neighbouring sizes with the same winner."""
    if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
        raise CollectiveError(f"sizes {list(sizes)}", fix="give sizes in bytes, each larger than the one before")
    rows: list[Row] = []
    for collective in collectives:
        tried = list(candidates(collective, nodes))
        if not tried:
            known = ", ".join(name.value for name in CollectiveName if any(candidates(name, nodes)))
            raise CollectiveError(f"the library has no {collective.value}", fix=f"it has {known}")
        built = [(candidate, candidate.recipe.build(nodes, per_node, candidate.options)) for candidate in tried]
        ranked = [
            _Ranked(size, tuple(sorted(((cost(a, size), c) for c, a in built), key=lambda item: item[0])))
            for size in sizes
        ]
        rows += _rows(collective, ranked)
    return SelectionTable(cluster, nodes, per_node, basis, tuple(rows))


def _rows(collective: CollectiveName, ranked: Sequence[_Ranked]) -> list[Row]:
    firsts = [0] + [i for i in range(1, len(ranked)) if ranked[i].order[0][1] != ranked[i - 1].order[0][1]]
    rows: list[Row] = []
    for first, after in zip(firsts, [*firsts[1:], None], strict=True):
        seconds, winner = ranked[first].order[0]
        rows.append(
            Row(
                collective,
                ranked[first].size if first else 0,
                winner.recipe.name,
                seconds,
                _reason(ranked[first:after]),
                ranked[after].size if after is not None else None,
                winner.options,
            )
        )
    return rows


def _reason(ranked: Sequence[_Ranked]) -> str:
    """At the first and the last size of a row: what it takes, and the next best of another algorithm."""
    parts: list[str] = []
    for item in dict.fromkeys((ranked[0], ranked[-1])):
        seconds, winner = item.order[0]
        others = [(took, other) for took, other in item.order if other.recipe.name != winner.recipe.name]
        text = f"{_seconds(seconds)} at {_bytes(item.size)}"
        if others:
            took, other = others[0]
            text += f", next {other} {_seconds(took)}"
        parts.append(text)
    return "; ".join(parts)


# ---- words -----------------------------------------------------------------------------------------------------------


def _bytes(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _value(value: object) -> str:
    return msgspec.json.encode(value).decode()  # a JSON number or string is one of TOML too


def _print_row(row: Row) -> str:
    lines = ["", "[[row]]"]
    for name in ("collective", "from_bytes", "to_bytes", "algorithm", "options", "seconds", "why"):
        value = getattr(row, name)
        if isinstance(value, Options):
            fields = [f"{field} = {getattr(value, field)}" for field in value.__struct_fields__]
            lines.append(f"{name} = {{ {', '.join(fields)} }}")
        elif value is not None:
            lines.append(f"{name} = {_value(value)}")
    return "\n".join(lines)
