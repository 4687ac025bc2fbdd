"""The errors that users see: what is wrong, where, the numbers, and what to change.

Library code raises a subclass of `SennitError`; `assert` is kept for our own bugs. The command line prints the
message alone, without a traceback, and exits with status 2.
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "ClusterError",
    "CollectiveError",
    "EnvironmentVariableError",
    "GraphError",
    "LayoutError",
    "MeshError",
    "ParseError",
    "PeerError",
    "PlanError",
    "ProgramError",
    "RunError",
    "SennitError",
    "TimelineError",
]


class SennitError(Exception):
    """Something a user can fix. `what` states the fault with its numbers, `where` the place, `fix` the remedy."""

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.fix = what, where, fix
        lines = [what]
        if where is not None:
            lines.append(f"  where: {where}")
        if fix is not None:
            lines.append(f"  fix: {fix}")
        super().__init__("\n".join(lines))


class ParseError(SennitError):
    """Text that is not in the grammar it was read with."""


class MeshError(SennitError):
    """A mesh that is not one: axis names, sizes, devices."""


class LayoutError(SennitError):
    """A layout that does not lie on its mesh and shape, or that a conversion cannot express."""


class GraphError(SennitError):
    """A graph that breaks a rule of `ir/graph.py`."""


class ProgramError(SennitError):
    """A program that breaks a rule of `ir/program_check.py`, or would deadlock."""


class TimelineError(SennitError):
    """A timeline whose events cannot have happened."""


class ClusterError(SennitError):
    """A cluster description that is not one, or does not suit what is asked of it."""


class CollectiveError(SennitError):
    """A collective algorithm or schedule that does not do what its collective asks, or cannot run."""


class CaptureError(SennitError):
    """A model that cannot be captured."""


class PlanError(SennitError):
    """A plan that does not fit its graph or mesh, or loses a dependency."""


class RunError(SennitError):
    """A program that could not be run, or a rank that failed."""


class PeerError(RunError, RuntimeError):
    """A collective or message that cannot end: a rank is gone, late, or calls something else.

    It is a `RuntimeError` too, which is what programs catch from torch.distributed.
    """


class EnvironmentVariableError(SennitError):
    """A `SENNIT_` variable with a value that cannot be read."""
