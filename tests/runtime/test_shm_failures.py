"""What goes wrong between ranks is found, named and told to all; nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import shm_jobs
from shm_ranks import Failed, Ranks, good, segments

from sennit.collective.runtime import shm_machine, shm_segment
from sennit.collective.runtime.encode_pull import encode_pull
from sennit.collective.runtime.shm_abi import Reduction, load_core
from sennit.collective.runtime.shm_algorithms import build
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_segment import Capacity
from sennit.errors import CollectiveError, RunError
from sennit.ir.collective import CollectiveName
from sennit.ir.dtype import DType


@pytest.fixture
def mortal() -> Iterator[Ranks]:
    """Processes of their own, since one of them dies."""
    started = Ranks(4)
    yield started
    started.close()


@pytest.mark.parametrize(
    ("elements", "compiled"),
    [pytest.param(1 << 20, True, marks=pytest.mark.skipif(load_core() is None, reason="not built")), (1000, False)],
)
def test_a_killed_rank_is_named_by_all_others(mortal: Ranks, elements: int, compiled: bool) -> None:
    results = mortal.run(4, shm_jobs.killed, 2, elements, compiled)
    assert results[2] is None  # it died
    for rank in (0, 1, 3):
        failed = results[rank]
        assert isinstance(failed, Failed)
        assert (failed.kind, failed.cause, failed.ranks) == ("RuntimeFailure", "died", (2,)), failed.text
        assert "rank 2 died in all_reduce" in failed.text
    assert segments() == []
    good(mortal.run(2, shm_jobs.cycles, 1))  # a new group starts at once


@pytest.mark.skipif(load_core() is None, reason="not built")
def test_a_rank_that_is_killed_while_others_read_it(mortal: Ranks) -> None:
    results = mortal.run(3, shm_jobs.killed_while_read, 1)
    for rank in (0, 2):
        failed = results[rank]
        assert isinstance(failed, Failed)
        assert (failed.cause, failed.ranks) == ("died", (1,)), failed.text


def test_a_rank_that_never_comes(ranks: Ranks) -> None:
    results = ranks.run(3, shm_jobs.never_comes, 1)
    assert results[1] is None  # it returned
    for rank in (0, 2):
        assert results[rank].ranks == (1,)
        assert results[rank].cause == "late"
        assert "rank 1 did not come within 1 s in all_reduce of 1000 f32, sum" in results[rank].text


def test_a_rank_that_closed_the_group(ranks: Ranks) -> None:
    results = ranks.run(3, shm_jobs.leaves)
    for rank in (1, 2):
        assert (results[rank].cause, results[rank].ranks) == ("left", (0,))


def test_a_rank_that_is_interrupted(ranks: Ranks) -> None:
    results = ranks.run(3, shm_jobs.interrupted)
    assert results[0] == "interrupted"
    for rank in (1, 2):
        assert (results[rank].cause, results[rank].ranks) == ("left", (0,))
        assert "rank 0 was interrupted in barrier" in results[rank].text


def test_another_size_is_named(ranks: Ranks) -> None:
    failures = [result for result in ranks.run(3, shm_jobs.other_size) if isinstance(result, Failed)]
    assert len(failures) == 3
    for failed in failures:
        assert failed.cause == "mismatch"
        assert 1 in failed.ranks
        assert "all_reduce of 1000 f32, sum" in failed.text
        assert "rank 1: all_reduce of 1001 f32, sum" in failed.text


def test_another_collective_is_named(ranks: Ranks) -> None:
    failures = [result for result in ranks.run(3, shm_jobs.other_collective) if isinstance(result, Failed)]
    assert len(failures) == 3
    for failed in failures:
        assert failed.cause == "mismatch"
        assert "rank 1: all_gather of 10 f32" in failed.text
        assert "rank 0: all_reduce of 10 f32" in failed.text or "rank 2: all_reduce of 10 f32" in failed.text


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("between", [0, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_another_root_is_named_by_a_later_call(ranks: Ranks, size: int, between: int, compiled: bool) -> None:
    results = ranks.run(size, shm_jobs.other_root, between, compiled and load_core() is not None)
    assert all(isinstance(result, Failed) and result.cause == "mismatch" for result in results), results
    for result in results:
        assert "call 2 of the group was not the same on all ranks" in result.text
        assert "rank 0: broadcast of 5 f32, root 0; rank 1: broadcast of 5 f32, root 1" in result.text


def test_sizes_of_a_variable_exchange_that_do_not_match(ranks: Ranks) -> None:
    failures = [result for result in ranks.run(3, shm_jobs.wrong_sizes) if isinstance(result, Failed)]
    assert failures
    assert all(failed.cause == "mismatch" and "bytes where rank" in failed.text for failed in failures)


def test_a_failure_breaks_the_group_for_all_and_a_new_one_works(ranks: Ranks) -> None:
    texts = good(ranks.run(3, shm_jobs.broken_for_all))
    assert all("rank 0" in text for text in texts)
    assert all("the group is broken" in texts[rank] for rank in (1, 2))


def test_a_forked_child_may_not_use_the_group(ranks: Ranks) -> None:
    for text in good(ranks.run(2, shm_jobs.forked)):
        assert "a group that process" in text


def test_groups_that_start_and_stop_leave_nothing(ranks: Ranks) -> None:
    for before, after, names in good(ranks.run(3, shm_jobs.cycles, 200)):
        assert before == after
        assert names == []


def alone(said: bytes) -> list[bytes]:
    return [said]


def test_a_group_of_one() -> None:
    with ShmGroup.create(0, 1, alone, timeout=5) as group:
        group.barrier()
        array = group.allocate(12)
        array[...] = 7
        assert (group.all_reduce(array) == 7).all()
        with pytest.raises(RunError, match="do not fit"):
            group.allocate(1 << 40)
    assert (array == 7).all()  # memory of a group outlives it
    with pytest.raises(RunError, match="closed"):
        group.barrier()


def test_what_cannot_be_made() -> None:
    with pytest.raises(RunError, match="rank 2 of 2"):
        ShmGroup.create(2, 2, alone, timeout=1)
    with pytest.raises(RunError, match="returned ranks"):
        ShmGroup.create(0, 2, alone, timeout=1)
    assert Capacity().slot % 4096 == 0


def test_without_a_core_the_interpreter_serves_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shm_machine, "load_core", lambda: None)
    shm_machine.warn_once.cache_clear()
    for _ in range(2):
        with ShmGroup.create(0, 1, alone, timeout=5) as group:
            assert group.machine.name == "python"
            assert (group.all_reduce(np.ones(5)) == 1).all()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "C compiler" in caplog.text


def test_names_are_of_no_use_to_other_groups_and_unlinked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory of rank 0 cannot be opened through /proc, a named file serves for a moment."""

    faults = iter([[b"", b"no such file"], [b"", b""]])

    def exchange(said: bytes) -> list[bytes]:
        if said.startswith(b"["):
            return [said, said]
        return next(faults)  # the other rank cannot open the first, and can open the second

    layout = shm_segment.Layout(2, Capacity(arena=4096))
    segment = shm_segment.open_segment(0, layout, exchange)
    assert len(segment.memory) == layout.size
    assert segment.scarce
    assert segments() == []


def test_memory_that_cannot_be_had_is_named_on_all_ranks(mortal: Ranks) -> None:
    """On rank 0, which makes it, and on one that maps it."""
    for rank, limit, message in (
        (0, "file", "File too large (a file may have 4096 bytes)"),
        (1, "addresses", "memory"),
    ):
        texts = good(mortal.run(3, shm_jobs.limited, rank, limit))
        for text in texts:
            assert f"rank {rank} cannot {'open' if rank else 'make'}" in text
            assert message in text
            assert "bytes of a file in /dev/shm" in text
            assert "fix: " in text
            assert "ulimit" in text
    assert segments() == []


@pytest.mark.parametrize(
    ("size", "room", "messages"),
    [
        (2, 1 << 20, ("No space left on device", "of 1048576 bytes are free in /dev/shm", "--shm-size")),
        (1, 32 << 20, ("there is no memory for an array of 67108864 bytes that the ranks share", "--shm-size")),
    ],
    ids=["for the segment", "for an array"],
)
def test_a_full_dev_shm_is_an_error_and_no_signal(
    mortal: Ranks, size: int, room: int, messages: tuple[str, ...]
) -> None:
    """Memory is reserved: that of the segment when it is made, and that of arrays when they are."""
    for text in good(mortal.run(size, shm_jobs.small_shm, room)):
        if text == "may not mount":
            pytest.skip("this needs a mount namespace of its own")
        for message in messages:
            assert message in text


def test_a_set_up_that_is_interrupted_leaves_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(said: bytes) -> list[bytes]:
        raise KeyboardInterrupt

    monkeypatch.setattr(shm_segment, "_WAYS", shm_segment._WAYS[1:])
    with pytest.raises(KeyboardInterrupt):
        shm_segment.open_segment(0, shm_segment.Layout(2, Capacity(arena=4096)), exchange)
    assert segments() == []


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.all_reduce(np.ones((4, 4))[:, 1]), "strides"),
        (lambda g: g.all_reduce(np.ones(4, dtype=np.complex64)), "complex64"),
        (lambda g: g.all_reduce(np.ones(4), out=np.ones(5)), "has 40 bytes"),
        (lambda g: g.all_reduce(np.ones(4), Reduction.BAND), "band of f64"),
        (lambda g: g.all_reduce(np.ones(4, dtype=bool), Reduction.AVG), "average of bool"),
        (lambda g: g.send_array(np.ones(4), 0), "between rank 0 and rank 0"),
        (lambda g: g.run(encode_pull(build("all_gather", 2)), 0, 0, 1, DType.F32), "for 2 ranks"),
        (lambda g: g.run(encode_pull(build("all_gather", 1)), 0, 0, 1, DType.F32), "without an input"),
        (lambda g: g.exchange([], []), "0 and 0 buffers for 1 ranks"),
        (lambda g: g.table.choose(CollectiveName.ALL_TO_NEXT, 5), "no code for all_to_next"),
        (lambda g: build("all_reduce rings", 2), "no shared-memory algorithm"),
    ],
)
def test_what_is_refused(call: Callable[[ShmGroup], object], message: str) -> None:
    with ShmGroup.create(0, 1, alone, timeout=5) as group:
        group.barrier()
        with pytest.raises(CollectiveError, match=message):
            call(group)
