"""A lower bound of a step's time for given kernels, whatever the buckets, their order and their waits.

Gradient g is there after kernel r_g, and the parameter is needed by kernel n_g of the next step at the latest. Take the
gradients S(r, n) that come after kernel r or later, and are needed by kernel n or before. All of them travel between
the end of kernel r and the start of kernel n one step later. In steady state that is a step of time T less what lies
from the start of n to the end of r, and kernels n to r take at least their own time:

    communication(S(r, n))  <=  T - compute(n .. r)            for all r and n

so T is at least the greatest communication(S(r, n)) + compute(n .. r); and at least all kernels with all updates, and
all communication. A set of bytes travels at best in one message by the fastest algorithm. A gradient that is made in
blocks of rows counts as made where its product starts, a weight that is read in blocks as needed where its product
ends. An embedding that is shared with the head shows what this bound sees and full overlap does not: its gradient is
complete with the last kernel and needed by the first.
"""

from __future__ import annotations

import numpy as np

from sennit.fuse.looked_up import parameter_of
from sennit.fuse.model import KernelOrder

__all__ = ["structural"]


def structural(kernels: KernelOrder) -> float:
    model, channel = kernels.model, kernels.model.channel
    updated = sum(size for path, size in model.bytes.items() if parameter_of(path) == path)
    compute = kernels.until[-1] + channel.update_per_byte * updated
    if not model.gradients:
        return compute
    # rows of a product may leave while it is computed: at the earliest, all of them when it starts
    ready = np.array([kernels.product.get(path, kernels.maker[path] + 1) - 1 for path, _, _ in model.gradients])
    # and rows of a weight may come while the product that reads them is computed: at the latest, all of them when it
    # ends
    needed = np.array([kernels.read_by.get(path, kernels.use[path] - 1) + 1 for path, _, _ in model.gradients])
    size = np.array([model.whole_bytes[path] for path, _, _ in model.gradients], dtype=float)
    until = np.array(kernels.until)
    best = compute
    for place in np.unique(needed):
        early = needed <= place
        order = np.argsort(-ready[early], kind="stable")
        late, carried = ready[early][order], np.cumsum(size[early][order])
        between = np.maximum(0.0, until[late + 1] - until[place])
        times = np.array([channel.seconds(int(item)) for item in carried]) + between
        best = max(best, float(times.max()))
    return best
