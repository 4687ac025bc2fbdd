"""A schedule as a picture: chunks flowing from rank to rank, step by step.

Down: ranks, and in each rank its thread blocks with their channel. To the right: steps. An instruction stands in the
earliest column that its predecessors allow (the longest chain of block order, waits and messages before it), so a
column is what could happen at once. A box is an instruction and bears its chunks; a line leads from the box that sends
to the box that receives, in the colour of its channel. Ranks of a node, where their number is given, stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sennit.collective.step_graph import StepGraph, order_steps
from sennit.ir.collective import CustomCollective
from sennit.ir.schedule import Instruction, Opcode, Schedule
from sennit.report.canvas import document, rectangle, text

__all__ = ["schedule_svg"]

MARGIN, LABELS, TOP, LEGEND = 14, 132, 62, 44
BOX, HEIGHT, COLUMN, LANE = 34, 16, 62, 20  # a box, and the room that it gets
RANK_GAP, NODE_GAP = 8, 22
DIGIT = 5.8
LINES = ("forward", "send", "backward", "collective", "best", "optimizer")


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    channel: int


def schedule_svg(
    schedule: Schedule, *, ranks_per_node: int | None = None, most_ranks: int = 32, standalone: bool = True
) -> str:
    """The picture. Of a schedule with more ranks the first `most_ranks` are drawn, and the caption says so."""
    graph = StepGraph.of(schedule)
    level = _levels(graph)
    shown = min(len(schedule.ranks), most_ranks)
    lanes, height = _lanes(schedule, shown, ranks_per_node)
    columns = 1 + max(level, default=0)
    width = max(MARGIN * 2 + LABELS + columns * COLUMN, 560)
    boxes = [
        _Box(
            MARGIN + LABELS + level[node] * COLUMN,
            lanes[graph.rank[node], graph.block[node]],
            schedule.ranks[graph.rank[node]].blocks[graph.block[node]].channel,
        )
        if graph.rank[node] < shown
        else None
        for node in range(len(graph.instructions))
    ]
    elements = [
        text(f"{MARGIN}", MARGIN + 12, schedule.name, "title"),
        text(f"{MARGIN}", MARGIN + 28, _caption(schedule, columns, shown), "faint"),
        *_columns(columns, height),
        *_rows(schedule, lanes, shown, width, ranks_per_node),
        *_lines(graph, boxes),
        *(_box(graph, node, box) for node, box in enumerate(boxes) if box is not None),
        *_legend(schedule, height + 22),
    ]
    return document(width, height + LEGEND, elements, f"chunk flow of {schedule.name}", standalone=standalone)


def _levels(graph: StepGraph) -> list[int]:
    level = [0] * len(graph.instructions)
    for node in order_steps(graph):
        before = list(graph.before[node])
        if node in graph.message:
            before.append(graph.message[node])
        level[node] = max((level[other] + 1 for other in before), default=0)
    return level


def _lanes(schedule: Schedule, shown: int, per_node: int | None) -> tuple[dict[tuple[int, int], float], float]:
    """The top of each block's row, and the height of all."""
    lanes: dict[tuple[int, int], float] = {}
    y = float(TOP)
    for rank in schedule.ranks[:shown]:
        if rank.rank:
            y += NODE_GAP if per_node and rank.rank % per_node == 0 else RANK_GAP
        for block in range(len(rank.blocks)):
            lanes[rank.rank, block] = y
            y += LANE
    return lanes, y


def _caption(schedule: Schedule, columns: int, shown: int) -> str:
    blocks = sum(len(rank.blocks) for rank in schedule.ranks)
    part = "" if shown == len(schedule.ranks) else f", of which {shown} are drawn"
    slots = "1 slot" if schedule.slots == 1 else f"{schedule.slots} slots"
    spec = schedule.collective
    title = (
        spec.title if isinstance(spec, CustomCollective) else spec.name.value + (" in place" if spec.in_place else "")
    )
    return f"{title}, {len(schedule.ranks)} ranks{part}, {blocks} thread blocks, {columns} steps deep, {slots} a connection"


def _columns(columns: int, height: float) -> list[str]:
    found = []
    for column in range(columns):
        x = MARGIN + LABELS + column * COLUMN
        if column % 2:
            found.append(rectangle(f"{x - (COLUMN - BOX) / 2:g}", TOP - 4, f"{COLUMN}", height - TOP + 4, "track"))
        found.append(text(f"{x + BOX / 2:g}", TOP - 8, str(column), "faint small middle"))
    return found


def _rows(
    schedule: Schedule, lanes: dict[tuple[int, int], float], shown: int, width: float, per_node: int | None
) -> list[str]:
    found = []
    for rank in schedule.ranks[:shown]:
        if per_node and rank.rank % per_node == 0 and rank.blocks and len(schedule.ranks) > per_node:
            y = lanes[rank.rank, 0] - NODE_GAP / 2 + 1
            if rank.rank:
                found.append(f'<line class="end" x1="{MARGIN}" x2="{width - MARGIN:g}" y1="{y:g}" y2="{y:g}"/>')
        for number, block in enumerate(rank.blocks):
            y = lanes[rank.rank, number]
            if number == 0:
                found.append(text(f"{MARGIN}", y + 12, f"rank {rank.rank}", "plan"))
            middle = y + HEIGHT / 2
            found.append(
                f'<line class="grid" x1="{MARGIN + LABELS}" x2="{width - MARGIN:g}" y1="{middle:g}" y2="{middle:g}"/>'
            )
            found.append(
                text(f"{MARGIN + LABELS - 12}", y + 12, f"block {number}, ch {block.channel}", "faint small end-anchor")
            )
    return found


def _lines(graph: StepGraph, boxes: Sequence[_Box | None]) -> list[str]:
    found = []
    for receiving, sending in sorted(graph.message.items()):
        a, b = boxes[sending], boxes[receiving]
        if a is None or b is None:
            continue
        x, y, right, down = a.x + BOX, a.y + HEIGHT / 2, b.x, b.y + HEIGHT / 2
        bend = max(12.0, (right - x) / 2)
        colour = LINES[a.channel % len(LINES)]
        found.append(
            f'<path d="M{x:g} {y:g} C{x + bend:g} {y:g} {right - bend:g} {down:g} {right:g} {down:g}" '
            f'style="fill:none;stroke:var(--{colour});stroke-opacity:.7;stroke-width:1.3"/>'
            f'<circle cx="{right:g}" cy="{down:g}" r="2" style="fill:var(--{colour})"/>'
        )
    return found


def _box(graph: StepGraph, node: int, box: _Box) -> str:
    instruction = graph.instructions[node]
    label = _label(instruction)
    tone = _tone(instruction.opcode)
    where = f"rank {graph.rank[node]}, block {graph.block[node]}, step {graph.step[node]}"
    title = f"{where}: {instruction.opcode.value} {instruction.target or instruction.source}"
    shape = rectangle(f"{box.x:g}", box.y, f"{BOX}", HEIGHT, f"block {tone}", title, rounded=3)
    if len(label) * DIGIT > BOX:
        return shape
    return shape + text(f"{box.x + BOX / 2:g}", box.y + 12, label, f"number {tone}")


def _label(instruction: Instruction) -> str:
    """Chunks, with a letter for scratch: 3, 2-5, s0."""
    place = instruction.target or instruction.source
    assert place is not None
    letter = "" if place.buffer in ("input", "output") else "s"
    last = f"-{place.start + place.count - 1}" if place.count > 1 else ""
    return f"{letter}{place.start}{last}"


def _tone(opcode: Opcode) -> str:
    match opcode:
        case Opcode.COPY | Opcode.REDUCE:
            return "compute"
        case Opcode.SEND:
            return "send"
        case Opcode.RECEIVE:
            return "receive"
        case Opcode.RECEIVE_COPY_SEND:
            return "forward"
        case Opcode.RECEIVE_REDUCE:
            return "collective"
        case Opcode.RECEIVE_REDUCE_SEND | Opcode.RECEIVE_REDUCE_COPY_SEND:
            return "backward"


def _legend(schedule: Schedule, y: float) -> list[str]:
    words = {
        "send": "send",
        "backward": "receive, add, send on",
        "collective": "receive and add",
        "forward": "receive, send on",
        "receive": "receive",
        "compute": "local copy or sum",
    }
    used = {_tone(i.opcode) for rank in schedule.ranks for block in rank.blocks for i in block.instructions}
    found, x = [], float(MARGIN)
    for tone, label in words.items():
        if tone not in used:
            continue
        found.append(rectangle(f"{x:g}", y - 9, "11", 11, f"block {tone}", rounded=2))
        found.append(text(f"{x + 16:g}", y, label, "faint"))
        x += 30 + 6.2 * len(label)
    return found
