"""A fusion study as one HTML file: the table, the picture of the steps, and the strategy in its text form."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from sennit.fuse.compare import Study, Variant
from sennit.report import units
from sennit.report.fuse_svg import fusion_svg

__all__ = ["fusion_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 1040px; padding: 0 1rem; color: #1d2733; background: #fff }
table { border-collapse: collapse; margin: 1rem 0 } th, td { padding: .25rem .8rem; border-bottom: 1px solid #d8dee6; text-align: right }
th:first-child, td:first-child { text-align: left } tr.best { font-weight: 600; background: #eef4fb }
pre { background: #f4f6f9; padding: 1rem; overflow-x: auto; font-size: 13px } .picture { overflow-x: auto }
"""


def fusion_page(title: str, found: Study, shown: Sequence[Variant], costs: str) -> str:
    best, report = found.best, found.found
    rows = "".join(
        f'<tr class="{"best" if item is best else ""}"><td>{escape(item.name)}{" ★" if item is best else ""}</td>'
        f"<td>{units.seconds(item.seconds)}</td><td>{item.seconds / best.seconds:.2f}</td><td>{units.seconds(item.exposed)}</td>"
        f"<td>{item.kernels}</td><td>{len(item.strategy.buckets)}</td></tr>"
        for item in found.variants
    )
    return f"""<!DOCTYPE html>
<html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>
<h1>{escape(title)}</h1>
<p>One training step, simulated. Kernels: {escape(costs)}. No buckets make the best kernels faster than {units.seconds(report.structural)};
with full overlap they would take {units.seconds(report.full_overlap)}. The best step takes {best.seconds / report.structural:.3f} of the former.</p>
<table><tr><th>variant</th><th>step</th><th>over the best</th><th>waits</th><th>kernels</th><th>buckets</th></tr>{rows}</table>
<h2>Two steps in the steady state</h2>
<div class="picture">{fusion_svg(shown, report.structural)}</div>
<h2>The strategy</h2>
<pre>{escape(str(best.strategy))}</pre>
</html>
"""
