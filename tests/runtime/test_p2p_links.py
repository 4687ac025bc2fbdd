"""Messages over sockets: matched by peer and label, in any order of asking, with the dead named and nothing left open."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sennit.collective.runtime.p2p_links import Label, Links
from sennit.errors import PeerError

WORD = Label(0, 7)
LIMIT = 20.0


class Meeting:
    """An all-gather of bytes between threads."""

    def __init__(self, size: int) -> None:
        self.said: dict[int, bytes] = {}
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int) -> Callable[[bytes], list[bytes]]:
        def gather(text: bytes) -> list[bytes]:
            self.said[rank] = text
            self.barrier.wait()
            return [self.said[other] for other in sorted(self.said)]

        return gather


def make(size: int, hosts: Sequence[str]) -> list[Links]:
    meeting = Meeting(size)
    made: list[Links | None] = [None] * size

    def start(rank: int) -> None:
        made[rank] = Links(
            rank, meeting.exchange(rank), host=hosts[rank % len(hosts)], address="127.0.0.1", timeout=LIMIT
        )

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [links for links in made if links is not None]


@contextmanager
def linked(size: int, hosts: Sequence[str] = ("here",)) -> Iterator[list[Links]]:
    links = make(size, hosts)
    try:
        yield links
    finally:
        for item in links:
            item.close()


def view(data: bytes | bytearray) -> memoryview:
    return memoryview(data)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("hosts", [("here",), ("here", "there")], ids=["unix", "tcp"])
def test_messages_arrive_in_any_order_of_asking(hosts: Sequence[str]) -> None:
    sizes = (0, 1, 1000, 3_000_000)
    with linked(2, hosts) as (a, b):
        sent = {tag: random.Random(tag).randbytes(size) for tag, size in enumerate(sizes)}
        tickets = [a.send(1, Label(0, tag), view(data)) for tag, data in sent.items()]
        got = {tag: bytearray(len(data)) for tag, data in sent.items()}
        for tag in reversed(sent):
            b.receive(0, Label(0, tag), view(got[tag])).wait(LIMIT)
        for ticket in tickets:
            ticket.wait(LIMIT)
        assert got == sent


def test_messages_of_one_label_keep_their_order_and_both_directions_go_at_once() -> None:
    size = 4_000_000
    with linked(3, ("here", "there", "here")) as links:
        buffers = {(r, p): bytearray(size) for r in range(3) for p in range(3) if p != r}
        tickets = []
        for rank, item in enumerate(links):
            for peer in range(3):
                if peer != rank:
                    tickets.append(item.receive(peer, WORD, view(buffers[rank, peer])))
                    tickets.append(item.send(peer, WORD, view(bytes([rank]) * size)))
        for ticket in tickets:
            ticket.wait(LIMIT)
        assert all(buffer == bytes([peer]) * size for (_, peer), buffer in buffers.items())
        for number in range(50):
            links[0].send(1, WORD, view(bytes([number])))
        one = bytearray(1)
        for number in range(50):
            links[1].receive(0, WORD, view(one)).wait(LIMIT)
            assert one[0] == number


def test_a_receive_from_any_rank_says_from_whom() -> None:
    with linked(3) as links:
        one = bytearray(1)
        ticket = links[0].receive_any(WORD, view(one))
        links[2].send(0, WORD, view(b"x"))
        ticket.wait(LIMIT)
        assert (ticket.source, one) == (2, b"x")
        links[1].send(0, WORD, view(b"y")).wait(LIMIT)
        again = links[0].receive_any(WORD, view(one))
        again.wait(LIMIT)
        assert (again.source, one) == (1, b"y")


def test_a_message_of_another_size_is_named() -> None:
    with linked(2) as (a, b):
        ticket = b.receive(0, WORD, view(bytearray(8)))
        a.send(1, WORD, view(b"12"))
        with pytest.raises(PeerError, match="receive of 8 bytes from rank 0 meets a message of 2 bytes"):
            ticket.wait(LIMIT)
        a.send(1, WORD, view(b"12345678"))  # the connection is still good
        b.receive(0, WORD, view(bytearray(8))).wait(LIMIT)


def test_a_late_rank_is_named() -> None:
    with linked(2) as (a, _), pytest.raises(PeerError, match="nothing came from rank 1"):
        a.receive(1, WORD, view(bytearray(1))).wait(0.05)
    with linked(2) as (a, _), pytest.raises(PeerError, match=r"did not end within 7 s"):
        a.receive(1, WORD, view(bytearray(1))).wait(-0.1, 7.0)  # of the 7 s that it had, nothing is left


def test_a_rank_that_leaves_is_named_even_if_it_never_sent() -> None:
    with linked(3) as links:
        ticket = links[0].receive(2, WORD, view(bytearray(1)))
        links[2].close()
        with pytest.raises(PeerError, match="rank 2 is gone"):
            ticket.wait(LIMIT)
        with pytest.raises(PeerError, match="rank 2 is gone"):
            links[0].send(2, WORD, view(b"x")).wait(LIMIT)
        with pytest.raises(PeerError, match="rank 2 is gone"):
            links[1].receive(2, WORD, view(bytearray(1))).wait(LIMIT)
        links[0].send(1, WORD, view(b"x"))
        links[1].receive(0, WORD, view(bytearray(1))).wait(LIMIT)


def test_what_was_sent_before_leaving_arrives() -> None:
    with linked(2, ("here", "there")) as (a, b):
        a.send(1, WORD, view(b"x" * 100_000)).wait(LIMIT)
        a.close()
        got = bytearray(100_000)
        b.receive(0, WORD, view(got)).wait(LIMIT)
        assert got == b"x" * 100_000


def test_a_closed_group_says_so_and_leaves_no_descriptor() -> None:
    before = open_descriptors()
    with linked(2) as (a, b):
        a.send(1, WORD, view(b"x"))
        pending = b.receive(0, Label(0, 9), view(bytearray(1)))
    with pytest.raises(PeerError):
        pending.wait(LIMIT)
    with pytest.raises(PeerError, match="closed"):
        a.send(1, WORD, view(b"x"))
    assert open_descriptors() == before


def test_a_stranger_is_turned_away() -> None:
    with linked(2) as (a, b):
        with socket.create_connection(("127.0.0.1", a.addresses[0].port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):  # or an end, by what was read of it
                assert stranger.recv(1) == b""
        b.send(0, WORD, view(b"x"))
        a.receive(1, WORD, view(bytearray(1))).wait(LIMIT)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*os.fork:RuntimeWarning")  # of JAX, where another test has loaded it
def test_a_forked_child_neither_uses_nor_keeps_the_connections() -> None:
    with linked(2) as (a, b):
        a.send(1, WORD, view(b"x"))
        b.receive(0, WORD, view(bytearray(1))).wait(LIMIT)
        child = os.fork()
        if child == 0:
            try:
                a.send(1, WORD, view(b"x"))
            except PeerError as error:
                signal.pause() if "forked" in str(error) else os._exit(1)
            os._exit(1)
        try:
            a.close()  # the child still lives, and holds nothing open
            with pytest.raises(PeerError, match="rank 0 is gone"):
                b.receive(0, WORD, view(bytearray(1))).wait(LIMIT)
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_what_was_sent_before_leaving_arrives_wherever_the_receiver_stands() -> None:
    """The connection of the sender may not even have been accepted when its end is seen on the other one."""
    for number in range(60):
        with linked(2, ("here", "there") if number % 2 else ("here",)) as (a, b):
            if number % 3 == 0:
                b.send(0, Label(0, 1), view(b"known")).wait(LIMIT)
            a.send(1, WORD, view(b"x" * 1000)).wait(LIMIT)
            a.close()
            got = bytearray(1000)
            b.receive(0, WORD, view(got)).wait(LIMIT)
            assert got == b"x" * 1000
            with pytest.raises(PeerError, match="rank 0 is gone"):
                b.receive(0, WORD, view(got)).wait(LIMIT)


def test_a_message_that_is_cut_off_fails() -> None:
    """The header came, and then the end: with the receive posted before, and after."""
    with linked(2) as (a, b):
        a.send(1, WORD, view(bytes(64 << 20)))  # more than sockets hold
        a.close("the test")
        with pytest.raises(PeerError, match="rank 0 is gone"):
            b.receive(0, WORD, view(bytearray(64 << 20))).wait(LIMIT)
    said = ""
    for _ in range(20):  # a receiver that takes it all at once may be done before the end comes
        with linked(2) as (a, b):
            ticket = b.receive(0, WORD, view(bytearray(64 << 20)))
            a.send(1, WORD, view(bytes(64 << 20)))
            a.close("the test")
            try:
                ticket.wait(LIMIT)
            except PeerError as error:
                said = str(error)
                break
    assert "rank 0 is gone" in said
