"""A redistribution in a terminal: its steps, its certificate, and with `explain` the candidates that lost and why.

`RedistributionView` is a rich renderable: `console.print(RedistributionView(redistribution))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from sennit.report import units
from sennit.reshard import Candidate, Certificate, Redistribution
from sennit.reshard.step_cost import stream_cost, streams

__all__ = ["RedistributionView", "why"]

MEANINGS = {
    Candidate.NOTHING: "every device has its piece already",
    Candidate.CONSTRUCTIVE: "slices, one flat step, gathers: no piece is larger than those of source and target",
    Candidate.SEARCH: "the same form, slices chosen so that devices keep the most of what they have",
    Candidate.DIRECT: "one exchange, every region straight from a device that has it",
    Candidate.STREAMED: "the exchange in parts, each within the budget",
}


@dataclass(frozen=True, slots=True)
class RedistributionView:
    redistribution: Redistribution
    itemsize: int
    timed_on: str
    explain: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        plan = self.redistribution
        meshes = f"on mesh {plan.source.mesh}"
        if plan.source.mesh != plan.target.mesh:
            meshes = f"from mesh {plan.source.mesh} to mesh {plan.target.mesh}"
        yield Text(f"{plan.source} to {plan.target} {meshes}", style="bold")
        yield ""
        yield self._steps()
        yield ""
        yield self._certificate()
        yield Text(f"Time is simulated, on {self.timed_on}. Elements are per device.", style="dim")
        if self.explain:
            yield ""
            yield Text(why(plan), style="bold")
            yield self._candidates()

    def _steps(self) -> Table:
        table = _table()
        table.add_column("step", no_wrap=True)
        table.add_column("over")
        table.add_column("result", overflow="fold")
        table.add_column("received", justify="right", no_wrap=True)
        table.add_column("messages", justify="right", no_wrap=True)
        table.add_column("largest\npiece", justify="right", no_wrap=True)
        table.add_row("source", "", str(self.redistribution.source.refined()), "", "", self._size(self._largest(-1)))
        together = streams(self.redistribution.steps)
        for position, parts in enumerate(together):
            step, cost = parts[0], stream_cost(parts)
            name = step.kind.value if len(parts) == 1 else f"{step.kind.value}, {len(parts)} parts"
            mesh = "" if step.source.mesh == step.result.mesh else f" on {step.result.mesh}"
            received = cost.received / len(step.result.mesh.devices)
            table.add_row(
                name,
                ",".join(step.axes),
                f"{step.result}{mesh}",
                self._size(received) if step.kind.communicates else "-",
                str(cost.messages) if step.kind.communicates else "-",
                self._size(self._largest(position)),
            )
        return table

    def _largest(self, position: int) -> int:
        if position < 0:
            return self.redistribution.source.local_elements()
        return streams(self.redistribution.steps)[position][0].result.local_elements()

    def _certificate(self) -> Table:
        found = self.redistribution.certificate
        table = _table()
        table.add_column("certificate", no_wrap=True)
        table.add_column("plan", justify="right", no_wrap=True)
        table.add_column("bound", justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
        for name, value, bound in (
            ("received", found.received, found.received_bound),
            ("largest piece", found.peak, found.peak_bound),
        ):
            table.add_row(name, self._size(value), self._size(bound), _ratio(value, bound))
        table.add_row("staging", self._size(found.staging), "", "")
        table.add_row("messages to a device", str(found.messages), "", "")
        table.add_row("time, simulated", units.seconds(found.seconds), "", "")
        return table

    def _candidates(self) -> Table:
        table = _table()
        table.add_column("candidate", no_wrap=True)
        for heading in ("time", "received", "over\nbound", "messages", "staging"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("is", overflow="fold")
        for found in (self.redistribution.certificate, *self.redistribution.alternatives):
            table.add_row(
                found.candidate.value,
                units.seconds(found.seconds),
                self._size(found.received),
                _ratio(found.received, found.received_bound),
                str(found.messages),
                self._size(found.staging),
                MEANINGS[found.candidate],
            )
        return table

    def _size(self, elements: float) -> str:
        return units.size(elements * self.itemsize)


def why(redistribution: Redistribution) -> str:
    """One sentence: why the chosen candidate won."""
    found, others = redistribution.certificate, redistribution.alternatives
    if found.candidate is Candidate.NOTHING:
        return "Nothing to do: every device has its piece already."
    if not others:
        return f"{found.candidate.value} is the only candidate that this mode, these sizes and this budget allow."
    next_best = others[0]
    if found.seconds == next_best.seconds:
        return f"{found.candidate.value} and {next_best.candidate.value} take the same time; ties go by a fixed order."
    reasons = _reasons(found, next_best)
    return f"{found.candidate.value} wins over {next_best.candidate.value} by time: {reasons}."


def _reasons(found: Certificate, other: Certificate) -> str:
    reasons: list[str] = []
    for name, mine, theirs in (
        ("elements received", found.received, other.received),
        ("messages", found.messages, other.messages),
        ("elements staged", found.staging, other.staging),
    ):
        if mine != theirs:
            reasons.append(f"{'fewer' if mine < theirs else 'more'} {name} ({mine:,.0f} against {theirs:,.0f})")
    return ", ".join(reasons) or "its messages take shorter ways"


def _ratio(value: float, bound: float) -> str:
    if bound == 0:
        return "1.000" if value == 0 else "-"
    return f"{value / bound:.3f}"


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
