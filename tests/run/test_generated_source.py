"""The emitted source: what docs/generated-source.md shows is what is generated; names are defined before they are used."""

from __future__ import annotations

import ast
from pathlib import Path

import source_of_the_page

from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.plan import lower, pipeline, propagate
from sennit.run import emit_lane

PAGE = Path(__file__).parents[2] / "docs" / "generated-source.md"


def test_the_page_shows_what_is_generated() -> None:
    assert f"```{{code-block}} python\n{source_of_the_page.source()}```" in PAGE.read_text(encoding="utf-8")


def unknown_names(source: str) -> list[str]:
    """Names that are read before they are bound, or after they are deleted."""
    function = ast.parse(source).body[-1]
    assert isinstance(function, ast.FunctionDef)
    live = {"rank", "inputs", "torch", "aten", "float"}
    unknown: list[str] = []
    for statement in function.body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        unknown += [node.id for node in names if not isinstance(node.ctx, ast.Store) and node.id not in live]
        live |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        live -= {node.id for node in names if isinstance(node.ctx, ast.Del)}
    return unknown


def test_names_are_bound_when_they_are_read(small_gpt) -> None:
    plan = pipeline(small_gpt.graph, Mesh.parse("pp=2,dp=2;mb=2"), layers=("blocks.0", "blocks.1"))
    program = lower(propagate(plan))
    for lane in program.lanes:
        assert unknown_names(emit_lane(program, lane)) == []


PUT_OFF = """
program "put off" {
  mesh m0 = dp=2
  lane both on 0-1 {
    param %w : f32[4,2] of %w on m0 "lambda"
    forward %s : f32[4,2]{sum:dp} of %s on m0 = sennit.partial(%w) for %w ""
    all_reduce %r : f32[4,2] of %s on m0 = %s over dp
    free %s
    forward %v : f32[2,4] of %v on m0 = aten.permute.default(%r, [1, 0]) for %v ""
    forward %u : f32[2,4] of %u on m0 = aten.permute.default(%r, [1, 0]) for %u ""
    free %r
    free %u
    forward %t : f32[4,2] of %t on m0 = aten.permute.default(%v, [1, 0]) for %t ""
    free %v
    forward %lambda : f32[4,2] of %lambda on m0 = aten.relu.default(%w) for %lambda ""
    result "a" %lambda
    result "b" %t
  }
}
"""


def test_views_of_what_is_under_way_are_put_off() -> None:
    program = Program.parse(PUT_OFF)
    source = emit_lane(program, program.lanes[0])
    assert unknown_names(source) == []
    lines = [line.split("  #")[0].strip() for line in source.splitlines()]
    assert lines.index("lambda_ = aten.relu.default(w)") < lines.index("r = r.wait()")  # it overlaps
    assert not any(line.startswith("u =") for line in lines)  # nobody reads it
    assert lines.index("del r") > lines.index("v = aten.permute.default(r, [1, 0])")
    assert lines.index("del v") > lines.index("t = aten.permute.default(v, [1, 0])")
