"""Pictures of bandwidth over size."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from sennit.errors import SennitError
from sennit.report.bandwidth_svg import Series, bandwidth_svg

SERIES = [
    Series("sennit", ((1024, 1e6), (1 << 20, 9e8), (1 << 26, 4e9)), main=True),
    Series("another & <one>", ((1024, 2e6), (1 << 20, 3e8), (1 << 26, 4e9))),
]


def test_every_line_has_its_points_and_its_name() -> None:
    root = ElementTree.fromstring(bandwidth_svg("all_reduce", "measured somewhere", SERIES))
    name = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{name}text")]
    assert {"sennit", "another & <one>", "all_reduce", "measured somewhere", "1 KiB", "64 MiB"} <= set(texts)
    assert len(list(root.iter(f"{name}circle"))) == 6
    titles = [element.text for element in root.iter(f"{name}title")]
    assert "sennit: 0.9 GB/s at 1.00 MiB" in titles


def test_names_do_not_lie_on_one_another() -> None:
    same = [Series(f"way {number}", ((1024, 1e6), (4096, 1e9))) for number in range(9)]
    root = ElementTree.fromstring(bandwidth_svg("all_reduce", "", same))
    heights = [float(e.attrib["y"]) for e in root.iter() if (e.text or "").startswith("way ") and "y" in e.attrib]
    assert len(heights) == 9
    assert all(b - a >= 14.9 for a, b in zip(sorted(heights), sorted(heights)[1:], strict=False))


def test_one_point_is_enough_and_none_is_refused() -> None:
    assert "<circle" in bandwidth_svg("a", "", [Series("b", ((1000, 5e6),))])
    with pytest.raises(SennitError, match="no measurements"):
        bandwidth_svg("a", "", [Series("b", ())])
