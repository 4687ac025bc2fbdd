"""`sennit collective compile --one-sided`, and `verify` and `export` of such a file: one-sided programs
(`ir/one_sided.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sennit.errors import CollectiveError

if TYPE_CHECKING:
    from sennit.ir.collective import Algorithm
    from sennit.ir.one_sided import OneSided

__all__ = ["OneSidedSummary", "compile_summary", "exported", "is_one_sided", "verify_summary"]


@dataclass(frozen=True, slots=True)
class OneSidedSummary:
    """What was proved, in numbers. `text` is the program, or None where it went to the file `out`."""

    schema: str
    name: str
    collective: str
    ranks: int
    blocks: int
    steps: int
    signals: int
    output_chunks: int
    out: str | None = None
    text: str | None = None

    def __str__(self) -> str:
        return (
            f"one-sided program {self.name!r} is right: {self.output_chunks} output chunks on {self.ranks} ranks hold what is "
            f"asked; {self.steps} steps in {self.blocks} blocks with {self.signals} signals cannot deadlock or race"
        )


def is_one_sided(text: str) -> bool:
    return text.lstrip().startswith("one_sided")


def compile_summary(algorithm: Algorithm, out: str | None) -> tuple[OneSidedSummary, str]:
    """The summary, and the program's text."""
    from sennit.collective.compile_one_sided import compile_one_sided

    program = compile_one_sided(algorithm)
    text = f"{program}\n"
    return _proved(program, "sennit.collective.compile_one_sided/1", out, None if out is not None else text), text


def verify_summary(text: str) -> OneSidedSummary:
    from sennit.ir.one_sided import OneSided

    return _proved(OneSided.parse(text), "sennit.collective.verify_one_sided/1", None, None)


def exported(text: str, form: str, min_bytes: int, max_bytes: int) -> tuple[str, str]:
    """The name of a program that is proved first, and its export."""
    from sennit.collective.export_json import PlanOptions
    from sennit.collective.export_one_sided_json import one_sided_mscclpp_json
    from sennit.collective.verify_one_sided import verify_one_sided
    from sennit.ir.one_sided import OneSided

    program = OneSided.parse(text)
    verify_one_sided(program)
    if form != "mscclpp-json":
        raise CollectiveError(
            f"{form} has no one-sided operations",
            where=f"one-sided program {program.name!r}",
            fix="use --to mscclpp-json, or compile without --one-sided",
        )
    return program.name, one_sided_mscclpp_json(program, PlanOptions(min_bytes=min_bytes, max_bytes=max_bytes))


def _proved(program: OneSided, schema: str, out: str | None, text: str | None) -> OneSidedSummary:
    from sennit.collective.verify_one_sided import verify_one_sided

    proof = verify_one_sided(program)
    return OneSidedSummary(
        schema=schema,
        name=program.name,
        collective=str(program.collective),
        ranks=len(program.ranks),
        blocks=sum(len(ranked.blocks) for ranked in program.ranks),
        steps=proof.steps,
        signals=proof.signals,
        output_chunks=proof.output_chunks,
        out=out,
        text=text,
    )
