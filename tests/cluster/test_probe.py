from __future__ import annotations

import multiprocessing as mp
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sennit.cluster import Basis, Cluster, Topology, load
from sennit.cluster.probe import Estimate, PairClass, Probe, Times, cluster_of_probe, estimate, estimate_burst
from sennit.cluster.probe_torch import joined_ranks, probe_ranks
from sennit.cluster.ranks_torch import GlooRanks
from sennit.errors import ClusterError


def times(latency: float, bandwidth: float, noise: float) -> Times:
    generator = np.random.default_rng(1)
    sizes = (8, 1 << 16, 1 << 20, 1 << 24)
    rows = [(latency + size / bandwidth) * (1 + noise * generator.random(40)) for size in sizes]
    return Times(sizes, tuple(tuple(row.tolist()) for row in rows))


def test_estimates_find_what_was_put_in() -> None:
    latency, bandwidth = estimate(times(5e-6, 10e9, 0.02))
    assert latency.value == pytest.approx(5e-6, rel=0.03)
    assert bandwidth.value == pytest.approx(10e9, rel=0.03)
    assert bandwidth.low <= bandwidth.value <= bandwidth.high
    wide = estimate(times(5e-6, 10e9, 0.5))[1]
    assert wide.high - wide.low > bandwidth.high - bandwidth.low


def test_a_token_bucket_shows_in_large_messages() -> None:
    generator = np.random.default_rng(2)
    sizes = (8, 1 << 16, 1 << 20, 1 << 22)
    bandwidth, bucket = 6e6, 32 << 10
    rows = [(1e-4 + max(0, size - bucket) / bandwidth) * (1 + 1e-3 * generator.random(30)) for size in sizes]
    burst = estimate_burst(Times(sizes, tuple(tuple(row.tolist()) for row in rows)))
    assert burst is not None
    assert burst.value == pytest.approx(bucket, rel=0.15)
    assert burst.low <= bucket <= burst.high
    assert estimate_burst(times(5e-6, 10e9, 0.02)) is None


def pair_class(bandwidth: float, ways: float, at_once: int, latency: float = 4e-6) -> PairClass:
    return PairClass(
        "x", 3, Estimate(latency, latency, latency), Estimate(bandwidth, bandwidth, bandwidth), ways, at_once
    )


def test_a_probe_of_two_nodes_becomes_links_nics_and_a_fabric() -> None:
    probe = Probe(
        2, 8, "nccl", "H200", pair_class(300e9, 3.9, 4), pair_class(45e9, 7.7, 8, 10e-6), 100e-6, 1e-3, 1 << 28
    )
    cluster = cluster_of_probe(probe, load("h200x8"), "mine")
    assert Cluster.parse(str(cluster)) == cluster
    topology = Topology.of(cluster)
    assert cluster.devices == 16
    assert cluster.nic is not None
    assert cluster.nic.per_node == 8
    assert topology.bandwidth(0, 1) == pytest.approx(300e9)
    assert topology.bandwidth(0, 8) == pytest.approx(45e9)
    assert topology.latency(0, 1) == pytest.approx(4e-6)
    assert topology.latency(0, 8) == pytest.approx(10e-6)
    assert "95% interval" in cluster.link[0].bandwidth.source


def test_nodes_of_one_device_have_a_nic_and_no_switch() -> None:
    probe = Probe(2, 1, "gloo", "CPU ranks", None, pair_class(23e6, 1.0, 1, 100e-6), 1e-3, 0.5, 4 << 20)
    cluster = cluster_of_probe(probe, load("laptop:1"), "mine")
    assert Cluster.parse(str(cluster)) == cluster
    assert Topology.of(cluster).bandwidth(0, 1) == pytest.approx(23e6)


def gloo_probe(**changes: object) -> Probe:
    between = replace(pair_class(6e6, 1.0, 1, 100e-6), burst=Estimate(32e3, 30e3, 34e3))
    probe = Probe(2, 1, "gloo", "CPU ranks", None, between, 1e-3, 0.8, 4 << 20)
    return replace(probe, **changes)  # type: ignore[arg-type]


def test_what_gloo_adds_is_the_median_over_sizes() -> None:
    # all-reduces of two ranks carry the array once: 4% more than that at most sizes, much more at one
    timed = tuple(
        (size, 1e-3 + size / 6e6 * factor) for size, factor in ((1 << 16, 1.04), (1 << 20, 1.04), (1 << 22, 1.3))
    )
    cluster = cluster_of_probe(gloo_probe(all_reduces=timed), load("laptop:1"), "mine")
    assert cluster.reduction is not None
    assert cluster.reduction.value == pytest.approx(0.5 / (0.04 / 6e6), rel=1e-3)
    assert cluster.nic is not None
    assert cluster.nic.burst is not None
    assert cluster.nic.burst.value == 32e3
    assert Cluster.parse(str(cluster)) == cluster


def test_gloo_ranks_say_how_busy_a_transfer_is_and_whether_they_take_turns() -> None:
    host = cluster_of_probe(gloo_probe(cores_busy=0.04, opposite=1.99), load("laptop:1"), "mine").host
    assert host is not None
    assert host.transfer_cores is not None
    assert (host.transfer_cores.value, host.take_turns) == (0.04, True)
    host = cluster_of_probe(gloo_probe(cores_busy=0.9, opposite=1.26), load("laptop:1"), "mine").host
    assert host is not None
    assert not host.take_turns


def test_a_small_all_reduce_bounds_the_latency() -> None:
    slow = replace(pair_class(6e6, 1.0, 1), latency=Estimate(3.5e-3, 1.9e-3, 3.9e-3))
    cluster = cluster_of_probe(gloo_probe(between=slow, small_all_reduce=240e-6), load("laptop:1"), "mine")
    assert Topology.of(cluster).latency(0, 1) == pytest.approx(120e-6)
    assert cluster.collective_start is not None
    assert cluster.collective_start.value == 0.0


def test_pairs_that_slow_each_other_down_share_a_link() -> None:
    probe = Probe(1, 8, "gloo", "CPU ranks", pair_class(2e9, 1.5, 4), None, 1e-3, 1e-2, 1 << 24)
    cluster = cluster_of_probe(probe, load("laptop:8"), "mine")
    assert cluster.link[0].shared
    assert cluster.link[0].bandwidth.value == pytest.approx(3e9)


def test_gloo_ranks_are_probed() -> None:
    with GlooRanks(4, timeout=60) as ranks:
        answers = ranks.call(_probe)
    assert answers[1:] == [None, None, None]
    probe = answers[0]
    assert probe is not None
    assert (probe.nodes, probe.per_node, probe.between) == (1, 4, None)
    assert probe.inside is not None
    assert 0 < probe.inside.latency.low <= probe.inside.latency.value <= probe.inside.latency.high
    cluster = cluster_of_probe(probe, load("laptop:4"), "here")
    assert Cluster.parse(str(cluster)) == cluster
    assert cluster.link[0].bandwidth.basis is Basis.MEASURED
    assert [size for size, _ in probe.all_reduces] == [1 << 12, 1 << 14, 1 << 16, 1 << 20]
    assert probe.cores_busy is not None
    assert probe.opposite is not None
    assert min(probe.cores_busy, probe.opposite) > 0


def _probe(rank: int) -> Probe | None:
    return probe_ranks(sizes=(8, 1 << 12, 1 << 16, 1 << 20), repeats=6)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_nccl_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    with pytest.raises(ClusterError, match="torch finds none"), joined_ranks("nccl"):
        pass


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs two GPUs to probe between")
def test_gpus_are_probed_over_nccl(tmp_path: Path) -> None:
    with mp.get_context("spawn").Pool(2) as pool:
        answers = pool.starmap(_probe_gpu, [(rank, str(tmp_path / "store")) for rank in range(2)])
    probe = next(answer for answer in answers if answer is not None)
    assert (probe.backend, probe.nodes, probe.per_node) == ("nccl", 1, 2)
    assert (probe.cores_busy, probe.opposite) == (None, None)
    assert cluster_of_probe(probe, load("h200x8"), "here").reduction is None


def _probe_gpu(rank: int, store: str) -> Probe | None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        return probe_ranks(sizes=(8, 1 << 16, 1 << 22, 1 << 24), repeats=5)
    finally:
        dist.destroy_process_group()


def test_one_rank_has_nothing_to_probe() -> None:
    with GlooRanks(1, timeout=60) as ranks, pytest.raises(Exception, match="one rank has no links to probe"):
        ranks.call(_probe)
    probe = Probe(1, 1, "gloo", "CPU ranks", None, None, 0.0, 0.0, 8)
    with pytest.raises(ClusterError, match="at least two"):
        cluster_of_probe(probe, load("laptop:1"), "alone")
