"""The database of measured times: what it keeps, what it answers, and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sennit.cost.database import Database, MeasuredChannel, MeasuredKernel, Place, load_database
from sennit.errors import RunError

HERE = Place("CPU, AVX2", "2.13.0", 2)
THERE = Place("NVIDIA H200", "2.13.0")


def kernel(
    signature: str, seconds: float, *, strides: tuple[tuple[int, ...], ...] = (), compiled: bool = False
) -> MeasuredKernel:
    return MeasuredKernel(signature, (seconds, seconds, 2 * seconds, 3 * seconds, 4 * seconds), 7, strides, compiled)


def test_what_is_measured_again_replaces_what_was_known(tmp_path: Path) -> None:
    first = Database().with_kernels(HERE, [kernel("a", 1.0), kernel("b", 2.0)]).with_kernels(THERE, [kernel("a", 0.1)])
    second = first.with_kernels(HERE, [kernel("a", 1.5)])
    assert first.seconds(HERE) == {"a": 1.0, "b": 2.0}
    assert second.seconds(HERE) == {"a": 1.5, "b": 2.0}
    assert second.seconds(THERE) == {"a": 0.1}
    path = tmp_path / "deep" / "profile.json"
    second.save(path)
    assert load_database(path) == second
    assert [item.name for item in path.parent.iterdir()] == ["profile.json"]


def test_plain_strides_count_and_the_faster_of_compiled_and_not() -> None:
    kernels = [kernel("a", 1.0, strides=((1, 4),)), kernel("a", 3.0), kernel("a", 2.0, compiled=True)]
    assert Database().with_kernels(HERE, kernels).seconds(HERE) == {"a": 2.0}
    assert Database().with_kernels(HERE, kernels[:1]).seconds(HERE) == {"a": 1.0}


def test_channels_go_by_their_group() -> None:
    two, four = (
        MeasuredChannel("gloo, 2 ranks", 2, 1e-4, 1e-9, 1e-5),
        MeasuredChannel("gloo, 4 ranks", 4, 2e-4, 2e-9, 0.0),
    )
    slower = MeasuredChannel("gloo, 2 ranks", 2, 3e-4, 1e-9, 1e-5)
    found = Database().with_channel(HERE, two).with_channel(HERE, four).with_channel(HERE, slower)
    assert found.records(HERE).channels == (four, slower)


def test_the_place_is_where_most_kernels_are_known() -> None:
    database = (
        Database().with_kernels(HERE, [kernel("a", 1.0), kernel("b", 1.0)]).with_kernels(THERE, [kernel("a", 1.0)])
    )
    assert database.place_for({"a", "b", "c"}) == HERE
    with pytest.raises(RunError, match="none of the model's 1 kernels was measured"):
        database.place_for({"d"})


def test_faults_are_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    assert load_database(path, missing_is_empty=True) == Database()
    with pytest.raises(RunError, match="cannot read"):
        load_database(path)
    path.write_text("{")
    with pytest.raises(RunError, match="is no database"):
        load_database(path)
    path.write_text('{"schema": "sennit.profile/0"}')
    with pytest.raises(RunError, match=r"has the schema 'sennit.profile/0'"):
        load_database(path)
