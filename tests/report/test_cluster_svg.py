from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from sennit.cluster import load, presets
from sennit.report.cluster_svg import cluster_svg


@pytest.mark.parametrize("name", [*presets(), "dgx-h100:64", "v100x16:2", "laptop:3"])
def test_every_cluster_has_a_picture(name: str) -> None:
    cluster = load(name)
    text = cluster_svg(cluster)
    ElementTree.fromstring(text)
    assert cluster.summary in text.replace("&amp;", "&")
    for link in cluster.link:
        assert f">{link.name}: " in text


def test_what_is_not_drawn_is_counted() -> None:
    assert "and 56 more devices" in cluster_svg(load("gb200-nvl72"))
    assert "and 56 more nodes" in cluster_svg(load("dgx-h100:64"))
