"""Equal layers of a model: where they are, and the model with fewer of them.

A *run* is a stretch of consecutive children of one container (`ModuleList`, `Sequential`) whose structure repeats:
child i looks like child i + period. `period` children are one *unit*: one layer, or two where windows shift in every
second one. Two modules look alike if they have the same class, parameters and buffers of the same types, the same mode,
children that look alike, and equal plain attributes (numbers, strings, flags). One attribute may differ: an integer
that is the child's own position, because many libraries number their layers.

Units must own their memory: a parameter that two units share, or that something outside shares, makes them no copies.

`shortened(model, runs)` is a context in which each run has four of its units, with their own names: the first, the
second, one from the middle, the last. A graph captured there is unrolled to full depth by `fold.py`, which also checks
that the second unit and the middle one came out equal.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import nn

from sennit.capture.torch_private import storage_key

__all__ = ["Run", "find_runs", "shortened"]

LEAST_UNITS = 5  # below, four units are no saving
LONGEST_PERIOD = 6


@dataclass(frozen=True, slots=True)
class Run:
    """`units` units of the container at path `module`; each is the names of its children."""

    module: str
    units: tuple[tuple[str, ...], ...]

    @property
    def kept(self) -> tuple[int, int, int, int]:
        """The units that a shortened model has."""
        return 0, 1, len(self.units) // 2, len(self.units) - 1

    def path(self, child: str) -> str:
        return f"{self.module}.{child}" if self.module else child


def find_runs(model: nn.Module) -> tuple[Run, ...]:
    """The runs of a model, outermost first; inside a run none is looked for."""
    runs: list[Run] = []
    owners = _owners(model)
    _search(model, "", owners, runs)
    return tuple(runs)


def _search(module: nn.Module, path: str, owners: dict[tuple[object, ...], int], runs: list[Run]) -> None:
    inside: set[str] = set()
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        for run in _runs_of(module, path, owners):
            runs.append(run)
            inside.update(name for unit in run.units for name in unit)
    for name, child in module.named_children():
        if name not in inside:
            _search(child, f"{path}.{name}" if path else name, owners, runs)


def _runs_of(container: nn.Module, path: str, owners: dict[tuple[object, ...], int]) -> Iterator[Run]:
    names = list(container._modules)
    children = [child for child in container._modules.values() if child is not None]
    if len(children) != len(names) or len(names) < LEAST_UNITS:
        return
    looks = [_look(child, position) for position, child in enumerate(children)]
    start = 0
    while start < len(names):
        found = _longest(looks, start)
        if found is None:
            start += 1
            continue
        period, units = found
        stop = start + period * units
        if all(_owns_its_memory(child, owners) for child in children[start:stop]):
            groups = [tuple(names[at : at + period]) for at in range(start, stop, period)]
            yield Run(path, tuple(groups))
        start = stop


def _longest(looks: list[object], start: int) -> tuple[int, int] | None:
    """The period and number of units of the longest run from `start`; the least period wins."""
    best: tuple[int, int] | None = None
    for period in range(1, LONGEST_PERIOD + 1):
        stop = start + period
        while stop < len(looks) and looks[stop] == looks[stop - period]:
            stop += 1
        units = (stop - start) // period
        if units >= LEAST_UNITS and (best is None or units * period > best[0] * best[1]):
            best = (period, units)
    return best


def _look(module: nn.Module, position: int) -> object:
    """A value that is equal for modules that look alike."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return (
        type(module),
        module.training,
        tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors),
        tuple((name, _plain(value, position)) for name, value in sorted(vars(module).items()) if name != "training"),
        tuple((name, _look(child, position)) for name, child in module.named_children()),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Integer:
    """Equal to another one if it is the same number, or if both are the positions of their layers."""

    value: int
    position: int

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Integer):
            return NotImplemented
        return self.value == other.value or (self.value == self.position and other.value == other.position)

    __hash__ = None  # type: ignore[assignment]  # equality is not transitive


def _plain(value: object, position: int) -> object:
    match value:
        case bool() | float() | str() | bytes() | None | torch.dtype():
            return (type(value), value)
        case int():
            return _Integer(value, position)
        case tuple() | list():
            return tuple(_plain(part, position) for part in value)
        case FunctionType():
            return value.__code__
        case _:
            return type(value)


def _owners(model: nn.Module) -> dict[tuple[object, ...], int]:
    """How many places of the model each tensor has."""
    count: dict[tuple[object, ...], int] = {}
    for module in [child for _, child in model.named_modules(remove_duplicate=False)]:
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            key = storage_key(tensor)
            count[key] = count.get(key, 0) + 1
    return count


def _owns_its_memory(module: nn.Module, owners: dict[tuple[object, ...], int]) -> bool:
    return all(owners[storage_key(tensor)] == 1 for tensor in [*module.parameters(), *module.buffers()])


@contextmanager
def shortened(model: nn.Module, runs: tuple[Run, ...]) -> Iterator[None]:
    """The model with four units of each run."""
    before: dict[str, dict[str, nn.Module | None]] = {}
    try:
        for run in runs:
            container = model.get_submodule(run.module)
            before.setdefault(run.module, container._modules)
            dropped = {name for index, unit in enumerate(run.units) if index not in run.kept for name in unit}
            container._modules = OrderedDict(
                (name, child) for name, child in container._modules.items() if name not in dropped
            )
        yield
    finally:
        for path, children in before.items():
            model.get_submodule(path)._modules = children
