"""The variants of a fusion study as a terminal table, the best row marked."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from sennit.fuse.compare import Study
from sennit.report import units

__all__ = ["fusion_table"]


def fusion_table(found: Study, *, mark: str = "★") -> Table:
    best = found.best
    table = Table("variant", "step", "over the best", "waits", "kernels", "buckets", title="simulated")
    for column in table.columns[1:]:
        column.justify = "right"
    for item in found.variants:
        is_best = item is best
        cells = (
            f"{item.name} {mark}" if is_best else item.name,
            units.seconds(item.seconds) + ("" if item.settled else " (unsettled)"),
            f"{item.seconds / best.seconds:.2f}",
            units.seconds(item.exposed),
            str(item.kernels),
            str(len(item.strategy.buckets)),
        )
        table.add_row(*(Text(cell, style="bold" if is_best else "") for cell in cells))
    return table
