from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sennit.cluster import Basis, Cluster, Topology, load, presets
from sennit.errors import ClusterError


def message(error: pytest.ExceptionInfo[ClusterError]) -> str:
    return str(error.value)


def edited(tmp_path: Path, old: str, new: str, preset: str = "laptop") -> Path:
    """A preset's file with one piece of text changed."""
    text = str(load(preset))
    assert old in text, f"{old!r} is not in {preset}"
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", presets())
def test_a_preset_prints_and_parses_back(name: str) -> None:
    cluster = load(name)
    assert Cluster.parse(str(cluster)) == cluster
    assert cluster.name == name
    assert hash(cluster) == hash(load(name))


@pytest.mark.parametrize("name", presets())
def test_every_figure_of_a_preset_has_a_source(name: str) -> None:
    figures = list(load(name).figures())
    assert len(figures) > 10
    assert all(figure.source and isinstance(figure.basis, Basis) for _, figure in figures)


def test_the_presets_that_the_guide_names_are_there() -> None:
    assert {"laptop", "dgx-a100", "dgx-h100"} <= set(presets())


def test_scaling_multiplies_nodes_or_devices() -> None:
    assert load("dgx-h100:4").devices == 32
    assert load("dgx-h100:4").nodes == 4
    laptop = load("laptop:4")
    assert (laptop.devices, laptop.nodes) == (4, 1)


def test_a_file_loads_as_the_preset_it_was_printed_from(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(str(load("dgx-a100")), encoding="utf-8")
    assert load(str(path)) == load("dgx-a100")
    assert load(f"{path}:2").devices == 16


@pytest.mark.parametrize("value", ["-3000000000.0", "0.0", "nan", "inf"])
def test_a_bandwidth_that_is_none(tmp_path: Path, value: str) -> None:
    path = edited(tmp_path, "bandwidth = { value = 3000000000.0", f"bandwidth = {{ value = {value}")
    with pytest.raises(ClusterError) as error:
        load(str(path))
    text = message(error)
    assert f"the bandwidth of link 'gloo' in bytes/s is {float(value):g}" in text
    assert f"where: {path}, [[link]] 'gloo'" in text
    assert "fix: give the bytes a second of one direction" in text


def test_an_unknown_preset_names_the_nearest_and_all() -> None:
    with pytest.raises(ClusterError) as error:
        load("dgx-h10")
    assert "unknown cluster 'dgx-h10'" in message(error)
    assert "did you mean 'dgx-h100'?" in message(error)
    assert "laptop" in message(error)


@pytest.mark.parametrize("spec", ["laptop:0", "laptop:x", "dgx-h100:-2", "laptop:"])
def test_a_count_that_is_none(spec: str) -> None:
    with pytest.raises(ClusterError) as error:
        load(spec)
    assert f"where: cluster {spec!r}" in message(error)
    assert "with N at least 1" in message(error)


def test_a_missing_file() -> None:
    with pytest.raises(ClusterError, match=r"there is no file 'nowhere\.toml'"):
        load("nowhere.toml")


def test_a_disconnected_topology(tmp_path: Path) -> None:
    path = edited(tmp_path, 'between = ["device", "loopback"]', 'between = ["device 0", "loopback"]')
    with pytest.raises(ClusterError) as error:
        load(str(path))
    assert "device 0 cannot reach device 1" in message(error)
    assert str(path) in message(error)
    assert "fix: add a [[link]] between each device and a switch" in message(error)


def test_several_nodes_without_nics(tmp_path: Path) -> None:
    text = str(load("dgx-a100"))
    start, stop = text.index("[nic]"), len(text)
    links = text.index('name = "pcie"')
    head = text[: text.rindex("[[link]]", 0, links)]
    path = tmp_path / "mine.toml"
    path.write_text(head + text[stop:start] + "\n", encoding="utf-8")
    with pytest.raises(ClusterError) as error:
        load(f"{path}:2")
    assert "device 0 cannot reach device 8: 2 nodes and no NICs" in message(error)
    assert "fix: add [nic] and [fabric] tables" in message(error)


def test_a_device_without_memory(tmp_path: Path) -> None:
    text = str(load("laptop"))
    line = next(line for line in text.splitlines() if line.startswith("memory = "))
    missing = edited(tmp_path, line + "\n", "")
    with pytest.raises(ClusterError) as error:
        load(str(missing))
    assert "the device has no memory" in message(error)
    assert str(missing) in message(error)
    assert "fix: give memory" in message(error)
    zero = edited(tmp_path, "memory = { value = 4000000000.0", "memory = { value = 0.0")
    with pytest.raises(ClusterError) as error:
        load(str(zero))
    assert "the device's memory in bytes is 0" in message(error)
    assert "[device] 'CPU rank'" in message(error)


def test_an_unknown_field_names_the_nearest(tmp_path: Path) -> None:
    path = edited(tmp_path, "latency = ", "latencies = ")
    with pytest.raises(ClusterError) as error:
        load(str(path))
    assert "unknown field 'latencies' in link[0]" in message(error)
    assert "did you mean 'latency'?" in message(error)
    assert f"where: {path}" in message(error)
    path = edited(tmp_path, "blocking = ", "bloking = ")
    with pytest.raises(ClusterError) as error:
        load(str(path))
    assert "unknown field 'bloking' in host" in message(error)
    assert (
        "did you mean 'blocking'? the fields here are cores, transfers_use_cores, blocking, transfer_cores, take_turns"
        in message(error)
    )


def test_a_figure_without_a_source(tmp_path: Path) -> None:
    path = edited(tmp_path, 'source = "a laptop with eight cores"', 'source = ""')
    with pytest.raises(ClusterError, match=r"host\.cores = 8 has no source"):
        load(str(path))


def test_text_that_is_no_toml() -> None:
    with pytest.raises(ClusterError, match="the text is not TOML"):
        Cluster.parse("name = ")


def test_a_link_to_a_switch_that_is_not_there(tmp_path: Path) -> None:
    path = edited(tmp_path, 'switches = ["loopback"]', 'switches = ["hub"]')
    with pytest.raises(ClusterError) as error:
        load(str(path))
    assert "link 'gloo' ends at 'loopback', which the node does not have" in message(error)


def test_more_devices_than_the_cluster_has() -> None:
    with pytest.raises(ClusterError) as error:
        load("dgx-h100").require(16, "mesh dp=16")
    assert message(error).splitlines() == [
        "16 devices are needed, the cluster 'dgx-h100' has 8 devices (1 node of 8)",
        "  where: mesh dp=16",
        "  fix: use the cluster dgx-h100:2, or a mesh of at most 8 devices",
    ]
    with pytest.raises(ClusterError, match="use the cluster laptop:4"):
        load("laptop:2").require(4, "a program")
    load("dgx-h100").require(8, "mesh dp=8")


def test_clusters_load_without_torch() -> None:
    code = "import sys, sennit.cluster, sennit.cost, sennit.sim; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_routes_within_a_node_and_between_nodes() -> None:
    topology = Topology.of(load("dgx-h100:2"))

    def names(source: int, target: int) -> list[str]:
        return [topology.wires[wire].name for wire in topology.route(source, target)]

    assert names(3, 3) == []
    assert names(0, 1) == ["node 0 nvlink device 0 > nvswitch", "node 0 nvlink nvswitch > device 1"]
    # the same rail: one leaf, no spine
    assert names(1, 9) == [
        "node 0 pcie device 1 > nic 1",
        "node 0 nic 1 up",
        "node 1 nic 1 down",
        "node 1 pcie nic 1 > device 1",
    ]
    assert names(1, 10)[2:4] == ["leaf 1 up", "leaf 2 down"]


def test_every_route_is_made_of_wires_of_its_ends() -> None:
    for name in presets():
        cluster = load(f"{name}:2")
        topology = Topology.of(cluster)
        devices = range(min(cluster.devices, 20))
        for source in devices:
            for target in devices:
                route = topology.route(source, target)
                assert len(set(route)) == len(route)
                assert bool(route) == (source != target)


def test_a_shared_link_is_one_wire(tmp_path: Path) -> None:
    path = edited(tmp_path, "shared = false", "shared = true")
    topology = Topology.of(load(str(path)))
    assert len(topology.wires) == 1
    assert topology.route(0, 1) == (0,)


def test_oversubscription_narrows_the_spine() -> None:
    text = str(load("dgx-a100:4")).replace("oversubscription = { value = 1.0", "oversubscription = { value = 2.0")
    spine = [wire for wire in Topology.of(Cluster.parse(text)).wires if wire.link == "spine"]
    full = [wire for wire in Topology.of(load("dgx-a100:4")).wires if wire.link == "spine"]
    assert [2 * wire.bandwidth for wire in spine] == [wire.bandwidth for wire in full]


def test_the_file_in_the_guide_is_a_cluster() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    cluster = Cluster.parse(guide.split("```toml\n")[1].split("```")[0])
    assert cluster.devices == 2
    assert len(Topology.of(cluster).wires) == 4


def test_the_guide_names_every_preset() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in guide for name in presets())
