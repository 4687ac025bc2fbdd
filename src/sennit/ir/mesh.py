"""A mesh: named axes, in space (devices) and in time (the same device, one after another).

    mesh  := axes? (";" axes)? ("@" devices)?      space axes, then time axes, then the devices
    axes  := axis ("," axis)*
    axis  := NAME "=" SIZE
    devices := range ("," range)*
    range := DEVICE ("-" DEVICE)?

`dp=2,tp=4` is eight devices 0 to 7 in row-major order (the last axis varies fastest); `dp=2;mb=4@4-5` is devices 4
and 5, each passing four times. A *point* is one coordinate for every axis, in the order of `Mesh.axes`.

Prime refinement replaces an axis of size p1*p2*... by sub-axes `x.0`, `x.1`, ... of prime size, major to minor. It
leaves every device where it was: the mixed-radix digits of the coordinate are the sub-coordinates.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from sennit.errors import MeshError, ParseError
from sennit.ir.text import Scanner

__all__ = ["Axis", "AxisKind", "Mesh", "Point", "prime_factors", "print_ranges", "read_ranges"]

Point = tuple[int, ...]
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[0-9]+)*")


class AxisKind(Enum):
    SPACE = "space"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    size: int
    kind: AxisKind = AxisKind.SPACE

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise MeshError(f"{self.name!r} is no axis name", fix="use letters, digits and _, starting with a letter")
        if self.size < 1:
            raise MeshError(f"axis {self.name!r} has size {self.size}", fix="give it a size of at least 1")

    def __str__(self) -> str:
        return f"{self.name}={self.size}"


@dataclass(frozen=True, slots=True)
class Mesh:
    """Space axes first, then time axes; `devices` lists the device of each space coordinate in row-major order."""

    axes: tuple[Axis, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        for name in names:
            if names.count(name) > 1:
                raise MeshError(
                    f"axis {name!r} appears {names.count(name)} times in {names}", fix="give each axis its own name"
                )
        kinds = [axis.kind for axis in self.axes]
        if kinds != sorted(kinds, key=lambda kind: kind is AxisKind.TIME):
            raise MeshError(f"a time axis stands before a space axis in {names}", fix="list the space axes first")
        need = prod(axis.size for axis in self.space)
        if len(self.devices) != need:
            sizes = " x ".join(str(axis) for axis in self.space) or "no axes"
            raise MeshError(
                f"{len(self.devices)} devices for a mesh of {need} ({sizes})",
                fix=f"name {need} devices or change the axis sizes",
            )
        if len(set(self.devices)) != need or any(device < 0 for device in self.devices):
            raise MeshError(
                f"devices {list(self.devices)} are not distinct and non-negative", fix="name each device once"
            )

    @classmethod
    def make(
        cls, space: Mapping[str, int], time: Mapping[str, int] | None = None, devices: tuple[int, ...] | None = None
    ) -> Mesh:
        """`Mesh.make({"dp": 2, "tp": 4}, time={"mb": 8})`; devices are 0, 1, ... unless named."""
        axes = tuple(Axis(name, size) for name, size in space.items())
        axes += tuple(Axis(name, size, AxisKind.TIME) for name, size in (time or {}).items())
        return cls(axes, tuple(range(prod(space.values()))) if devices is None else devices)

    @property
    def space(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.kind is AxisKind.SPACE)

    @property
    def time(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.kind is AxisKind.TIME)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    def __contains__(self, name: object) -> bool:
        return any(axis.name == name for axis in self.axes)

    def index(self, name: str) -> int:
        """The position of an axis in a point."""
        for position, axis in enumerate(self.axes):
            if axis.name == name:
                return position
        known = ", ".join(str(axis) for axis in self.axes) or "none"
        raise MeshError(
            f"unknown axis {name!r}",
            where=f"mesh {self} has the axes {known}",
            fix="use one of these axes, or add it to the mesh",
        )

    def axis(self, name: str) -> Axis:
        return self.axes[self.index(name)]

    def size(self, name: str) -> int:
        return self.axis(name).size

    def points(self) -> Iterator[Point]:
        """Every coordinate in space and time, row-major."""
        return itertools.product(*(range(axis.size) for axis in self.axes))

    def device(self, point: Point) -> int:
        """The device at a point (or at a space coordinate alone)."""
        position = 0
        for axis, coordinate in zip(self.space, point, strict=False):
            position = position * axis.size + coordinate
        return self.devices[position]

    def coordinate(self, device: int) -> Point:
        """The space coordinate of a device."""
        try:
            position = self.devices.index(device)
        except ValueError:
            raise MeshError(
                f"device {device} is not in the mesh", where=str(self), fix="name a device of the mesh"
            ) from None
        digits: list[int] = []
        for axis in reversed(self.space):
            position, digit = divmod(position, axis.size)
            digits.append(digit)
        return tuple(reversed(digits))

    def group(self, device: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The devices that agree with `device` on every other space axis, ordered by `axes` (the first is major)."""
        point = list(self.coordinate(device))
        positions = [self.index(name) for name in axes]
        for position in positions:
            if self.axes[position].kind is AxisKind.TIME:
                raise MeshError(
                    f"axis {self.axes[position].name!r} is in time, and a group is of devices",
                    where=f"mesh {self}",
                    fix="name space axes",
                )
        members: list[int] = []
        for digits in itertools.product(*(range(self.axes[position].size) for position in positions)):
            for position, digit in zip(positions, digits, strict=True):
                point[position] = digit
            members.append(self.device(tuple(point)))
        return tuple(members)

    def at(self, **fixed: int) -> Mesh:
        """The part of the mesh where the given space axes have the given coordinates; those axes are dropped."""
        for name, coordinate in fixed.items():
            axis = self.axis(name)
            if axis.kind is AxisKind.TIME or not 0 <= coordinate < axis.size:
                raise MeshError(
                    f"there is no {name}={coordinate} in space",
                    where=f"mesh {self}",
                    fix=f"0 to {axis.size - 1} of a space axis",
                )
        points = itertools.product(
            *([fixed[axis.name]] if axis.name in fixed else range(axis.size) for axis in self.space)
        )
        return Mesh(
            tuple(axis for axis in self.axes if axis.name not in fixed), tuple(self.device(point) for point in points)
        )

    def with_time(self, **time: int) -> Mesh:
        """The same devices with time axes added."""
        return Mesh(self.axes + tuple(Axis(name, size, AxisKind.TIME) for name, size in time.items()), self.devices)

    def in_space(self) -> Mesh:
        """The mesh without its time axes."""
        return Mesh(self.space, self.devices)

    def sub_axes(self, name: str) -> tuple[Axis, ...]:
        """The prime sub-axes of an axis, major to minor: the axis itself where its size is prime or 1."""
        axis = self.axis(name)
        primes = prime_factors(axis.size)
        if len(primes) < 2:
            return (axis,)
        return tuple(Axis(f"{name}.{position}", prime, axis.kind) for position, prime in enumerate(primes))

    def refined(self) -> Mesh:
        """Every axis replaced by its prime sub-axes; every device stays where it was."""
        return Mesh(tuple(itertools.chain.from_iterable(self.sub_axes(name) for name in self.names)), self.devices)

    def __str__(self) -> str:
        text = ",".join(map(str, self.space))
        if self.time:
            text += ";" + ",".join(map(str, self.time))
        if self.devices != tuple(range(len(self.devices))) or not text:
            text += "@" + print_ranges(self.devices)
        return text

    @classmethod
    def read(cls, scanner: Scanner) -> Mesh:
        axes: list[Axis] = []
        if not scanner.peek(";") and not scanner.peek("@"):
            axes += _read_axes(scanner, AxisKind.SPACE)
        if scanner.accept(";"):
            axes += _read_axes(scanner, AxisKind.TIME)
        if scanner.accept("@"):
            return cls(tuple(axes), read_ranges(scanner))
        size = prod(axis.size for axis in axes if axis.kind is AxisKind.SPACE)
        return cls(tuple(axes), tuple(range(size)))

    @classmethod
    def parse(cls, text: str) -> Mesh:
        return Scanner.whole(text, cls.read)


def prime_factors(number: int) -> tuple[int, ...]:
    """The primes of a number in ascending order; none for 1."""
    factors: list[int] = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors) + ((number,) if number > 1 else ())


def _read_axes(scanner: Scanner, kind: AxisKind) -> list[Axis]:
    def one() -> Axis:
        name = scanner.word("an axis name")
        scanner.expect("=")
        return Axis(name, scanner.integer(), kind)

    axes = [one()]
    while scanner.accept(","):
        axes.append(one())
    return axes


def read_ranges(scanner: Scanner) -> tuple[int, ...]:
    devices: list[int] = []
    while True:
        first = scanner.integer()
        # "4-7" scans as 4 and then the integer -7
        last = -scanner.integer() if scanner.peek("-") else first
        if last < first:
            raise ParseError(f"the range {first}-{last} is empty", where=scanner.here(), fix=f"write {last}-{first}")
        devices += range(first, last + 1)
        if not scanner.accept(","):
            return tuple(devices)


def print_ranges(devices: tuple[int, ...]) -> str:
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
