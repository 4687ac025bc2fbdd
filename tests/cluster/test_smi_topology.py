from __future__ import annotations

import pytest

from sennit.cluster import Cluster, Topology, load
from sennit.cluster.smi import cluster_of_matrix, parse_matrix
from sennit.errors import ParseError

H100 = """
\x1b[4m\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tNIC2\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tNODE\tSYS\t0-55\t0
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tPIX\tSYS\t0-55\t0
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tSYS\tNODE\t56-111\t1
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tSYS\tNODE\t56-111\t1
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tNODE\tSYS
NIC1\tNODE\tPIX\tSYS\tSYS\tNODE\t X \tSYS
NIC2\tSYS\tSYS\tNODE\tNODE\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes

NIC Legend:

  NIC0: mlx5_0
"""

WORKSTATION = """
        GPU0    GPU1    GPU2    GPU3    CPU Affinity    NUMA Affinity
GPU0     X      NV4     PXB     SYS     0-15            0
GPU1    NV4      X      PXB     SYS     0-15            0
GPU2    PXB     PXB      X      SYS     0-15            0
GPU3    SYS     SYS     SYS      X      16-31           1
"""


def test_equal_nvlinks_between_all_are_a_switch() -> None:
    matrix = parse_matrix(H100)
    assert matrix.names == ("GPU0", "GPU1", "GPU2", "GPU3", "NIC0", "NIC1", "NIC2")
    cluster = cluster_of_matrix(matrix, load("dgx-h100"), "half", nodes=2)
    assert (cluster.devices, cluster.nodes) == (8, 2)
    assert Cluster.parse(str(cluster)) == cluster
    topology = Topology.of(cluster)
    names = [topology.wires[wire].name for wire in topology.route(0, 3)]
    assert names == ["node 0 nvlink device 0 > nvswitch", "node 0 nvlink nvswitch > device 3"]
    # 18 links of 25 GB/s, of which large messages reach what they do in the preset
    assert topology.bandwidth(0, 3) == pytest.approx(Topology.of(load("dgx-h100")).bandwidth(0, 3))
    # two NICs are next to a GPU; the third is far from all
    assert cluster.nic is not None
    assert cluster.nic.per_node == 2
    assert topology.bandwidth(0, 4) > 0


def test_a_bridge_between_two_and_pcie_for_the_rest() -> None:
    cluster = cluster_of_matrix(parse_matrix(WORKSTATION), load("dgx-a100"), "desk")
    topology = Topology.of(cluster)

    def way(a: int, b: int) -> list[str]:
        return [topology.wires[wire].link for wire in topology.route(a, b)]

    assert way(0, 1) == ["nvlink"]
    assert topology.bandwidth(0, 1) == pytest.approx(100e9 * 0.82, rel=0.1)
    assert way(0, 2) == ["pcie", "pcie"]
    assert way(0, 3) == ["pcie", "host bridge", "socket", "host bridge", "pcie"]
    assert all(figure.source for _, figure in cluster.figures())


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nothing here", "no matrix of GPUs"),
        (H100.replace("GPU2\tNV18\tNV18\t X \tNV18\tSYS\tSYS\tNODE\t56-111\t1\n", ""), "a column GPU2 and no row"),
        (H100.replace("PIX\tNODE\tSYS\t0-55", "QPI\tNODE\tSYS\t0-55", 1), "'QPI' between GPU0 and NIC0"),
    ],
)
def test_text_that_is_no_matrix(text: str, fault: str) -> None:
    with pytest.raises(ParseError, match=fault):
        parse_matrix(text)
