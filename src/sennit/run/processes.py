"""Programs on real processes of this machine, joined by gloo: the way the demo and the tests run one.

    with LocalRanks(4) as ranks:
        result = ranks.run(program, state, repeats=5)

The processes (`cluster/ranks_torch.py`) run any number of programs. Tensors travel through files, each rank reads its
own pieces.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.cluster.ranks_torch import GlooRanks
from sennit.errors import RunError
from sennit.ir.program import Program
from sennit.run.distributed import ProcessCommunicator
from sennit.run.emit import emit_lane
from sennit.run.groups import ProcessGroups, groups_needed
from sennit.run.load import load_source
from sennit.run.pieces import assemble_outputs, inputs_of
from sennit.run.rank import Rank, seat_of

__all__ = ["LocalRanks", "RunResult"]


@dataclass(frozen=True, slots=True)
class RunResult:
    """Whole outputs by path (the loss by `loss`), and the seconds of each repeated step: the slowest rank's."""

    outputs: dict[str, Tensor]
    seconds: tuple[float, ...]


class LocalRanks:
    """A context manager that holds `count` gloo processes on this machine."""

    def __init__(self, count: int, *, timeout: float = 120.0) -> None:
        self.ranks = GlooRanks(count, timeout=timeout, preload=[__name__])

    def __enter__(self) -> LocalRanks:
        self.ranks.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ranks.stop()

    def run(self, program: Program, state: Mapping[str, Tensor], *, repeats: int = 1) -> RunResult:
        """Run the program on all ranks, `repeats` times from the same state. Returns the outputs of the last time."""
        count = self.ranks.count
        if program.devices != tuple(range(count)):
            raise RunError(
                f"program {program.name!r} is for devices {list(program.devices)}, but there are {count} ranks",
                fix=f"plan on a mesh of {count} devices, or start {len(program.devices)} ranks",
            )
        path = self.ranks.working_folder / "state.pt"
        torch.save({key: value.detach().contiguous() for key, value in state.items()}, path)
        answers = self.ranks.call(_run, str(program), str(path), repeats)
        seconds = tuple(max(times) for times in zip(*(times for _, times in answers), strict=True))
        pieces = {rank: torch.load(path) for rank, (path, _) in enumerate(answers)}
        return RunResult(assemble_outputs(program, pieces), seconds)


def _run(rank: int, text: str, state: str, repeats: int) -> tuple[str, list[float]]:
    """What each rank does; returns where it put its outputs, and the seconds of each step."""
    program = Program.parse(text)
    lane = program.lane_of(rank)
    step = load_source(emit_lane(program, lane, ahead=dist.get_backend() != "nccl"), f"{program.name} {lane.name}")
    groups = ProcessGroups()
    groups.make_for(groups_needed(program))
    communicator = ProcessCommunicator(groups)
    handle = Rank(seat_of(program, lane, rank), communicator)
    inputs = inputs_of(lane, rank, torch.load(state))
    seconds: list[float] = []
    outputs: Mapping[str, Tensor] = {}
    with torch.no_grad():
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            outputs = step(handle, inputs)
            communicator.finish()
            seconds.append(time.perf_counter() - start)
    path = str(Path(state).with_name(f"outputs{rank}.pt"))
    torch.save({key: value.contiguous().clone() for key, value in outputs.items()}, path)
    dist.barrier()
    return path, seconds
