"""Whether a model does the same at full depth as with four units of each run.

A shortened model (`runs.py`) shows what four layers do. Code may look at the position of a layer, or at how many there
are: `if i in self.taps`, `x / len(self.layers)`. Its attributes do not tell. So before a graph is unrolled, the forward
pass of the whole model runs once on fake tensors, which takes a fraction of a trace, and every operator is noted, with
a mark where a unit begins. Then the notes of the whole model must be

    before, A, B, C, C, ..., C, Z, after

with the pieces that the shortened model gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from sennit.capture.certain import Certain
from sennit.capture.fold import NotPeriodic
from sennit.capture.runs import Run, shortened
from sennit.capture.torch_private import Recorder, without_memory

__all__ = ["check_depth"]

Mark = tuple[int, int]  # a run and a unit of it; (-1, 0) is the beginning
Notes = list[tuple[Mark, list[object]]]


def check_depth(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], runs: tuple[Run, ...]) -> None:
    """Raise `NotPeriodic` where the whole model does not repeat what the shortened one does."""
    with without_memory(model, args, kwargs, everything=True) as (args, kwargs):
        try:
            whole = _notes(model, args, kwargs, runs)
            with shortened(model, runs):
                short = _notes(model, args, kwargs, runs)
        except Exception as error:  # of any kind: then it is not known
            raise NotPeriodic(f"its forward pass cannot be checked: {type(error).__name__}: {error}") from error
    expected = list(_expected(short, runs))
    if len(whole) != len(expected):
        raise NotPeriodic(f"it runs {len(whole)} units and not {len(expected)}")
    for (mark, noted), (model_mark, wanted) in zip(whole, expected, strict=True):
        if mark != model_mark or noted != wanted:
            run, unit = mark
            raise NotPeriodic(f"unit {unit} of {runs[run].module!r} is not like the others")


def _expected(short: Notes, runs: tuple[Run, ...]) -> Iterator[tuple[Mark, list[object]]]:
    """The notes of four units, with C for every unit between B and Z."""
    for (run, unit), noted in short:
        if run >= 0 and unit == runs[run].kept[2]:
            yield from (((run, copy), noted) for copy in range(2, len(runs[run].units) - 1))
        else:
            yield (run, unit), noted


def _notes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], runs: tuple[Run, ...]) -> Notes:
    recorder = Recorder()
    marks: list[tuple[Mark, int]] = [((-1, 0), 0)]
    with _marked(model, runs, marks, recorder), torch.no_grad(), Certain(), recorder:
        model(*args, **kwargs)
    ends = [begin for _, begin in marks[1:]] + [len(recorder.noted)]
    return [(mark, recorder.noted[begin:end]) for (mark, begin), end in zip(marks, ends, strict=True)]


@contextmanager
def _marked(
    model: nn.Module, runs: tuple[Run, ...], marks: list[tuple[Mark, int]], recorder: Recorder
) -> Iterator[None]:
    with ExitStack() as hooks:
        for index, run in enumerate(runs):
            children = dict(model.get_submodule(run.module).named_children())
            for unit, names in enumerate(run.units):
                if names[0] in children:

                    def mark(*_: object, at: Mark = (index, unit)) -> None:
                        marks.append((at, len(recorder.noted)))

                    hooks.callback(children[names[0]].register_forward_pre_hook(mark).remove)
        yield
