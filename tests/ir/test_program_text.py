"""Programs print and parse back, and faults in their text are found where they stand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from marked_text import without_mark
from program_texts import ACROSS_LANES, DATA_PARALLEL, PIPELINE, TENSOR_PARALLEL
from strategies import programs

from sennit.errors import ParseError
from sennit.ir.program import Compute, Program

PROGRAM = """program "p" {
  mesh m0 = dp=2;mb=2
  lane all on 0-1 {
    input %x : f32[8{dp}] of %t on m0 "x"
    forward %a : f32[8{dp,mb}] of %t on m0 at mb=0, %b : f32[]{sum:dp,mb} of %u on m0 at mb=0 = aten.pair.default(%x)
    all_gather %c : f32[8{mb}] of %t on m0 at mb=0 = %a over dp
    send %c to other
    free %a
    result "c" %c
  }
}
"""


@settings(derandomize=True, deadline=None, max_examples=150)
@given(programs())
def test_programs_print_and_parse_back(program: Program) -> None:
    parsed = Program.parse(str(program))
    assert parsed == program
    assert repr(parsed) == repr(program)


@pytest.mark.parametrize("text", [DATA_PARALLEL, TENSOR_PARALLEL, ACROSS_LANES, PIPELINE, PROGRAM])
def test_the_printed_form_is_stable(text: str) -> None:
    printed = str(Program.parse(text))
    assert str(Program.parse(printed)) == printed


def test_a_comma_after_times_separates_results() -> None:
    step = Program.parse(PROGRAM).lanes[0].steps[0]
    assert isinstance(step, Compute)
    assert [buffer.describe() for buffer in step.results] == [
        "%a : f32[8{dp,mb}] at mb=0",
        "%b : f32[]{sum:dp,mb} at mb=0",
    ]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("on 0-1 {", "on ^{", "an integer"),
        ('of %t on m0 "x"', 'of %t on m9 ^"x"', "unknown mesh 'm9'"),
        ('of %t on m0 "x"', 'of ^t on m0 "x"', "a %name"),
        ('[8{dp}] of %t on m0 "x"', '[8{dp}] ^junk of %t on m0 "x"', "'of' after a layout"),
        ("{sum:dp,mb}", "{mean^:dp,mb}", "unknown reduction 'mean'"),
        ("= %a over dp", "= %a ^by dp", "'over'"),
        ("%t on m0 at mb=0 = %a", "%t on m0 at mb= ^= %a", "an integer"),
        ("send %c to other", "sent ^%c to other", "unknown step 'sent'"),
        ("free %a\n    result", "free\n    ^result", "a %name"),
        ('"c" %c\n  }\n}\n', '"c" %c\n  }\n^', "'}'"),
    ],
)
def test_faults_are_found_where_they_stand(old: str, new: str, what: str) -> None:
    """`^` marks the place. A word that can be read but is not known is reported behind it."""
    assert PROGRAM.count(old) == 1
    text, line, column = without_mark(PROGRAM.replace(old, new))
    with pytest.raises(ParseError) as caught:
        Program.parse(text)
    assert what in caught.value.what
    assert caught.value.where is not None
    assert caught.value.where.startswith(f"line {line}, column {column}, at ")
