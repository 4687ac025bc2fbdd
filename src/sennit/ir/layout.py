"""How one array lies on a mesh: the type that every strand shares.

    layout  := "[" (dim ("," dim)*)? "]" ("{" pending (";" pending)* "}")?
    dim     := SIZE ("{" digit ("," digit)* "}")?        digits major to minor
    digit   := AXIS (":" STRIDE)?
    pending := ("sum" | "max" | "min" | "prod") ":" AXIS ("," AXIS)*

**Meaning.** Per axis a of the mesh, of size p, a layout says one of three things:

- `Split(dim, stride)`: index i of the dim lies on coordinate `(i // stride) % p`;
- `Pending(op)`: every coordinate holds a value of full extent, and the array is their reduction by op;
- nothing: every coordinate holds the same values (in space: a replica; in time: done once).

The piece at a point holds, per dim, the indices whose every digit matches the point, in ascending order. Reducing the
pieces over the pending axes gives the array's values there. That is the whole definition; `Layout.indices` is it.

**Digits.** `(i // s) % p` is the digit of i at positions s to s*p of a mixed-radix number. Two axes on one dim must
take disjoint digits: the larger stride is a multiple of the smaller stride times its axis size. Dropping an axis,
adding one or moving one never touches the others, in any order. The plain block split of size g over axes a, b, ...
(major to minor, K their product) takes c = ceil(g / K) as the least stride: device k of K holds indices k*c to (k+1)*c.
With uneven g the last pieces are short or empty; the definition is the same. A layout is *even* where stride * size
divides the dim for every digit; then all pieces have one shape and each dim is a list of factors (`Layout.factors`):
over factors, every layout is a block layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from sennit.errors import LayoutError, ParseError
from sennit.ir.mesh import Mesh, Point
from sennit.ir.region import Region
from sennit.ir.text import Scanner

__all__ = ["Digit", "Entry", "Factor", "Layout", "Pending", "Reduction", "Split", "block_strides"]


class Reduction(Enum):
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    PROD = "prod"


@dataclass(frozen=True, slots=True)
class Split:
    """Index i of `dim` lies on coordinate `(i // stride) % size` of the axis."""

    dim: int
    stride: int


@dataclass(frozen=True, slots=True)
class Pending:
    """Each coordinate of the axis holds a part; the array is their reduction."""

    op: Reduction = Reduction.SUM


Entry = Split | Pending


@dataclass(frozen=True, slots=True)
class Digit:
    """An axis of `size` that takes the digit of a dim at `stride`."""

    axis: str
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of an even dim: on an axis, or local where `axis` is None."""

    size: int
    axis: str | None


@dataclass(frozen=True, slots=True)
class Layout:
    """`entries` names the axes that are not replicated, in the order of the mesh."""

    mesh: Mesh
    shape: tuple[int, ...]
    entries: tuple[tuple[str, Entry], ...] = ()

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise LayoutError(
                f"shape {list(self.shape)} has a negative size", where=self._where(), fix="use sizes of 0 or more"
            )
        names = [name for name, _ in self.entries]
        for name in names:
            if names.count(name) > 1:
                raise LayoutError(
                    f"axis {name!r} is used {names.count(name)} times",
                    where=self._where(),
                    fix="use each axis once at most",
                )
        positions = [self.mesh.index(name) for name in names]
        if positions != sorted(positions):
            ordered = tuple(sorted(self.entries, key=lambda entry: self.mesh.index(entry[0])))
            object.__setattr__(self, "entries", ordered)
        for name, entry in self.entries:
            match entry:
                case Split(dim, stride):
                    if not 0 <= dim < len(self.shape):
                        raise LayoutError(
                            f"axis {name!r} splits dim {dim} of an array with {len(self.shape)} dims",
                            where=self._where(),
                            fix="split a dim that the array has; dims count from 0",
                        )
                    if stride < 1:
                        raise LayoutError(
                            f"axis {name!r} has stride {stride}", where=self._where(), fix="use a stride of 1 or more"
                        )
                case Pending():
                    pass
        for dim in range(len(self.shape)):
            self._check_disjoint(dim)

    def _where(self) -> str:
        return f"an array of shape {list(self.shape)} on mesh {self.mesh}"

    def _check_disjoint(self, dim: int) -> None:
        for major, minor in pairwise(self.digits(dim)):
            if major.stride % (minor.stride * minor.size):
                raise LayoutError(
                    f"axes {major.axis!r} (stride {major.stride}) and {minor.axis!r} (stride {minor.stride}, size {minor.size}) "
                    f"take overlapping digits of dim {dim}",
                    where=self._where(),
                    fix=f"give {major.axis!r} a stride that is a multiple of {minor.stride * minor.size}",
                )

    @classmethod
    def make(cls, mesh: Mesh, shape: Sequence[int], entries: Mapping[str, Entry | None] | None = None) -> Layout:
        """From a mapping; axes mapped to None are replicated."""
        return cls(
            mesh, tuple(shape), tuple((name, entry) for name, entry in (entries or {}).items() if entry is not None)
        )

    @classmethod
    def block(
        cls,
        mesh: Mesh,
        shape: Sequence[int],
        dims: Mapping[int, Sequence[str]] | None = None,
        pending: Mapping[str, Reduction] | None = None,
    ) -> Layout:
        """Plain blocks: `dims` maps a dim to its axes, major to minor."""
        entries: list[tuple[str, Entry]] = []
        for dim, axes in (dims or {}).items():
            if not 0 <= dim < len(shape):
                raise LayoutError(
                    f"dim {dim} of an array of shape {list(shape)}", fix=f"use dims 0 to {len(shape) - 1}"
                )
            strides = block_strides(shape[dim], [mesh.size(axis) for axis in axes])
            entries += [(axis, Split(dim, stride)) for axis, stride in zip(axes, strides, strict=True)]
        entries += [(axis, Pending(op)) for axis, op in (pending or {}).items()]
        return cls(mesh, tuple(shape), tuple(entries))

    # ---- what an axis does -------------------------------------------------------------------------------------------

    def entry(self, axis: str) -> Entry | None:
        for name, entry in self.entries:
            if name == axis:
                return entry
        return None

    def split(self, axis: str) -> Split | None:
        entry = self.entry(axis)
        return entry if isinstance(entry, Split) else None

    def with_entry(self, axis: str, entry: Entry | None) -> Layout:
        """The same layout with one axis changed."""
        return Layout.make(self.mesh, self.shape, {**dict(self.entries), axis: entry})

    def on(self, mesh: Mesh) -> Layout:
        """The same entries on another mesh that has their axes."""
        return Layout(mesh, self.shape, self.entries)

    @property
    def pending(self) -> tuple[tuple[str, Reduction], ...]:
        return tuple((name, entry.op) for name, entry in self.entries if isinstance(entry, Pending))

    # ---- where the indices are ---------------------------------------------------------------------------------------

    def digits(self, dim: int) -> tuple[Digit, ...]:
        """The axes that split a dim, major to minor."""
        found = [
            Digit(name, self.mesh.size(name), entry.stride)
            for name, entry in self.entries
            if isinstance(entry, Split) and entry.dim == dim
        ]
        # an axis of size 1 takes an empty digit: among equal strides it is the minor one
        return tuple(sorted(found, key=lambda digit: (-digit.stride, -digit.size)))

    def indices(self, dim: int, point: Point) -> NDArray[np.int64]:
        """The definition: the global indices of `dim` that lie at `point`, ascending."""
        every = np.arange(self.shape[dim], dtype=np.int64)
        here = np.ones(self.shape[dim], dtype=np.bool_)
        for digit in self.digits(dim):
            here &= (every // digit.stride) % digit.size == point[self.mesh.index(digit.axis)]
        return every[here]

    def region(self, point: Point) -> Region:
        """The global indices at `point`, per dim."""
        return Region.of_indices(self.indices(dim, point) for dim in range(len(self.shape)))

    def offset(self, point: Point) -> tuple[int, ...]:
        """The first global index at `point`, per dim; the dim's size where the piece is empty."""
        firsts = []
        for dim, size in enumerate(self.shape):
            indices = self.indices(dim, point)
            firsts.append(int(indices[0]) if len(indices) else size)
        return tuple(firsts)

    @property
    def is_even(self) -> bool:
        """Whether every point holds a piece of one shape, and dims factor."""
        return all(
            self.shape[entry.dim] % (entry.stride * self.mesh.size(name)) == 0
            for name, entry in self.entries
            if isinstance(entry, Split)
        )

    def local_shape(self, point: Point | None = None) -> tuple[int, ...]:
        """The shape of the piece at `point`, which an even layout does not need."""
        if self.is_even:
            return tuple(size // prod(digit.size for digit in self.digits(dim)) for dim, size in enumerate(self.shape))
        if point is None:
            raise LayoutError(
                f"layout {self} is uneven: its pieces differ in shape", where=self._where(), fix="name a point"
            )
        return tuple(len(self.indices(dim, point)) for dim in range(len(self.shape)))

    def local_elements(self) -> int:
        """Elements of the largest piece."""
        if self.is_even:
            return prod(self.local_shape())
        return max(prod(self.local_shape(point)) for point in self.mesh.points())

    def factors(self, dim: int) -> tuple[Factor, ...]:
        """An even dim as a product of factors, major to minor, each on one axis or local; local ones are merged."""
        if not self.is_even:
            raise LayoutError(
                f"layout {self} is uneven: its dims do not factor",
                where=self._where(),
                fix="pad the dims, or use the regions of its points",
            )
        factors: list[Factor] = []
        above = self.shape[dim]  # the stride just above what is still to be described
        for digit in self.digits(dim):
            local = above // (digit.stride * digit.size)
            if local != 1:
                factors.append(Factor(local, None))
            factors.append(Factor(digit.size, digit.axis))
            above = digit.stride
        if above != 1 or not factors:
            factors.append(Factor(above, None))
        return tuple(factors)

    def refined(self) -> Layout:
        """The same array on the prime-refined mesh: every piece holds the same indices as before."""
        entries: list[tuple[str, Entry]] = []
        for name, entry in self.entries:
            subs = self.mesh.sub_axes(name)
            for position, sub in enumerate(subs):
                minor = prod(other.size for other in subs[position + 1 :])
                entries.append(
                    (sub.name, Split(entry.dim, entry.stride * minor) if isinstance(entry, Split) else entry)
                )
        return Layout(self.mesh.refined(), self.shape, tuple(entries))

    # ---- text --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        text = "[" + ",".join(self._print_dim(dim) for dim in range(len(self.shape))) + "]"
        groups = [
            f"{op.value}:" + ",".join(name for name, other in self.pending if other is op)
            for op in Reduction
            if any(other is op for _, other in self.pending)
        ]
        return text + ("{" + ";".join(groups) + "}" if groups else "")

    def _print_dim(self, dim: int) -> str:
        digits = self.digits(dim)
        if not digits:
            return str(self.shape[dim])
        plain = block_strides(self.shape[dim], [digit.size for digit in digits])
        is_block = tuple(digit.stride for digit in digits) == plain
        names = [digit.axis if is_block else f"{digit.axis}:{digit.stride}" for digit in digits]
        return f"{self.shape[dim]}{{{','.join(names)}}}"

    @classmethod
    def read(cls, scanner: Scanner, mesh: Mesh) -> Layout:
        shape: list[int] = []
        entries: list[tuple[str, Entry]] = []

        def digit() -> tuple[str, int | None]:
            axis = scanner.word("an axis")
            return axis, scanner.integer() if scanner.accept(":") else None

        def dim() -> None:
            shape.append(scanner.integer())
            digits = scanner.bracketed("{", "}", digit) if scanner.peek("{") else []
            plain = block_strides(shape[-1], [mesh.size(axis) for axis, _ in digits])
            for (axis, stride), default in zip(digits, plain, strict=True):
                entries.append((axis, Split(len(shape) - 1, default if stride is None else stride)))

        scanner.bracketed("[", "]", dim)
        if scanner.accept("{"):
            while True:
                word = scanner.word("a reduction")
                if word not in [op.value for op in Reduction]:
                    raise ParseError(
                        f"unknown reduction {word!r}", where=scanner.here(), fix="use sum, max, min or prod"
                    )
                scanner.expect(":")
                entries.append((scanner.word("an axis"), Pending(Reduction(word))))
                while scanner.accept(","):
                    entries.append((scanner.word("an axis"), Pending(Reduction(word))))
                if not scanner.accept(";"):
                    break
            scanner.expect("}")
        return cls(mesh, tuple(shape), tuple(entries))

    @classmethod
    def parse(cls, text: str, mesh: Mesh) -> Layout:
        return Scanner.whole(text, lambda scanner: cls.read(scanner, mesh))


def block_strides(size: int, axis_sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of the plain block split of a dim over axes, major to minor: blocks of ceil(size / K) elements."""
    stride = max(1, -(-size // prod(axis_sizes)))
    strides: list[int] = []
    for axis_size in reversed(axis_sizes):
        strides.append(stride)
        stride *= axis_size
    return tuple(reversed(strides))
