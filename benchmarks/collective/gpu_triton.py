"""The same algorithms in Triton, as the other candidate for the GPU runtime: a ring with flags, and the direct sum in
one pass.

A Triton program is specialised by its source: an interpreter in it would need data-dependent pointers and lists of
operands, which its tile language does not express well. So these are hand-written kernels of one algorithm each, the
best that Triton could do here; `gpu.py` measures them. Arrays of all ranks lie in one tensor, rank after rank.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _ring(inp, out, flags, n, team, base, ranks: tl.constexpr, block: tl.constexpr):
    rank = tl.program_id(0) % ranks
    member = tl.program_id(0) // ranks
    before = (rank + ranks - 1) % ranks
    after = (rank + 1) % ranks
    size = n // ranks
    share = (size + team - 1) // team
    for k in tl.static_range(1, ranks):
        first = ((rank + ranks - k) % ranks) * size
        stop = first + tl.minimum((member + 1) * share, size)
        if k > 1:
            while tl.atomic_add(flags + before * team + member, 0, sem="acquire") < base + k - 1:
                pass
            source = out + before * n
        else:
            source = inp + before * n
        for i in range(first + member * share, stop, block):
            at = i + tl.arange(0, block)
            total = tl.load(inp + rank * n + at, mask=at < stop) + tl.load(source + at, mask=at < stop)
            tl.store(out + rank * n + at, total, mask=at < stop)
        tl.debug_barrier()
        tl.atomic_xchg(flags + rank * team + member, base + k, sem="release")
    reader = (after + 1) % ranks
    while tl.atomic_add(flags + reader * team + member, 0, sem="acquire") < base + ranks - 1:
        pass
    for k in tl.static_range(0, ranks - 1):
        first = ((rank + 1 + ranks - k) % ranks) * size
        stop = first + tl.minimum((member + 1) * share, size)
        if k > 0:
            while tl.atomic_add(flags + before * team + member, 0, sem="acquire") < base + ranks - 1 + k:
                pass
        for i in range(first + member * share, stop, block):
            at = i + tl.arange(0, block)
            tl.store(out + after * n + at, tl.load(out + rank * n + at, mask=at < stop), mask=at < stop)
        tl.debug_barrier()
        tl.atomic_xchg(flags + rank * team + member, base + ranks + k, sem="release")


@triton.jit
def _direct(inp, out, n, ranks: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.load(inp + at, mask=at < n)
    for k in tl.static_range(1, ranks):
        total += tl.load(inp + k * n + at, mask=at < n)
    for k in tl.static_range(0, ranks):
        tl.store(out + k * n + at, total, mask=at < n)


class TritonAllReduce:
    """Of `inputs` of shape (ranks, n) into `outputs`."""

    def __init__(self, ranks: int, team: int, device: torch.device) -> None:
        self.ranks, self.team, self.epoch = ranks, team, 0
        self.flags = torch.zeros(ranks * team, dtype=torch.int64, device=device)

    def ring(self, inputs: torch.Tensor, outputs: torch.Tensor, block: int = 4096, warps: int = 16) -> None:
        self.epoch += 1
        base = self.epoch * 4 * self.ranks
        grid = (self.ranks * self.team,)
        _ring[grid](inputs, outputs, self.flags, inputs.shape[1], self.team, base, self.ranks, block, num_warps=warps)

    def direct(self, inputs: torch.Tensor, outputs: torch.Tensor, block: int = 2048, warps: int = 8) -> None:
        n = inputs.shape[1]
        _direct[(triton.cdiv(n, block),)](inputs, outputs, n, self.ranks, block, num_warps=warps)
