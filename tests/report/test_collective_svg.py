"""The picture of a schedule: well-formed, complete, and bounded."""

from __future__ import annotations

from xml.etree import ElementTree

from sennit.collective.compile import compile_algorithm
from sennit.collective.library import hierarchical_all_reduce, ring_all_reduce
from sennit.report.collective_svg import schedule_svg

SVG = "{http://www.w3.org/2000/svg}"


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_every_instruction_and_message_is_drawn() -> None:
    schedule = compile_algorithm(ring_all_reduce(8, in_place=True))
    root = ElementTree.fromstring(schedule_svg(schedule))
    steps = sum(len(block.instructions) for rank in schedule.ranks for block in rank.blocks)
    titled = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(titled) == steps
    assert len(list(root.iter(f"{SVG}path"))) == 2 * 7 * 8
    assert {f"rank {rank}" for rank in range(8)} <= set(texts(root))
    assert "all_reduce in place, 8 ranks, 8 thread blocks, 15 steps deep, 2 slots a connection" in texts(root)


def test_nodes_are_told_apart_and_many_ranks_are_cut() -> None:
    schedule = compile_algorithm(hierarchical_all_reduce((4, 2), in_place=True))
    root = ElementTree.fromstring(schedule_svg(schedule, ranks_per_node=4))
    assert len([line for line in root.iter(f"{SVG}line") if line.get("class") == "end"]) == 1
    few = ElementTree.fromstring(schedule_svg(schedule, ranks_per_node=4, most_ranks=4))
    assert "rank 4" not in texts(few)
    assert any("8 ranks, of which 4 are drawn" in text for text in texts(few))
