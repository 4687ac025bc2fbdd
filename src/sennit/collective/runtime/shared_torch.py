"""Collectives of tensors in the shared memory of a host: a `Communicator` on a `ShmGroup`.

The group picks its code by the bytes of a part, from its table. Addresses are passed as they are; the group copies what
does not lie in its own memory through staging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sennit.collective.runtime.failure import Cause, RuntimeFailure
from sennit.collective.runtime.linked_torch import apart, cut
from sennit.collective.runtime.shm_abi import Reduction
from sennit.collective.runtime.shm_group import ShmGroup
from sennit.collective.runtime.shm_messages import Buffer
from sennit.collective.runtime.shm_plan import Plan
from sennit.collective.runtime.shm_table import tuned_table
from sennit.collective.runtime.tensors_torch import plain_reduction
from sennit.collective.selection import SelectionTable
from sennit.errors import PeerError
from sennit.ir.collective import CollectiveName
from sennit.ir.dtype import DType

__all__ = ["Shared"]

# torch's types to ours; what can be reduced was checked before
_DTYPES = {getattr(torch, dtype.torch_name): dtype for dtype in DType}
_REDUCTIONS = {reduction.value: reduction for reduction in Reduction}


_FEW_YIELDS = 5
_PLANS_KEPT = 512

# collective, elements of a part, type, reduction, root
PlanKey = tuple[CollectiveName, int, torch.dtype, str | None, int | None]


class TensorGroup(ShmGroup):
    """A shared-memory group that another part of the program may declare broken."""

    def use(self, table: SelectionTable) -> None:
        """Choose by a tuned table, where it has rows for a collective."""
        self.code(CollectiveName.ALL_REDUCE, 0)  # makes the default table
        assert self.table is not None
        self.table = tuned_table(table, self.table)

    def sleep_soon(self) -> None:
        """For waits that are long anyway, since a network is in them: leave the core to the threads that serve it."""
        self._record.yields, self._record.linger = _FEW_YIELDS, 0

    def abort(self, what: str, ranks: tuple[int, ...]) -> None:
        """All ranks of the host that wait in this group raise."""
        if self._segment is not None and self._broken is None:
            failure = RuntimeFailure(what, cause=Cause.BROKEN, ranks=ranks, where=self._where())
            self._segment.declare(failure)
            self._broken = failure


class Shared:
    """The ranks of one host. `names` are what they are called in the group whose part they are, for messages."""

    def __init__(self, group: TensorGroup, names: Sequence[int]) -> None:
        self.group, self.names = group, tuple(names)
        self.rank, self.size = group.rank, group.size
        self._plans: dict[PlanKey, Plan] = {}

    @classmethod
    def create(
        cls,
        rank: int,
        names: Sequence[int],
        exchange: Callable[[bytes], list[bytes]],
        *,
        timeout: float,
        threads: int | None = None,
        sharers: int = 1,
    ) -> Shared:
        """`threads` and `sharers` are those of `ShmEndpoint.create`."""
        busy = torch.get_num_threads()
        group = TensorGroup.create(
            rank, len(names), exchange, timeout=timeout, threads=threads, sharers=sharers, busy=busy
        )
        return cls(group, names)

    def all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> None:
        self._run(CollectiveName.ALL_REDUCE, tensor, tensor, tensor.numel(), reduction, None, timeout)

    def all_gather(self, output: Tensor, input: Tensor, timeout: float) -> None:
        self._run(CollectiveName.ALL_GATHER, input, output, input.numel(), None, None, timeout)

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: str, timeout: float) -> None:
        self._run(CollectiveName.REDUCE_SCATTER, input, output, output.numel(), reduction, None, timeout)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        self._run(CollectiveName.BROADCAST, tensor, tensor, tensor.numel(), None, root, timeout)

    def reduce(self, tensor: Tensor, root: int, reduction: str, timeout: float) -> None:
        target = tensor if self.rank == root else None
        self._run(CollectiveName.REDUCE, tensor, target, tensor.numel(), reduction, root, timeout)

    def gather(self, output: Tensor | None, input: Tensor, root: int, timeout: float) -> None:
        self._run(CollectiveName.GATHER, input, output, input.numel(), None, root, timeout)

    def scatter(self, output: Tensor, input: Tensor | None, root: int, timeout: float) -> None:
        self._run(CollectiveName.SCATTER, input, output, output.numel(), None, root, timeout)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        timeout: float,
    ) -> None:
        if output_sizes is None or input_sizes is None:
            self._run(CollectiveName.ALL_TO_ALL, input, output, input.numel() // self.size, None, None, timeout)
            return
        # not by equality of this rank's sizes: ranks must agree on the code, and each knows only its own
        given = apart(input, output)  # held until all of it is sent: buffers are addresses
        sends, receives = (
            [_buffer(piece) for piece in cut(*pair)] for pair in ((given, input_sizes), (output, output_sizes))
        )
        try:
            self.group.exchange(sends, receives, what="all_to_all", timeout=timeout)
        except RuntimeFailure as failure:
            raise self._named(failure) from None

    def barrier(self, timeout: float) -> None:
        try:
            self.group.barrier(timeout=timeout)
        except RuntimeFailure as failure:
            raise self._named(failure) from None

    def abort(self, why: str) -> None:
        self.group.abort(why, (self.rank,))

    def allocate(self, nbytes: int) -> Tensor | None:
        return torch.from_numpy(self.group.allocate(nbytes))

    def close(self) -> None:
        self.group.close()

    def _run(
        self,
        collective: CollectiveName,
        input: Tensor | None,
        output: Tensor | None,
        elements: int,
        reduction: str | None,
        root: int | None,
        timeout: float,
    ) -> None:
        given = input if input is not None else output
        assert given is not None
        key = collective, elements, given.dtype, reduction, root
        try:
            plan = self._plans.get(key)
            if plan is None:
                plan = self._plan(key)
            source, target = (0 if tensor is None else tensor.data_ptr() for tensor in (input, output))
            self.group.run_plan(plan, source, target, timeout)
        except RuntimeFailure as failure:
            raise self._named(failure) from None

    def _plan(self, key: PlanKey) -> Plan:
        """Made in the turn of the call: codes are loaded in the same order on all ranks."""
        collective, elements, kind, reduction, root = key
        code = self.group.code(collective, elements * kind.itemsize, root)
        meant = None if reduction is None else _REDUCTIONS[reduction]
        if len(self._plans) >= _PLANS_KEPT:
            self._plans.clear()
        plan = self._plans[key] = self.group.plan(code, elements, _DTYPES[kind], meant)
        return plan

    def known(
        self,
        collective: CollectiveName,
        elements: int,
        kind: torch.dtype | None,
        reduction: str | None,
        root: int | None,
    ) -> Plan | None:
        """The plan of a call that was made before. Without a type, elements are bytes. `reduction` as c10d calls it."""
        kind = torch.uint8 if kind is None else kind
        meant = None if reduction is None else plain_reduction(reduction)
        return self._plans.get((collective, elements, kind, meant, root))

    def finish(self, plan: Plan, status: int, timeout: float) -> None:
        """The rest of a call that was begun with `sennit_start`."""
        try:
            self.group.finish_plan(plan, status, timeout)
        except RuntimeFailure as failure:
            raise self._named(failure) from None

    def _named(self, failure: RuntimeFailure) -> PeerError:
        """The failure in the numbers of the whole group."""
        ranks = [self.names[rank] for rank in failure.ranks]
        if failure.cause is Cause.BROKEN or self.names == tuple(range(self.size)):
            what = failure.what
        else:
            did = {Cause.DIED: "died", Cause.LEFT: "left the group", Cause.LATE: "did not come in time"}
            several = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            what = f"{several} {did.get(failure.cause, 'call different collectives, or sizes')}: {failure.what}"
        fix = failure.fix
        if failure.cause is Cause.LATE:
            fix = f"{fix}; if they are only slow, give a longer timeout to init_process_group or new_group"
        return PeerError(what, where=f"rank {self.names[self.rank]}", fix=fix)


def _buffer(tensor: Tensor) -> Buffer:
    return Buffer(tensor.data_ptr(), tensor.numel() * tensor.element_size())
