from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from reshard_strategies import Pair, any_pairs, even_pairs

from sennit.errors import LayoutError
from sennit.ir.exchange import traffic, transfers
from sennit.ir.layout import Layout
from sennit.ir.mesh import Mesh
from sennit.ir.region import Region


@settings(derandomize=True, deadline=None, max_examples=80)
@given(any_pairs().filter(lambda pair: not pair[0].pending and not pair[1].pending))
def test_transfers_tile_what_each_receiver_needs(pair: Pair) -> None:
    source, target = pair
    found = transfers(source, target)
    for point in target.mesh.points():
        device = target.mesh.device(point)
        needed = target.region(point)
        mine = [transfer for transfer in found if transfer.receiver == device]
        assert sum(transfer.region.size for transfer in mine) == needed.size
        assert len({transfer.sender for transfer in mine}) == len(mine)
        for transfer in mine:
            assert needed.contains(transfer.region)
            assert source.region(source.mesh.coordinate(transfer.sender)).contains(transfer.region)
        seen = np.zeros(source.shape, dtype=np.int64)
        for transfer in mine:
            seen[np.ix_(*transfer.region.indices()) if source.shape else ()] += 1
        assert needed.size == 0 or seen.max() == 1
        # what a device has it does not ask for
        if device in source.mesh.devices:
            own = source.region(source.mesh.coordinate(device)).intersect(needed).size
            assert own == sum(transfer.region.size for transfer in mine if transfer.sender == device)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(any_pairs().filter(lambda pair: not pair[0].pending and not pair[1].pending))
def test_traffic_counts_the_transfers(pair: Pair) -> None:
    source, target = pair
    moved = [transfer for transfer in transfers(source, target) if transfer.sender != transfer.receiver]
    counted = traffic(source, target)
    received: dict[int, int] = {}
    sent: dict[int, int] = {}
    for transfer in moved:
        received[transfer.receiver] = received.get(transfer.receiver, 0) + transfer.region.size
        sent[transfer.sender] = sent.get(transfer.sender, 0) + transfer.region.size
    messages = [sum(transfer.receiver == device for transfer in moved) for device in target.mesh.devices]
    assert counted.received == sum(received.values())
    assert counted.most_received == max(received.values(), default=0)
    assert counted.messages == max(messages, default=0)
    assert counted.most_sent >= max(sent.values(), default=0)
    if moved and len({transfer.region.size for transfer in transfers(source, target)}) == 1:
        assert counted.most_sent == max(sent.values())


@settings(derandomize=True, deadline=None, max_examples=50)
@given(even_pairs())
def test_parts_of_an_exchange_add_up(pair: Pair) -> None:
    source, target = pair
    if not source.shape or source.shape[0] < 2:
        return
    half = source.shape[0] // 2
    rest = list(source.shape[1:])
    parts = [
        Region.box([0, *(0 for _ in rest)], [half, *rest]),
        Region.box([half, *(0 for _ in rest)], [source.shape[0], *rest]),
    ]
    whole = sum(transfer.region.size for transfer in transfers(source, target))
    assert whole == sum(t.region.size for part in parts for t in transfers(source, target, part))
    assert all(part.contains(t.region) for part in parts for t in transfers(source, target, part))


def test_holders_share_the_sending() -> None:
    mesh = Mesh.parse("x=2,y=2")
    source, target = Layout.parse("[8{x}]", mesh), Layout.parse("[8]", mesh)
    senders = [t.sender for t in transfers(source, target) if t.sender != t.receiver]
    assert sorted(senders) == [0, 1, 2, 3]


def test_the_length_of_a_dim_costs_nothing() -> None:
    mesh = Mesh.parse("x=4,y=2")
    source, target = Layout.parse("[4000000000{x},2]", mesh), Layout.parse("[4000000000{y},2]", mesh)
    assert sum(transfer.region.size for transfer in transfers(source, target)) == 8 * 4000000000
    assert traffic(source, target).received == 8 * 4000000000 - 8 * 1000000000


def test_an_exchange_does_not_reduce() -> None:
    mesh = Mesh.parse("x=2")
    with pytest.raises(LayoutError, match="would have to reduce"):
        transfers(Layout.parse("[4]{sum:x}", mesh), Layout.parse("[4]", mesh))
    with pytest.raises(LayoutError, match=r"from shape \[4\] to shape \[5\]"):
        transfers(Layout.parse("[4]", mesh), Layout.parse("[5]", mesh))
