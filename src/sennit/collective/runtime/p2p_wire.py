"""What `p2p_links.py` keeps of messages and connections, and their form on the wire.

connection := hello message*
hello      := magic (8 bytes) rank (u32)
message    := header payload
header     := label kind (u8) note (u32) label tag (i64) bytes (u64)
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from sennit.collective.runtime.p2p_ticket import Ticket

__all__ = [
    "FAREWELL",
    "HEADER",
    "HELLO",
    "MAGIC",
    "Address",
    "Early",
    "Incoming",
    "Label",
    "Outgoing",
    "Receive",
    "Send",
]

HEADER = struct.Struct("<BxxxIqQ")
HELLO = struct.Struct("<8sI")
MAGIC = b"sennit-1"
FAREWELL = 255  # the kind of a message that says why its sender leaves


class Label(NamedTuple):
    """What a message is: `kind` keeps users' tags apart from the library's own."""

    kind: int
    tag: int


class Address(NamedTuple):
    """Where a rank listens: `unix` for ranks of the same `host`, TCP for others."""

    host: str
    unix: str
    tcp: str
    port: int

    def encode(self) -> bytes:
        return "\n".join((self.host, self.unix, self.tcp, str(self.port))).encode()

    @classmethod
    def decode(cls, text: bytes) -> Address:
        host, unix, tcp, port = text.decode().split("\n")
        return cls(host, unix, tcp, int(port))


@dataclass(slots=True, eq=False)
class Send:
    ticket: Ticket
    parts: list[memoryview]  # what is not sent yet


@dataclass(slots=True, eq=False)
class Receive:
    ticket: Ticket
    buffer: memoryview
    note: int | None


@dataclass(slots=True, eq=False)
class Early:
    """A message that nobody has asked for yet, perhaps still arriving; `receive` is who asked meanwhile, or asked for
    another size.
    """

    note: int
    payload: bytearray
    complete: bool = False
    receive: Receive | None = None


@dataclass(slots=True, eq=False)
class Outgoing:
    socket: socket.socket
    queue: deque[Send] = field(default_factory=deque)
    watched: bool = False  # whether the thread waits for the kernel to take more


@dataclass(slots=True, eq=False)
class Incoming:
    """What is being read. Only the thread touches it."""

    socket: socket.socket
    peer: int | None = None  # until its hello is read
    head: bytearray = field(default_factory=bytearray)
    target: memoryview | None = None  # of the payload, and how much of it is there
    filled: int = 0
    receive: Receive | None = None
    early: Early | None = None
