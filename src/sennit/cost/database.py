"""Measured times on disk: kernels by what they do, and the collectives of process groups.

    database := places, each with kernels and channels                      one JSON file, written whole or not at all
    place    := device, torch version, threads                              times of one place say nothing of another
    kernel   := signature, strides, quantiles, samples                      (`fuse/signature.py`: operators, shapes, element types, scalars)
    channel  := group, points (bytes, seconds), latency, per byte, queued, rates beside computing

`strides` are those of the inputs; none where all lie plainly. A kernel that is measured again replaces what was known.
`Database.with_kernels` and `with_channel` give new databases: nothing is changed in place, and `save` replaces the file
at once, so that a reader never sees half of it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from sennit.errors import RunError

__all__ = ["Database", "MeasuredChannel", "MeasuredKernel", "Place", "Records", "load_database"]

SCHEMA = "sennit.profile/1"


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where something was measured: the device's name, the version of torch, and the threads that a kernel may use."""

    device: str
    torch: str
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.device}, torch {self.torch}, {self.threads} thread{'s' if self.threads > 1 else ''}"


class MeasuredKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`quantiles` are seconds: the least, a quarter, the median, three quarters, the greatest."""

    signature: str
    quantiles: tuple[float, float, float, float, float]
    samples: int
    strides: tuple[tuple[int, ...], ...] = ()
    compiled: bool = False

    @property
    def seconds(self) -> float:
        """The lower quartile: what else runs on a machine only makes a kernel longer."""
        return self.quantiles[1]


class MeasuredChannel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All-reduces of a process group:

    `latency + per_byte * bytes`, `queued` more behind another; rates while computing goes on, and seconds of computing
    that sending one off takes.
    """

    group: str
    ranks: int
    latency: float
    per_byte: float
    queued: float
    compute_rate: float = 1.0
    channel_rate: float = 1.0
    issued: float = 0.0


class Records(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    place: Place
    kernels: tuple[MeasuredKernel, ...] = ()
    channels: tuple[MeasuredChannel, ...] = ()


class Database(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Records of several places, those that were added to last at the end."""

    schema: str = SCHEMA
    places: tuple[Records, ...] = ()

    def records(self, place: Place) -> Records:
        return next((item for item in self.places if item.place == place), Records(place))

    def place_for(self, signatures: Collection[str]) -> Place:
        """Where most of these kernels were measured."""
        counts = [(len(self.seconds(item.place).keys() & set(signatures)), item.place) for item in self.places]
        count, place = max(counts, key=lambda item: item[0], default=(0, None))
        if place is None or count == 0:
            raise RunError(
                f"none of the model's {len(signatures)} kernels was measured",
                fix="fill the database with `sennit profile MODEL`, with the same sizes and element type",
            )
        return place

    def seconds(self, place: Place, *, compiled: bool = False) -> dict[str, float]:
        """By signature.

        Where a kernel was measured with several strides, plain ones count; of compiled and not, the faster, or with
        `compiled` the compiled one where there is.
        """
        found: dict[str, tuple[bool, bool, float]] = {}
        for kernel in self.records(place).kernels:
            candidate = (bool(kernel.strides), compiled and not kernel.compiled, kernel.seconds)
            found[kernel.signature] = min(found.get(kernel.signature, candidate), candidate)
        return {signature: seconds for signature, (_, _, seconds) in found.items()}

    def with_kernels(self, place: Place, kernels: Iterable[MeasuredKernel]) -> Database:
        records = self.records(place)
        known = {(item.signature, item.strides, item.compiled): item for item in records.kernels}
        known.update(((item.signature, item.strides, item.compiled), item) for item in kernels)
        return self._with(msgspec.structs.replace(records, kernels=tuple(known.values())))

    def with_channel(self, place: Place, channel: MeasuredChannel) -> Database:
        records = self.records(place)
        others = tuple(item for item in records.channels if (item.group, item.ranks) != (channel.group, channel.ranks))
        return self._with(msgspec.structs.replace(records, channels=(*others, channel)))

    def _with(self, records: Records) -> Database:
        others = tuple(item for item in self.places if item.place != records.place)
        return Database(self.schema, (*others, records))

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(self), indent=1))
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def load_database(path: Path, *, missing_is_empty: bool = False) -> Database:
    if missing_is_empty and not path.exists():
        return Database()
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Database)
    except OSError as error:
        raise RunError(
            f"cannot read {path}: {error.strerror}", fix="name a file that `sennit profile` wrote"
        ) from error
    except msgspec.DecodeError as error:
        raise RunError(
            f"{path} is no database of measurements: {error}", fix="measure anew with `sennit profile`"
        ) from error
    if found.schema != SCHEMA:
        raise RunError(
            f"{path} has the schema {found.schema!r}, not {SCHEMA!r}", fix="measure anew with `sennit profile`"
        )
    return found
