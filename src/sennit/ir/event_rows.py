"""Events and memory samples of a timeline as arrays, where one row stands for the devices that did the same.

A simulated step of 16384 devices has tens of millions of events, and most of them say the same of another device.
`EventRows` holds one row for all devices of a lane that ran alike; it *is* the sequence of its events, each made when
it is asked for:

    row    := start, stop, label (stream, category, name), bytes, devices, task, cause
    task   := the rows that started and ended together: a collective, a sender with its receiver; they are neighbours
    cause  := the task whose end let this one start, or -1

The events of a task are numbered row by row, and in a row device by device. An event's `after` is the event of the
cause's task on the same device where there is one, else the one at the same place of its row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from sennit.ir.event import Category, Event, Memory, MemoryKind

__all__ = ["EventRows", "Label", "MemoryRows", "MemoryTrack"]

Label = tuple[str, Category, str]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Cause:
    """The number of a task's first event, and which of its events is on a device."""

    first: int
    places: dict[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class EventRows(Sequence[Event]):
    """All arrays are by row, `first_row` by task; `devices[group[row]]` are those of a row.

    Rows are in order of start.
    """

    start: Floats
    stop: Floats
    label: Ints
    bytes: Ints
    group: Ints
    task: Ints
    cause: Ints
    first_row: Ints
    labels: tuple[Label, ...]
    devices: tuple[tuple[int, ...], ...]
    first_event: Ints  # by row, and the count of all events at the end

    @classmethod
    def of(
        cls,
        columns: tuple[Floats, Floats, Ints, Ints, Ints, Ints, Ints],
        labels: tuple[Label, ...],
        devices: tuple[tuple[int, ...], ...],
    ) -> EventRows:
        start, stop, label, size, group, task, cause = columns
        counts = np.array([len(item) for item in devices], dtype=np.int64)[group]
        first_row = np.flatnonzero(np.diff(task, prepend=-1))
        first_event = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
        return cls(start, stop, label, size, group, task, cause, first_row, labels, devices, first_event)

    def __len__(self) -> int:
        return int(self.first_event[-1])

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Event, ...]: ...

    def __getitem__(self, index: int | slice) -> Event | tuple[Event, ...]:
        if isinstance(index, slice):
            return tuple(self[position] for position in range(*index.indices(len(self))))
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"event {index} of {len(self)}")
        row = int(np.searchsorted(self.first_event, position, side="right")) - 1
        cause = self._cause(int(self.cause[row]))
        return self._row(row, cause)[position - int(self.first_event[row])]

    def __iter__(self) -> Iterator[Event]:
        last, cause = -1, None
        for row, before in enumerate(self.cause.tolist()):
            if before != last or cause is None:
                last, cause = before, self._cause(before)
            yield from self._row(row, cause)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def _cause(self, task: int) -> _Cause:
        if task < 0:
            return _Cause(0, {})
        begin = int(self.first_row[task])
        end = int(self.first_row[task + 1]) if task + 1 < len(self.first_row) else len(self.start)
        devices = [device for group in self.group[begin:end].tolist() for device in self.devices[group]]
        places = {device: place for place, device in reversed(list(enumerate(devices)))}
        return _Cause(int(self.first_event[begin]), places)

    def _row(self, row: int, cause: _Cause) -> list[Event]:
        """The events of a row."""
        stream, category, name = self.labels[self.label[row]]
        start, stop, size = float(self.start[row]), float(self.stop[row]), int(self.bytes[row])
        total = len(cause.places)
        events = []
        for place, device in enumerate(self.devices[self.group[row]]):
            after = None if not total else cause.first + cause.places.get(device, place % total)
            events.append(Event(device, stream, category, name, start, stop, size, after))
        return events

    # ---- what a timeline asks for, without making events -------------------------------------------------------------

    def all_devices(self) -> set[int]:
        return {device for group in set(self.group.tolist()) for device in self.devices[group]}

    def unlike(self, devices: Sequence[int]) -> tuple[int, ...]:
        """The first of each set of these devices that share all their rows."""
        groups: dict[int, list[int]] = {}
        for number, members in enumerate(self.devices):
            for device in members:
                groups.setdefault(device, []).append(number)
        first: dict[tuple[int, ...], int] = {}
        for device in devices:
            first.setdefault(tuple(groups.get(device, ())), device)
        return tuple(first.values())

    def groups_of(self, device: int) -> list[int]:
        return [number for number, devices in enumerate(self.devices) if device in devices]

    def intervals(self, device: int, categories: Sequence[Category]) -> list[tuple[float, float]]:
        wanted = np.array([label[1] in categories for label in self.labels], dtype=np.bool_)
        mine = np.isin(self.group, self.groups_of(device)) & wanted[self.label]
        return list(zip(self.start[mine].tolist(), self.stop[mine].tolist(), strict=True))

    def of_device(self, device: int) -> list[Event]:
        """Its events in order, without `after`."""
        found = []
        mine = np.flatnonzero(np.isin(self.group, self.groups_of(device)))
        rows = zip(*(column[mine].tolist() for column in (self.label, self.start, self.stop, self.bytes)), strict=True)
        for label, start, stop, size in rows:
            stream, category, name = self.labels[label]
            found.append(Event(device, stream, category, name, start, stop, size))
        return found

    def wire_bytes(self, device: int | None) -> int:
        if device is None:
            return int((self.bytes * np.diff(self.first_event)).sum())
        return int(self.bytes[np.isin(self.group, self.groups_of(device))].sum())

    def last(self) -> int:
        """The first of the events that end last."""
        return int(self.first_event[int(np.argmax(self.stop))])


@dataclass(frozen=True, slots=True, eq=False)
class MemoryTrack:
    """Samples that some devices have in common: bytes by time and kind, in the order of `MemoryKind`."""

    devices: tuple[int, ...]
    times: Floats
    live: NDArray[np.int64]

    def samples(self) -> Iterator[tuple[float, tuple[tuple[MemoryKind, int], ...]]]:
        kinds = list(MemoryKind)
        for time, row in zip(self.times.tolist(), self.live.tolist(), strict=True):
            yield time, tuple([(kind, size) for kind, size in zip(kinds, row, strict=True) if size])


@dataclass(frozen=True, slots=True, eq=False)
class MemoryRows(Sequence[Memory]):
    """The samples of all tracks in order of time, then of device."""

    tracks: tuple[MemoryTrack, ...]

    def __len__(self) -> int:
        return sum(len(track.devices) * len(track.times) for track in self.tracks)

    def __iter__(self) -> Iterator[Memory]:
        made = [
            (time, device, number, position)
            for number, track in enumerate(self.tracks)
            for position, time in enumerate(track.times.tolist())
            for device in track.devices
        ]
        lives = [[live for _, live in track.samples()] for track in self.tracks]
        for time, device, number, position in sorted(made):
            yield Memory(device, time, lives[number][position])

    @overload
    def __getitem__(self, index: int) -> Memory: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Memory, ...]: ...

    def __getitem__(self, index: int | slice) -> Memory | tuple[Memory, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def all_devices(self) -> set[int]:
        return {device for track in self.tracks for device in track.devices}

    def peak(self, device: int) -> int:
        peaks = [int(track.live.sum(axis=1).max(initial=0)) for track in self.tracks if device in track.devices]
        return max(peaks, default=0)
