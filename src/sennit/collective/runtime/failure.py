"""What goes wrong while a collective runs: a rank that died, did not come, left, or called something else."""

from __future__ import annotations

from enum import Enum

from sennit.errors import RunError

__all__ = ["Cause", "RuntimeFailure"]


class Cause(Enum):
    DIED = "died"
    LEFT = "left"  # closed the group
    LATE = "late"  # did not come within the timeout
    MISMATCH = "mismatch"  # called another collective, or one of another size
    BROKEN = "broken"  # an earlier failure broke the group


class RuntimeFailure(RunError):  # noqa: N818  # what failed is the run, not the caller
    """A collective that could not end. `ranks` are those that it is due to; the group is of no more use on any rank."""

    def __init__(
        self, what: str, *, cause: Cause, ranks: tuple[int, ...], where: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(what, where=where, fix=fix)
        self.cause, self.ranks = cause, ranks
