"""DTensors: equal to DTensor's own definition of its pieces, and to stock DTensor on a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import reshard_dtensor_work as work
import reshard_uses_work as uses

from sennit.cluster.ranks_torch import GlooRanks


def test_the_nested_uneven_case_that_torch_gets_wrong(ranks: GlooRanks) -> None:
    assert ranks.call(work.nested_uneven) == [[]] * ranks.count


def test_random_placements_even_uneven_and_to_another_mesh(ranks: GlooRanks) -> None:
    assert ranks.call(work.random_dtensors, range(80)) == [[]] * ranks.count


def test_strided_shards_averages_and_negative_dims(ranks: GlooRanks) -> None:
    assert ranks.call(work.special_placements) == [[]] * ranks.count


def test_a_served_model_equals_stock(ranks: GlooRanks) -> None:
    stock = ranks.call(work.model_step, False)[0]
    served = ranks.call(work.model_step, True)[0]
    assert served.pop("served") > 10
    assert served.pop("left") == {}
    assert served.keys() == stock.keys()
    for name, value in stock.items():
        assert flat(served[name]) == pytest.approx(flat(value), rel=1e-12, abs=1e-12), name


def flat(value: object) -> list[float]:
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list) else [value]  # type: ignore[list-item]


def test_gradients_of_a_dtensor_twice_and_across_meshes(ranks: GlooRanks) -> None:
    assert ranks.call(work.dtensor_gradient) == [[]] * ranks.count


def test_what_no_layout_says_is_left_to_torch(ranks: GlooRanks) -> None:
    whole, left = ranks.call(work.masked_embedding)[0]
    assert whole
    assert len(left) == 1
    assert "_MaskPartial" in left[0]


def test_activations_between_tensor_and_sequence_parallel(ranks: GlooRanks) -> None:
    for stock, served, count, left in ranks.call(uses.activations)[:4]:
        assert served == pytest.approx(stock, rel=1e-5)
        assert served[-1] < served[0]
        assert (count > 0, left) == (True, 0)


def test_weights_to_a_server_within_a_budget(ranks: GlooRanks) -> None:
    answers = ranks.call(uses.weights, 16 << 10)
    assert [arrived > 0 for arrived, _ in answers] == [False] * 4 + [True] * 2
    assert all(wrong == [] for _, wrong in answers)


def test_a_checkpoint_of_four_ranks_loads_on_six(ranks: GlooRanks, tmp_path: Path) -> None:
    for wrong, refused in ranks.call(uses.checkpoint, str(tmp_path), 48 << 10):
        assert wrong == []
        assert refused.startswith("a budget of 1000 bytes is below the least possible, 40960")
