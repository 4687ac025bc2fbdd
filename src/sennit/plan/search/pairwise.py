"""Choices with prices, and prices between them: a linear program, branched on where its optimum is fractional.

A *node* chooses one of several options, each with a price. A *value* is made by one node and read by others; each
option of its maker gives it a state, each option of a reader wants a state, and going from one to the other has a
price, paid once however many readers want it. `plan/search/operators.py` has the mathematics, for operators and
layouts.

Edges whose prices are all zero are left out, and states are shared by options: what is left is small, and its
relaxation nearly always whole.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf, isinf

from sennit.errors import PlanError

__all__ = ["Choices", "Reader"]


@dataclass(frozen=True, slots=True)
class Reader:
    """A node, and the state that each of its options wants."""

    node: str
    wants: tuple[Hashable, ...]


class Choices:
    def __init__(self) -> None:
        self.prices: list[float] = []
        self.most: list[float] = []  # upper bounds
        self.nodes: dict[str, range] = {}  # the columns of a node's options
        self.rows: list[tuple[float, float, list[int], list[float]]] = []

    def node(self, name: str, prices: Sequence[float]) -> None:
        columns = [self._column(price) for price in prices]
        self.nodes[name] = range(columns[0], columns[-1] + 1)
        self.rows.append((1.0, 1.0, columns, [1.0] * len(columns)))

    def value(
        self,
        price: Callable[[Hashable, Hashable], float],
        maker: str,
        made: Sequence[Hashable],
        readers: Sequence[Reader],
    ) -> None:
        states = tuple(dict.fromkeys(made))
        paying: dict[tuple[Hashable, Hashable], list[int]] = {}
        for reader in readers:
            wants = tuple(dict.fromkeys(reader.wants))
            prices = {(a, b): price(a, b) for a in states for b in wants}
            if not any(prices.values()):
                continue
            pair = {key: self._column(0.0, 0.0 if isinf(cost) else 1.0) for key, cost in prices.items()}
            for state in states:
                self._equal([pair[state, b] for b in wants], self._options(maker, made, state))
            for want in wants:
                self._equal([pair[a, want] for a in states], self._options(reader.node, reader.wants, want))
            for key, cost in prices.items():
                if 0.0 < cost < inf:
                    paying.setdefault(key, []).append(pair[key])
        for key, columns in paying.items():
            if len(columns) == 1:
                self.prices[columns[0]] = price(*key)
                continue
            once = self._column(price(*key))
            for column in columns:
                self.rows.append((0.0, inf, [once, column], [1.0, -1.0]))

    def run(self, most_seconds: float = 60.0) -> tuple[float, dict[str, int]]:
        """The optimum of the relaxation, and the option that each node chooses."""
        import highspy

        scale = max(self.prices) or 1.0
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
        solver.setOptionValue("output_flag", False)
        solver.setOptionValue("mip_rel_gap", 1e-6)
        for price, most in zip(self.prices, self.most, strict=True):
            solver.addCol(price / scale, 0.0, most, 0, [], [])
        for least, most, index, factors in self.rows:
            solver.addRow(least, most, len(index), index, factors)
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise PlanError("no choice of options fits together", fix="give every node an option that any state serves")
        bound = float(solver.getInfo().objective_function_value) * scale
        columns = [column for own in self.nodes.values() for column in own]
        found = solver.getSolution().col_value
        if any(abs(found[column] - round(found[column])) > 1e-6 for column in columns):
            solver.setOptionValue("time_limit", most_seconds)
            for column in columns:
                solver.changeColIntegrality(column, highspy.HighsVarType.kInteger)
            solver.run()
            found = solver.getSolution().col_value
        return bound, {name: max(own, key=lambda c: found[c]) - own.start for name, own in self.nodes.items()}

    def _column(self, price: float, most: float = 1.0) -> int:
        self.prices.append(price)
        self.most.append(most)
        return len(self.prices) - 1

    def _options(self, node: str, states: Sequence[Hashable], state: Hashable) -> list[int]:
        return [column for column, own in zip(self.nodes[node], states, strict=True) if own == state]

    def _equal(self, left: list[int], right: list[int]) -> None:
        self.rows.append((0.0, 0.0, [*left, *right], [1.0] * len(left) + [-1.0] * len(right)))
