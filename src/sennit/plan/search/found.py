"""What a search found: the plan, where its step goes, the next best, and the certificate."""

from __future__ import annotations

from dataclasses import dataclass

from sennit.plan.search.choice import Choice, Kind
from sennit.plan.search.config import Breakdown, Config, Estimate

__all__ = ["Found", "Lowest"]


@dataclass(frozen=True, slots=True)
class Lowest:
    """Whose bound the least is: a config and a schedule that no plan better than the one found is ruled out for.

    `parts` is that bound with one part more counted each time (`relax.py`).
    """

    config: Config
    kind: Kind
    chunks: int
    parts: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        config = self.config
        schedule = "" if config.pp == 1 else f", {self.kind.value}" + (f" x{self.chunks}" if self.chunks > 1 else "")
        zero = f", ZeRO-{config.zero}" if config.zero else ""
        return f"{config.way}, pp={config.pp}, dp={config.replicas}{schedule}, micro-batches of {config.size}{zero}"


@dataclass(frozen=True, slots=True)
class Found:
    """`alternatives` are the best plans of other configs, best first; `configs` and `probes` say how much was looked
    at; `lowest` is None where the plan is its own bound.
    """

    choice: Choice
    estimate: Estimate
    alternatives: tuple[Choice, ...]
    configs: int
    estimated: int
    probes: int
    refusals: tuple[tuple[str, str], ...]
    lowest: Lowest | None = None

    @property
    def breakdown(self) -> Breakdown:
        return self.estimate.breakdown

    def why(self) -> str:
        """Where the step goes, in a sentence."""
        parts = self.breakdown
        step = self.choice.step
        named = (
            ("compute", parts.compute),
            ("computing again", parts.recompute),
            ("collectives inside units", parts.talk),
            ("bubble", parts.bubble),
            ("sum of gradients", parts.sync),
            ("optimizer", parts.optimizer),
        )
        return ", ".join(f"{name} {100 * seconds / step:.1f} %" for name, seconds in named if seconds > 0.0005 * step)

    def certificate(self) -> str:
        """The bound, whose it is, and what each part that it counts adds to it."""
        choice = self.choice
        said = f"no plan of the space is below {choice.bound:.4g} s: a gap of {100 * choice.gap:.2f} %"
        if self.lowest is None:
            return said
        lines = [f"{said}, of {self.lowest}"]
        lines += [f"  {seconds:.4g} s  {name}" for name, seconds in self.lowest.parts]
        return "\n".join(lines)
