"""Buckets: the clock on events against the clock on kernels, the bounds, the changes, and what a channel of a described
cluster costs.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.cluster import Topology, load
from sennit.cost import collective
from sennit.fuse.annealed_buckets import Annealing, annealed
from sennit.fuse.bounds import structural
from sennit.fuse.bucket_search import judged, judged_twice, refined, solved, with_algorithms
from sennit.fuse.channel import Channel, Line, of_cluster
from sennit.fuse.clock import Activity, BucketTime, Sharing, Timing, steady_state, traced
from sennit.fuse.kernel_cost import Roofline
from sennit.fuse.model import Grouping, KernelOrder, StepModel
from sennit.fuse.search import Found, SearchOptions, measured_best, search
from sennit.ir.program import CollectiveKind
from sennit.ir.strategy import Bucket, Part, Reduce, Strategy, WaitAt
from sennit.ir.strategy_check import check_strategy


@pytest.fixture(scope="module")
def model(small_gpt) -> StepModel:
    channel = Channel(
        5e-6,
        1e-9,
        1e-11,
        Sharing(0.9, 0.8, 1e-6),
        algorithms=(Line("tree", 2e-6, 2e-9), Line("ring", 8e-6, 1e-9)),
    )
    return StepModel(small_gpt.graph, Roofline.of(small_gpt.graph, load("dgx-a100").device), channel)


@pytest.fixture(scope="module")
def kernels(model) -> KernelOrder:
    order = model.order(Grouping())
    return KernelOrder(model, order, model.kernel_seconds(order, Grouping()))


def random_buckets(model: StepModel, seed: int) -> tuple[Bucket, ...]:
    draw = random.Random(seed)
    parts: list[Part] = []
    for path, _, _ in model.gradients:
        cut = draw.randrange(1, model.elements[path]) if draw.random() < 0.2 else None
        parts += [Part(path, span) for span in ([None] if cut is None else [(0, cut), (cut, model.elements[path])])]
    draw.shuffle(parts)
    buckets: list[Bucket] = []
    while parts:
        count = draw.randint(1, 6)
        buckets.append(Bucket(tuple(parts[:count]), draw.choice(list(WaitAt)), draw.choice(list(Reduce))))
        parts = parts[count:]
    return tuple(buckets)


def kernel_by_kernel(kernels: KernelOrder, buckets: tuple[Bucket, ...]) -> Timing:
    """The same step with every kernel by itself."""
    channel, model = kernels.model.channel, kernels.model
    times = []
    for bucket in buckets:
        size = model.carried(bucket)
        seconds, gather = channel.seconds(size), 0.0
        if bucket.reduce is Reduce.REDUCE_SCATTER:
            seconds, gather = channel.halves(size)
        needed = min(kernels.use[part.path] for part in bucket.parts) if bucket.wait is WaitAt.NEXT else None
        ready = max(kernels.maker[part.path] for part in bucket.parts)
        times.append(
            BucketTime(ready, seconds, channel.update_per_byte * size, -1 if needed is None else needed, needed, gather)
        )
    return Timing(tuple(kernels.seconds), tuple(times))


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_kernels_between_events_count_as_one(model, kernels, seed: int) -> None:
    buckets = random_buckets(model, seed)
    ours = steady_state(kernels.timing(buckets), model.channel.sharing)
    wanted = steady_state(kernel_by_kernel(kernels, buckets), model.channel.sharing)
    assert ours.seconds == pytest.approx(wanted.seconds, rel=1e-9)
    assert ours.order == wanted.order


@settings(derandomize=True, deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000))
def test_no_buckets_beat_the_structural_bound(model, kernels, seed: int) -> None:
    found = steady_state(kernels.timing(random_buckets(model, seed)), model.channel.sharing)
    assert not found.settled or found.seconds >= structural(kernels) * (1 - 1e-9)


def test_what_is_traced_adds_up(model, kernels) -> None:
    buckets, _ = solved(kernels, SearchOptions())
    timing = kernels.timing(buckets)
    spans = traced(timing, Sharing(), steps=2)
    step = steady_state(timing, Sharing()).seconds
    assert max(span.stop for span in spans) == pytest.approx(2 * step)
    computing = sum(span.stop - span.start for span in spans if span.activity is Activity.KERNEL)
    assert computing == pytest.approx(2 * sum(timing.kernels))
    assert {span.number for span in spans if span.activity is Activity.BUCKET} == set(range(len(buckets)))


def test_shares_let_what_is_needed_sooner_go_first() -> None:
    """A large bucket that nobody needs soon holds up a small one.

    Reduced to shares, it leaves the channel earlier and is gathered later: a gain where that is the cheaper half.
    """
    kernels = (1.0, 1.0, 8.0, 1.0)
    small = BucketTime(ready=3, seconds=1.0, needed=0)
    large = BucketTime(ready=2, seconds=6.0, needed=2)
    halves = replace(large, seconds=3.0, gather=2.0)
    whole = steady_state(Timing(kernels, (large, small))).seconds
    shares = steady_state(Timing(kernels, (halves, small))).seconds
    assert (whole, shares) == (17.0, 16.0)


def test_a_refined_bucketing_is_no_worse_and_still_one(model, kernels) -> None:
    start = random_buckets(model, 1)
    better, seconds = refined(kernels, start, SearchOptions())
    assert seconds < judged(kernels, start)
    check_strategy(Strategy("refined", (), better), model.graph)


def test_each_switch_is_obeyed(model) -> None:
    def found(**switches: bool) -> Strategy:
        return search(model, SearchOptions(patience=3, seconds=20, **switches)).strategy

    assert not found(operators=False).groups
    assert all(part.span is None for bucket in found(splits=False).buckets for part in bucket.parts)
    assert all(bucket.wait is WaitAt.STEP for bucket in found(across_steps=False).buckets)
    assert all(bucket.reduce is Reduce.ALL_REDUCE for bucket in found(reduce_scatter=False).buckets)
    assert all(bucket.algorithm is None for bucket in found(algorithms=False).buckets)
    assert all(len(bucket.parts) == 1 for bucket in found(tensors=False).buckets)
    assert all(not group.again for group in found(repeats=False).groups)


def test_each_bucket_gets_the_algorithm_for_its_size(model) -> None:
    path, _, size = max(model.gradients, key=lambda item: item[2])
    few = 500  # elements: where the lines cross is 6,000 bytes
    cut = (Bucket((Part(path, (0, few)),)), Bucket((Part(path, (few, model.elements[path])),)))
    assert size > 10_000
    assert [bucket.algorithm for bucket in with_algorithms(model, cut)] == ["tree", "ring"]
    assert Strategy.parse(str(Strategy("chosen", (), with_algorithms(model, cut)))).buckets[0].algorithm == "tree"


def test_a_search_that_is_stopped_reports_the_best_so_far(model) -> None:
    calls = iter(range(100))
    found = search(model, SearchOptions(seconds=60), stop=lambda: next(calls) >= 2)
    check_strategy(found.strategy, model.graph)
    assert found.structural <= found.seconds


def test_a_measurement_has_the_last_word(model) -> None:
    found = search(model, SearchOptions(patience=5, seconds=20, keep=3))
    assert isinstance(found, Found)
    assert len(found.others) == 2
    times = {str(strategy): seconds for (strategy, _), seconds in zip(found.others, (1.0, 2.0), strict=True)}
    assert measured_best(found, lambda strategy: times.get(str(strategy), 3.0)) == (found.others[0][0], 1.0)


@pytest.mark.parametrize("name", ["h200x8", "dgx-h100:2", "laptop"])
def test_lines_of_a_described_cluster_are_its_collectives(name: str) -> None:
    cluster = load(name)
    topology, devices = Topology.of(cluster), range(cluster.devices)
    channel = of_cluster(cluster, devices)
    for size in (1 << 12, 1 << 20, 1 << 25):
        wanted = collective(topology, CollectiveKind.ALL_REDUCE, devices, size).seconds(topology)
        assert channel.seconds(size) == pytest.approx(wanted, rel=0.05)
    scatter, gather = channel.halves(1 << 25)
    assert scatter + gather > 0.9 * channel.seconds(1 << 25)  # a switch that adds up has an advantage over both halves


@settings(derandomize=True, deadline=None, max_examples=8)
@given(seed=st.integers(0, 10_000), across=st.booleans(), splits=st.booleans())
def test_annealing_gives_buckets_that_are_no_worse(seed, across, splits, model, kernels) -> None:
    options = SearchOptions(across_steps=across, splits=splits, reduce_scatter=False)
    start, _ = solved(kernels, options)
    looking = Annealing(runs=2, tries=60, heat=0.02, seed=seed)
    found = annealed(kernels, start, options, looking)
    check_strategy(Strategy("annealed", (), found), model.graph)
    assert sum(judged_twice(kernels, found)) <= sum(judged_twice(kernels, start)) * (1 + 1e-9)
    assert found == annealed(kernels, start, options, looking)
    if not across:
        assert all(bucket.wait is WaitAt.STEP for bucket in found)
