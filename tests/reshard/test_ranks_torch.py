from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from reshard_strategies import Pair, any_pairs

from sennit.cli import main
from sennit.ir.dtype import DType
from sennit.reshard import Mode, plan, run_numpy
from sennit.reshard.ranks_torch import _given, _wanted


@settings(derandomize=True, deadline=None, max_examples=30)
@given(any_pairs())
def test_what_ranks_expect_is_what_the_reference_gives(pair: Pair) -> None:
    source, target = pair
    given_pieces = {point: _given(source, point) for point in source.mesh.points()}
    found = run_numpy(plan(source, target, mode=Mode.DIRECT), given_pieces)
    for point, piece in found.items():
        np.testing.assert_array_equal(piece, _wanted(source, target, point, DType.I64))


def test_a_run_on_ranks_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["reshard", "f32[64{x},6]{sum:y}", "f32[64,6{y}]", "--mesh", "x=2,y=2", "--run", "--json"]
    assert main(arguments) == 0
    measured = json.loads(capsys.readouterr().out)["measured"]
    assert (measured["ranks"], measured["wrong"]) == (4, [])
    assert measured["seconds"] > 0
