from __future__ import annotations

import torch

from sennit.cluster import Basis, Cluster, load
from sennit.cluster.measure_torch import measure_laptop
from sennit.cluster.ranks_torch import GlooRanks


def test_the_machine_at_hand_is_measured() -> None:
    threads = torch.get_num_threads()
    cluster = measure_laptop(3)
    assert torch.get_num_threads() == threads
    assert cluster.devices == 3
    assert Cluster.parse(str(cluster)) == cluster
    measured = {place for place, figure in cluster.figures() if figure.basis is Basis.MEASURED}
    assert {"device.memory", "device.bandwidth", "device.launch", "device.peak.f32", "host.cores"} <= measured
    for place, figure in cluster.figures():
        if place in measured:
            assert figure.source.startswith("measured on this machine: ")
            assert figure.value >= 0
    # what is not measured is the preset's
    assert cluster.device.matmul == load("laptop").device.matmul


def test_collectives_are_timed_on_the_processes_that_will_run() -> None:
    with GlooRanks(2) as processes:
        cluster = measure_laptop(2, processes)
    assert cluster.collective_start is not None
    assert cluster.reduction is not None
    assert "between 2 processes on" in cluster.collective_start.source
    assert "between 2 processes on" in cluster.reduction.source
