"""What people look at: terminal tables, one-file HTML, pictures, a trace for Perfetto."""

from sennit.report.comparison import Breakdown, Comparison, MeasuredRun, PlanResult, SimulatedRun, Verdict
from sennit.report.file import write_text
from sennit.report.html import html_page, write_html
from sennit.report.svg import comparison_svg, timeline_svg
from sennit.report.table import ComparisonView, comparison_table, comparison_text, prediction_table
from sennit.report.trace import trace_events, write_trace

__all__ = [
    "Breakdown",
    "Comparison",
    "ComparisonView",
    "MeasuredRun",
    "PlanResult",
    "SimulatedRun",
    "Verdict",
    "comparison_svg",
    "comparison_table",
    "comparison_text",
    "html_page",
    "prediction_table",
    "timeline_svg",
    "trace_events",
    "write_html",
    "write_text",
    "write_trace",
]
