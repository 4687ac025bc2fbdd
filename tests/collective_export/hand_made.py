"""Schedules written by hand, instruction by instruction: what the exports are tested on beside compiled ones."""

from __future__ import annotations

from sennit.ir.collective import CollectiveName, CollectiveSpec, Scratch
from sennit.ir.schedule import Block, Instruction, Opcode, Place, RankSchedule, Schedule, Wait


def chunk(buffer: str, start: int, count: int = 1) -> Place:
    return Place(buffer, start, count)


def ring_all_reduce(ranks: int, channels: int = 1) -> Schedule:
    """In place. Each channel is a ring over its own `ranks` chunks, one block a rank."""
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * channels, in_place=True)
    return Schedule(
        f"ring {ranks}",
        spec,
        2,  # a block that passes on holds its incoming slot until the next rank has a free one: with 1 all would wait
        tuple(
            RankSchedule(rank, tuple(_ring_block(rank, ranks, channel) for channel in range(channels)))
            for rank in range(ranks)
        ),
    )


def _ring_block(rank: int, ranks: int, channel: int) -> Block:
    def place(step: int) -> Place:
        return chunk("input", channel * ranks + (rank - step) % ranks)

    code = [Instruction(Opcode.SEND, source=place(0))]
    code += [Instruction(Opcode.RECEIVE_REDUCE_SEND, source=place(step)) for step in range(1, ranks - 1)]
    code.append(Instruction(Opcode.RECEIVE_REDUCE_COPY_SEND, target=place(ranks - 1)))
    code += [Instruction(Opcode.RECEIVE_COPY_SEND, target=place(step)) for step in range(ranks, 2 * ranks - 2)]
    code.append(Instruction(Opcode.RECEIVE, target=place(2 * ranks - 2)))
    return Block((rank + 1) % ranks, (rank - 1) % ranks, channel, tuple(code))


def all_pairs_all_reduce(ranks: int, width: int = 1) -> Schedule:
    """Out of place, `width` chunks a rank: gather my part from all into two scratch buffers, add, send the sum to all."""
    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks * width)
    return Schedule(f"all pairs {ranks}", spec, 1, tuple(_pairs_rank(rank, ranks, width) for rank in range(ranks)))


def _pairs_rank(rank: int, ranks: int, width: int) -> RankSchedule:
    peers = [peer for peer in range(ranks) if peer != rank]
    low, high = peers[: len(peers) // 2], peers[len(peers) // 2 :]
    mine = chunk("output", rank * width, width)

    def landing(peer: int) -> Place:
        name, group = ("low", low) if peer in low else ("high", high)
        return chunk(name, group.index(peer) * width, width)

    adder = len(peers)
    adding = [Instruction(Opcode.COPY, chunk("input", rank * width, width), mine)]
    adding += [Instruction(Opcode.REDUCE, landing(peer), mine, (Wait(number, 1),)) for number, peer in enumerate(peers)]
    blocks = [
        Block(
            peer,
            peer,
            0,
            (
                Instruction(Opcode.SEND, source=chunk("input", peer * width, width)),
                Instruction(Opcode.RECEIVE, target=landing(peer)),
                Instruction(Opcode.SEND, source=mine, after=(Wait(adder, len(peers)),)),
                Instruction(Opcode.RECEIVE, target=chunk("output", peer * width, width)),
            ),
        )
        for peer in peers
    ]
    scratch = tuple(Scratch(rank, name, len(group) * width) for name, group in (("low", low), ("high", high)) if group)
    return RankSchedule(rank, (*blocks, Block(None, None, 0, tuple(adding))), scratch)


def ring_all_gather(ranks: int, chunks: int = 1) -> Schedule:
    """Out of place: copy my part, then pass parts around."""
    spec = CollectiveSpec(CollectiveName.ALL_GATHER, ranks, chunks)

    def block(rank: int) -> tuple[Block, Block]:
        def part(step: int) -> Place:
            return chunk("output", (rank - step) % ranks * chunks, chunks)

        code = [Instruction(Opcode.SEND, source=part(0), after=(Wait(1, 0),))]
        code += [Instruction(Opcode.RECEIVE_COPY_SEND, target=part(step)) for step in range(1, ranks - 1)]
        code.append(Instruction(Opcode.RECEIVE, target=part(ranks - 1)))
        copy = Instruction(Opcode.COPY, chunk("input", 0, chunks), part(0))
        return Block((rank + 1) % ranks, (rank - 1) % ranks, 0, tuple(code)), Block(None, None, 0, (copy,))

    return Schedule(f"gather {ranks}", spec, 2, tuple(RankSchedule(rank, block(rank)) for rank in range(ranks)))
