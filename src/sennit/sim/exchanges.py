"""Exchanges for the clock: messages between devices, cut into parts that have nothing to do with each other.

Devices that a chain of messages of one exchange joins form a *part*; a device without a message, or with a copy of its
own alone, is a part by itself and waits for nobody. A part starts when all its devices have come to it, and its
messages lie on the wires together, as those of a send do: in the plain case (the k-th device to the k-th) each pair is
a part, and the exchange takes what a send and its receive take.

Micro-batches of an even layout move the same bytes between the same devices, so what was found for one serves for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sennit.ir.program import Buffer, Exchange, Program
from sennit.ir.program_exchange import Meeting, exchange_meetings, exchange_transfers, moves_alike

__all__ = ["Exchanges", "Message", "Part"]

Message = tuple[int, int, int]  # sender, receiver, bytes


@dataclass(frozen=True, slots=True)
class Part:
    """Devices in order, and their messages."""

    devices: tuple[int, ...]
    messages: tuple[Message, ...]


class Exchanges:
    """The parts of every exchange of a program, found when asked for."""

    def __init__(self, program: Program) -> None:
        has_any = any(isinstance(step, Exchange) for lane in program.lanes for step in lane.steps)
        self.meetings: Mapping[str, Meeting] = exchange_meetings(program) if has_any else {}
        self.found: dict[object, dict[int, Part]] = {}  # by what is moved, then by device
        self.of_label: dict[str, dict[int, Part]] = {}

    def devices(self, label: str) -> tuple[int, ...]:
        """All that take part in an exchange."""
        meeting = self.meetings[label]
        return tuple(dict.fromkeys((*meeting.source.layout.mesh.devices, *meeting.result.layout.mesh.devices)))

    def parts(self, label: str, devices: tuple[int, ...]) -> tuple[Part, ...]:
        """The parts of an exchange that these devices belong to, in order of their first device."""
        if label not in self.of_label:
            meeting = self.meetings[label]
            key = moves_alike(meeting.source, meeting.result)
            if key not in self.found:
                self.found[key] = _parts(meeting.source, meeting.result)
            self.of_label[label] = self.found[key]
        by_device = self.of_label[label]
        mine = {id(part): part for part in (by_device[device] for device in devices)}
        return tuple(sorted(mine.values(), key=lambda part: part.devices))


def _parts(source: Buffer, result: Buffer) -> dict[int, Part]:
    messages = [
        (transfer.sender, transfer.receiver, transfer.region.size * source.dtype.itemsize)
        for transfer in exchange_transfers(source, result)
        if transfer.sender != transfer.receiver
    ]
    members = {device: [device] for device in (*source.layout.mesh.devices, *result.layout.mesh.devices)}
    for sender, receiver, _ in messages:
        one, other = members[sender], members[receiver]
        if one is not other:
            one, other = (one, other) if len(one) >= len(other) else (other, one)
            one += other
            members.update((device, one) for device in other)
    of_part: dict[int, list[Message]] = {id(group): [] for group in members.values()}
    for message in messages:
        of_part[id(members[message[0]])].append(message)
    parts = {id(group): Part(tuple(sorted(group)), tuple(of_part[id(group)])) for group in members.values()}
    return {device: parts[id(group)] for device, group in members.items()}
