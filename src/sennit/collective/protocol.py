"""How messages cross a connection: the protocols of NCCL's device code, which MSCCL's executor runs on too.

A connection is a ring of slots in the receiver's memory. A message is cut to fit a slot; each slot is passed on in
`slices`, so that a slice crosses the wire while the one before it is already being read.

| | slot bytes | slots | slices | a thread block carries | seconds before the first message |
|---|---|---|---|---|---|
| Simple: stores, then a fence and a flag | 2 MiB (4 of 8 steps of 512 KiB) | 2 | 2 | 20 GB/s | 8.4 us |
| LL: 4 bytes of data, 4 of flag | 32 KiB | 8 | 1 | 5 GB/s | 6.6 us |
| LL128: 120 bytes of data, 8 of flag | 576000 | 8 | 2 | 16.7 GB/s | 14 us |

Slots and slot bytes are NCCL's default buffers (src/include/device.h and the MSCCL interpreter's chunk steps); rates of
LL128 and the base latencies are those of a ring in NCCL's tuning table (src/graph/tuning.cc); LL is a quarter of Simple
there; the rate of Simple is what NCCL's search gives a channel on NVLink; rates are of an A100. `cluster/` gives each
link's latency and efficiency by protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from sennit.errors import CollectiveError

__all__ = ["Protocol", "Transport"]


@dataclass(frozen=True, slots=True)
class Transport:
    """The figures of one row of the module's table. `link` is the name that `cluster/` knows the protocol by."""

    slot_bytes: int
    slots: int
    slices: int
    block_rate: float
    launch: float
    link: str | None


class Protocol(Enum):
    SIMPLE = "Simple"
    LL = "LL"
    LL128 = "LL128"

    @property
    def transport(self) -> Transport:
        match self:
            case Protocol.SIMPLE:
                return Transport(2 << 20, 2, 2, 20e9, 8.4e-6, None)
            case Protocol.LL:
                return Transport(32 << 10, 8, 1, 5e9, 6.6e-6, "LL")
            case Protocol.LL128:
                return Transport(576_000, 8, 2, 16.7e9, 14.0e-6, "LL128")

    @classmethod
    def named(cls, name: str) -> Protocol:
        """By name, in any case of letters."""
        for protocol in cls:
            if protocol.value.lower() == name.lower():
                return protocol
        raise CollectiveError(
            f"unknown protocol {name!r}", fix=f"use one of {', '.join(protocol.value for protocol in cls)}"
        )
