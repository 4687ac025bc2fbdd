from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from sennit.report import Comparison, ComparisonView, comparison_text

AT_80 = """\
                     simulated simulated simulated  measured
           simulated   exposed      peak  bytes on   step on  measured measured
plan            step     comm.    memory  the wire CPU ranks max diff. verdict
────────────────────────────────────────────────────────────────────────────────
★ data       2.24 ms    320 us   984 MiB  1.00 GiB   62.0 ms   2.4e-07 equal
  parallel                                                             within
                                                                       rounding
  tensor     2.50 ms   1.92 ms   984 MiB  3.00 GiB    148 ms   9.5e-07 equal
  parallel                                                             within
                                                                       rounding
  pipeline   2.94 ms    214 us   984 MiB   320 MiB   98.0 ms         0 equal,
  1F1B                                                                 bitwise
"""


@pytest.mark.parametrize("width", [80, 92, 100, 112, 120, 160, 200])
def test_every_width_shows_every_number_whole(comparison: Comparison, width: int) -> None:
    text = comparison_text(comparison, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    for number in (
        "2.24 ms",
        "320 us",
        "984 MiB",
        "1.00 GiB",
        "62.0 ms",
        "2.4e-07",
        "-9.7%",
        "-58%",
        "-25%",
        "81.0 ms",
    ):
        assert number in text
    for word in ("parallel", "pipeline", "1F1B", "simulated", "measured", "CPU ranks", "within", "rounding", "bitwise"):
        assert word in text
    # one mark in the table and one before the sentence
    assert text.count("★") == 2
    assert next(line for line in text.splitlines() if "★" in line).startswith("★ data")
    assert "…" not in text


def test_the_narrowest_terminal(comparison: Comparison) -> None:
    assert AT_80 in comparison_text(comparison, width=80)


def test_a_plan_takes_one_line_where_there_is_room(comparison: Comparison) -> None:
    text = comparison_text(comparison, width=120)
    rows = [" ".join(line.split()) for line in text.splitlines() if "equal" in line]
    assert rows == [
        "★ data parallel 2.24 ms 320 us 984 MiB 1.00 GiB 62.0 ms 2.4e-07 equal within rounding",
        "tensor parallel 2.50 ms 1.92 ms 984 MiB 3.00 GiB 148 ms 9.5e-07 equal within rounding",
        "pipeline 1F1B 2.94 ms 214 us 984 MiB 320 MiB 98.0 ms 0 equal, bitwise",
    ]
    assert "communication" in text.split("equal", maxsplit=1)[0]


def test_a_pipe_gets_no_colour_and_a_terminal_does(comparison: Comparison) -> None:
    piped, shown = io.StringIO(), io.StringIO()
    Console(file=piped, width=100).print(ComparisonView(comparison))
    Console(file=shown, width=100, force_terminal=True, color_system="standard").print(ComparisonView(comparison))
    assert "\x1b" not in piped.getvalue()
    assert "\x1b[1" in shown.getvalue()


def test_plain_letters_where_nothing_else_can_be_written(comparison: Comparison) -> None:
    written = io.BytesIO()
    file = io.TextIOWrapper(written, encoding="ascii")
    Console(file=file, width=120).print(ComparisonView(comparison))
    file.flush()
    assert b"\n* data parallel " in written.getvalue()


def test_a_wrong_run_and_one_that_was_not_made(comparison: Comparison) -> None:
    first, second, third = comparison.results
    assert first.measured is not None
    wrong = replace(first, measured=replace(first.measured, max_difference=0.25))
    text = comparison_text(replace(comparison, results=(wrong, replace(second, measured=None), third)), width=140)
    assert "DIFFERENT in layers.0.weight" in text
    assert "not run" in text
    assert "BUT its measured run does not equal" in text.replace("\n", " ")
