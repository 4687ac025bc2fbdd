"""Certificates: what is executed, what is remembered, and what a wrong rule's error says.

And the other sources of rules.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sennit.capture.rules import Letters, Listed, Row, rule_of
from sennit.capture.rules.certify import Certifier
from sennit.capture.rules.discover import discovered_rule, search
from sennit.capture.rules.letters import sums
from sennit.capture.rules.shape_check import ShapeCheck
from sennit.capture.rules.strategies import split_on
from sennit.capture.rules.trial import Way, largest_difference
from sennit.capture.rules_dtensor import dtensor_rule
from sennit.errors import PlanError
from sennit.ir.dtype import TensorType
from sennit.ir.graph import Graph, Op
from sennit.ir.layout import Reduction
from sennit.ir.mesh import Mesh
from sennit.ir.program import Compute
from sennit.plan import lower, propagate, tensor_parallel
from sennit.plan.verify import verify


def one(text: str) -> tuple[Op, dict[str, TensorType]]:
    graph = Graph.parse(f'graph "one" {{ {text} }}')
    return graph.ops[0], graph.types()


SOFTMAX = 'input %x : f64[6,8] "x" forward %y : f64[6,8] = aten._softmax.default(%x, 1, false) result "y" %y'
PRODUCT = (
    'input %x : f64[6,8] "x" input %w : f64[8,4] "w" forward %y : f64[6,4] = aten.mm.default(%x, %w) result "y" %y'
)


def test_a_program_is_certified_once(small_gpt, tmp_path: Path) -> None:
    plan = tensor_parallel(small_gpt.graph, Mesh.parse("dp=2,tp=2"), qkv="*.qkv", column="*.up", row="*.proj|*.down")
    program = lower(propagate(plan))
    cold, warm = Certifier(tmp_path), Certifier(tmp_path)
    verify(program, small_gpt.graph, certifier=cold)
    assert cold.tried > 50
    (file,) = (tmp_path / "rules").iterdir()
    assert file.name.startswith(f"torch-{torch.__version__}-")
    warm = Certifier(tmp_path)
    verify(program, small_gpt.graph, certifier=warm)
    assert warm.tried == 0
    file.write_bytes(b"\xff\x00 not a certificate\n" + file.read_bytes()[:100])  # damaged: tried again, and mended
    damaged = Certifier(tmp_path)
    verify(program, small_gpt.graph, certifier=damaged)
    assert damaged.tried >= cold.tried - 1
    assert Certifier(tmp_path).held == cold.held


def test_certificates_of_two_processes_are_joined(tmp_path: Path) -> None:
    first, second = Certifier(tmp_path), Certifier(tmp_path)
    for certifier, text, letter in ((first, PRODUCT, "k"), (second, PRODUCT, "m")):
        op, types = one(text)
        rule = rule_of(op, types)
        assert isinstance(rule, Letters)
        certifier.require(op, types, rule, split_on(rule, letter, 2), 2)
        certifier.save()
    assert len(Certifier(tmp_path).held) == 2


def test_a_wrong_rule_is_an_error_with_the_difference() -> None:
    op, types = one(SOFTMAX)
    wrong = Letters((("m", "n"),), (("m", "n"),))  # each row needs its whole
    with pytest.raises(PlanError) as caught:
        Certifier().require(op, types, wrong, split_on(wrong, "n", 4), 2)
    message = str(caught.value)
    assert "the rule of aten._softmax.default is wrong: split on 'n', its pieces differ from the whole by" in message
    assert "aten._softmax.default %y" in message


def test_a_bias_that_is_added_everywhere_is_found() -> None:
    op, types = one(
        'input %b : f64[4] "b" input %x : f64[6,8] "x" input %w : f64[8,4] "w" '
        'forward %y : f64[6,4] = aten.addmm.default(%b, %x, %w) result "y" %y'
    )
    rule = rule_of(op, types)
    assert isinstance(rule, Letters)
    assert largest_difference(op, types, rule, Way(letter="k"), 2) < 1e-12
    assert largest_difference(op, types, replace(rule, addends=()), Way(letter="k"), 2) > 0.1


def test_a_sum_that_is_forgotten_is_found() -> None:
    op, types = one(PRODUCT)
    rule = rule_of(op, types)
    assert isinstance(rule, Letters)
    wrong = replace(rule, summed=(("k", Reduction.MAX),))
    assert largest_difference(op, types, wrong, Way(letter="k"), 2) > 1e-3
    assert largest_difference(op, types, replace(rule, summed=sums("k")), Way(letter="k"), 2) < 1e-12


# ---- shapes ----------------------------------------------------------------------------------------------------------


def test_arguments_that_name_global_sizes_are_found() -> None:
    op, types = one(
        'input %g : f64[4,3] "g" forward %y : f64[4,8] = aten.slice_backward.default(%g, [4, 8], 1, 2, 5, 1) result "y" %y'
    )
    local = [TensorType((2, 3), types["g"].dtype)]
    step = Compute(op.kind, op.args, op.kwargs, (), op.phase, "", op.name)
    with pytest.raises(PlanError, match=r"makes pieces f64\[4,8\] from f64\[2,3\], where its layout has f64\[2,8\]"):
        ShapeCheck().check(step, local, [TensorType((2, 8), types["g"].dtype)], "here")


# ---- other sources ---------------------------------------------------------------------------------------------------


def test_dtensor_rules_without_a_process_group() -> None:
    op, types = one(PRODUCT)
    rule = dtensor_rule(op, types)
    assert isinstance(rule, Listed)
    rows = set(rule.rows)
    assert Row((1, 0), (Reduction.SUM,)) in rows
    assert Row((0, None), (0,)) in rows
    assert Row((None, 1), (1,)) in rows
    for number, row in enumerate(rule.rows):
        if any(isinstance(entry, int) for entry in row.reads):
            assert largest_difference(op, types, rule, Way(row=number), 2) < 1e-12


def test_averages_of_dtensor_are_no_rule() -> None:
    op, types = one('input %x : f64[6,8] "x" forward %y : f64[8] = aten.mean.dim(%x, [0]) result "y" %y')
    rule = dtensor_rule(op, types)
    assert rule is None or all(row.reads != (0,) for row in rule.rows)


def test_an_operator_that_only_dtensor_knows() -> None:
    text = 'input %x : f64[6,8] "x" forward %y : f64[6,8] = aten.hypot.default(%x, %x) result "y" %y'
    op, types = one(text.replace("hypot", "logaddexp"))
    rule = rule_of(op, types)
    if not isinstance(rule, Listed):
        pytest.skip("this release of torch has no DTensor rule for logaddexp")
    assert rule.source == "torch DTensor"
    certifier = Certifier()
    from sennit.capture.rules import decide

    certifier.require(op, types, rule, decide(op, types, 2, "r0"), 2)
    assert certifier.tried == 1


def test_discovery_finds_what_is_known() -> None:
    op, types = one(PRODUCT.replace("f64[6,8]", "f64[6,8]").replace("f64[6,4]", "f64[6,4]"))
    rows = set(search(op, types))
    assert rows == {Row((0, None), (0,)), Row((None, 1), (1,)), Row((1, 0), (Reduction.SUM,))}
    op, types = one(SOFTMAX)
    assert set(search(op, types)) == {Row((0,), (0,))}


def test_discovery_runs_in_a_process_of_its_own() -> None:
    op, types = one(
        'input %x : f64[4,6] "x" input %y : f64[4,6] "y" forward %z : f64[4] = aten.cosine_similarity.default(%x, %y, 1) result "z" %z'
    )
    rule = discovered_rule(op, types)
    assert isinstance(rule, Listed)
    assert rule.rows == (Row((0, 0), (0,)),)
