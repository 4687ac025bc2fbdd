"""The compiler: an `Algorithm` to a `Schedule`, in seven passes.

| pass | from | to | file |
|---|---|---|---|
| 1 chunk DAG | moves in order | accesses that must keep their order | `compile_chunks.py` |
| 2 instruction DAG | accesses | sends, receives, local operations | `compile_operations.py` |
| 3 fusion | | receives joined with the sends that pass on their data | |
| 4 global order | | one sequence of all operations | `compile_order.py` |
| 5 channels | chains of fused operations | a channel for each move | `compile_blocks.py` |
| 6 blocks | | thread blocks, instructions, waits | |
| 7 slots | blocks | the least number of slots without deadlock | `compile_slots.py` |

Each pass is near-linear in the number of moves. None looks at values: any algorithm is compiled to a schedule that does
the same, be it right or not; `language.py` and the verifier look at values.
"""

from __future__ import annotations

from dataclasses import dataclass

from sennit.collective.collector import collector_paused
from sennit.collective.compile_blocks import assign_blocks, assign_channels
from sennit.collective.compile_chunks import chunk_dag
from sennit.collective.compile_operations import fuse, instruction_dag
from sennit.collective.compile_order import global_order
from sennit.collective.compile_slots import least_slots
from sennit.ir.collective import Algorithm
from sennit.ir.schedule import Schedule

__all__ = ["CompileOptions", "compile_algorithm"]


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """`fuse` joins receives with sends (pass 3).

    `share_blocks` lets one block receive and send where nothing is fused (pass 6).
    """

    fuse: bool = True
    share_blocks: bool = False


@collector_paused()
def compile_algorithm(algorithm: Algorithm, options: CompileOptions | None = None) -> Schedule:
    options = options or CompileOptions()
    chunks = chunk_dag(algorithm)
    operations = instruction_dag(chunks)
    fused = fuse(operations) if options.fuse else operations
    order = global_order(fused)
    channels = assign_channels(fused, order)
    ranks = assign_blocks(fused, order, channels, share=options.share_blocks)
    slots = least_slots(ranks, algorithm.name)
    return Schedule(algorithm.name, algorithm.collective, slots, ranks)
