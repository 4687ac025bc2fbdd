"""The lowering for a GPU, as consecutive passes over a one-sided program."""

from __future__ import annotations

from sennit.collective.runtime.gpu_delay import delay_copies
from sennit.collective.runtime.gpu_join import join_blocks, without_gates
from sennit.ir.one_sided import OneSided

__all__ = ["gpu_program"]


def gpu_program(program: OneSided, *, gates: bool = False) -> OneSided:
    """`gates`: for a launch that serves one rank of several, which must not run into the call before or after."""
    joined = join_blocks(program)
    delayed = delay_copies(joined)
    return delayed if gates else without_gates(delayed)
