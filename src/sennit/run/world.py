"""The ranks together: joining them, and failing together.

A rank that raises while the others wait in a collective would leave them there until a timeout. So whatever may fail on
one rank alone (capture, planning, reading the model) runs inside `together`: every rank says how it went, and if one
failed, or if they made different things, every rank raises the same error, which names the ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from sennit.errors import RunError
from sennit.ir.mesh import Mesh, print_ranges

__all__ = ["check_mesh", "join", "together"]

T = TypeVar("T")


def join() -> None:
    """Be in a process group: the one that is there, or torchrun's, or one of this process alone."""
    if dist.is_initialized():
        return
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def together(work: Callable[[], T], text: Callable[[T], str], what: str) -> T:
    """`work()` on every rank; an error on all where one failed or where `text` of the results differs."""
    answer: T | None = None
    error: Exception | None = None
    try:
        answer = work()
    except Exception as caught:  # of a user's plan or model, too: raised again below, once the other ranks know
        error = caught
    said = ("error", f"{type(error).__name__}: {error}") if answer is None else ("made", _digest(text(answer)))
    heard: list[tuple[str, str]] = [said] * dist.get_world_size()
    dist.all_gather_object(heard, said)
    failed = [rank for rank, (kind, _) in enumerate(heard) if kind == "error"]
    if error is not None:
        raise error
    if failed:
        raise RunError(
            f"rank {failed[0]} could not {what}: {heard[failed[0]][1]}",
            where=f"ranks {print_ranges(tuple(failed))}",
            fix="see the error of that rank",
        )
    other = tuple(rank for rank, (_, digest) in enumerate(heard) if digest != heard[0][1])
    if other:
        raise RunError(
            f"the ranks did not {what} alike: ranks {print_ranges(other)} differ from rank 0",
            fix="give every rank the same model, sample, plan, mesh and versions of torch and sennit",
        )
    assert answer is not None
    return answer


def check_mesh(mesh: Mesh) -> None:
    """The devices of a mesh are the ranks of the world."""
    world = dist.get_world_size()
    if sorted(mesh.devices) != list(range(world)):
        raise RunError(
            f"mesh {mesh} has {len(mesh.devices)} devices ({print_ranges(tuple(sorted(mesh.devices)))}), "
            f"and there are {world} ranks",
            fix=f"start {len(mesh.devices)} ranks (torchrun --nproc-per-node {len(mesh.devices)}), "
            f"or use a mesh of {world} devices",
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
