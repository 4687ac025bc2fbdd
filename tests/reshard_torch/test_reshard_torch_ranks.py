"""Redistributions on real gloo processes: equal to the definition, gradients included, and never a hang."""

from __future__ import annotations

import pytest
import reshard_work as work
from reshard_problems import random_problem

from sennit.cluster.ranks_torch import GlooRanks
from sennit.ir.layout_numpy import assemble
from sennit.reshard.autograd_torch import gradient_layout
from sennit.reshard.groups_torch import Transport
from sennit.reshard.planner import Mode

ROUNDS = [
    ("even", Mode.COLLECTIVE, 8 << 20, Transport.AUTO),
    ("even", Mode.DIRECT, 4096, Transport.AUTO),
    ("strided", Mode.COLLECTIVE, 4096, Transport.AUTO),
    ("strided", Mode.DIRECT, 8 << 20, Transport.AUTO),
    ("uneven", Mode.AUTO, 512, Transport.AUTO),
    ("partial", Mode.COLLECTIVE, 4096, Transport.AUTO),
    ("partial", Mode.AUTO, 8 << 20, Transport.AUTO),
    ("cross", Mode.AUTO, 4096, Transport.AUTO),
    ("partial", Mode.COLLECTIVE, 8 << 20, Transport.GROUPS),
]


@pytest.mark.parametrize(("kind", "mode", "staging", "transport"), ROUNDS)
def test_random_problems_equal_the_definition(
    ranks: GlooRanks, kind: str, mode: Mode, staging: int, transport: Transport
) -> None:
    wrong = ranks.call(work.run_problems, ranks.count, kind, range(56), mode, staging, transport)
    assert wrong == [[]] * ranks.count


@pytest.mark.parametrize("kind", ["even", "uneven", "cross", "strided"])
def test_backward_is_the_adjoint(ranks: GlooRanks, kind: str) -> None:
    """Dense definition: the array is the same before and after, so its gradient is. Transpose: <y, A x> = <A* y, x>."""
    seeds = range(12)
    answers = ranks.call(work.run_with_gradient, ranks.count, kind, seeds)
    for position, seed in enumerate(seeds):
        source, target = random_problem(kind, seed, ranks.count)
        pieces = [answer[position] for answer in answers]
        forward = sum((piece["out"] * piece["cotangent"]).sum() for piece in pieces if piece)
        backward = sum((piece["in"] * piece["gradient"]).sum() for piece in pieces if piece)
        assert forward == backward, (kind, seed)
        at_target = {point: pieces[target.mesh.device(point)]["cotangent"] for point in target.mesh.points()}
        at_source = {point: pieces[source.mesh.device(point)]["gradient"] for point in source.mesh.points()}
        dense = assemble(gradient_layout(target), at_target)
        assert (assemble(gradient_layout(source), at_source) == dense).all(), (kind, seed)


def test_backward_is_differentiable(ranks: GlooRanks) -> None:
    assert all(ranks.call(work.second_derivative))


def test_many_under_way_in_any_order_of_waiting(ranks: GlooRanks) -> None:
    assert ranks.call(work.run_async, ranks.count) == [[]] * ranks.count


def test_a_rank_that_plans_something_else_is_named_everywhere(ranks: GlooRanks) -> None:
    for text in ranks.call(work.disagree, ranks.count):
        assert text.startswith("ranks [2] plan something else than rank 0; nothing was sent"), text


def test_bad_input_is_refused_with_the_numbers(ranks: GlooRanks) -> None:
    piece, far, placements, gradient = ranks.call(work.bad_inputs)[0]
    assert piece == "rank 0 passes a piece of shape [3], and the source gives it [2]"
    assert "devices [77]" in far
    assert "two layouts" in placements
    assert gradient == "a pending max has no adjoint"


def test_a_rank_that_never_comes_is_named_within_the_time_limit() -> None:
    lonely = GlooRanks(2)
    try:
        text, _ = lonely.call(work.never_comes)
    finally:
        lonely.stop()
    assert "rank 0 waited up to 0.5 s" in text
    assert "rank 1" in text
    assert "[4{x}] -> [4]" in text
