"""The short way of a collective call through c10d: one look into a dict, one call of the core.

An all-reduce of a small tensor moves its bytes in a few microseconds. What Python does around it takes as long if it
may. Here a call that waits, on one or two plain contiguous tensors, in the shared memory of a host, does this and
nothing else:

    is it such a call?     the options, the type, the device and the strides of its tensors
    what call is it?       (reduction, element type, elements) -> a plan that is ready but for addresses
    is it its turn?        nobody runs a call of this group, and none waits on its thread
    sennit_start           in C, without the interpreter's lock, until it is done or has waited for 20 ms

| a call | goes |
|---|---|
| like that, the second time and later | here |
| the first of its kind and size; asynchronous; while another is under way; of lists, other strides, subclasses, complex numbers, PREMUL_SUM; input and output that overlap | the long way: `backend_torch.py` |
| begun here, but a peer is late or gone, or the group is broken, closed or forked | on by the long way, which waits, and says what is wrong |

Of these, calls that were made here once, and are no other reduction than a sum, are made by `shm_call.c` from then on,
where that was built: the same, in C. `short` is that.

Both ways run the same plans, so the ranks of a call need not all go the same way. Nothing is checked here that the long
way would raise about: what is not understood goes there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sennit.collective.runtime.private_torch import AVERAGE, SUM, options_examples, reduction_of
from sennit.collective.runtime.shared_torch import Shared
from sennit.collective.runtime.shm_machine import CompiledMachine
from sennit.collective.runtime.shm_plan import Plan
from sennit.collective.runtime.shm_shortcut import FROM_ROOT, PLAIN, ROWS, SUMS, facts_of, shortcut_of
from sennit.collective.runtime.tensors_torch import average
from sennit.collective.runtime.work_torch import CallQueue
from sennit.ir.collective import CollectiveName

__all__ = ["Express"]

Plans = dict[tuple[object, ...], Plan]
Rest = Callable[[Plan, int, Any], None]  # a plan under way, its status, the options of the call
Failed = Callable[[BaseException], None]
_PLANS_KEPT = 512


class Express:
    """For one group. A method says whether it made the call: if not, the long way does."""

    __slots__ = (
        "_exchanges",
        "_failed",
        "_gathers",
        "_group",
        "_others",
        "_queue",
        "_reduces",
        "_rest",
        "_running",
        "_scatters",
        "_shared",
        "_size",
        "_spreads",
        "_start",
        "short",
    )

    def __init__(self, shared: Shared, queue: CallQueue, rest: Rest, failed: Failed) -> None:
        assert isinstance(shared.group.machine, CompiledMachine)
        self._shared, self._group, self._size = shared, shared.group, shared.size
        self._queue, self._running, self._rest, self._failed = queue, queue.running, rest, failed
        self._start = shared.group.machine.library.sennit_start
        self._reduces: Plans = {}  # sums, by type and elements: reductions are slow to hash
        self._others: Plans = {}
        self._scatters: Plans = {}
        self._gathers: Plans = {}
        self._exchanges: Plans = {}
        self._spreads: Plans = {}
        described = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.11 to 2.13 have it
        self.short = shortcut_of(
            shared.group.machine,
            shared.group.address,
            self._running,
            rest,
            calls=queue.jobs,
            torch=None if described is None else (Tensor, SUM, described),
        )
        if self.short is not None:
            for examples in options_examples():
                self.short.know_options(examples)

    def close(self) -> None:
        if self.short is not None:
            self.short.close()

    @classmethod
    def of(cls, communicator: object, queue: CallQueue, rest: Rest, failed: Failed) -> Express | None:
        """None where the ranks do not share memory, or the core is not compiled."""
        if isinstance(communicator, Shared) and isinstance(communicator.group.machine, CompiledMachine):
            return cls(communicator, queue, rest, failed)
        return None

    # ---- collectives -------------------------------------------------------------------------------------------------

    def all_reduce(self, tensors: Any, opts: Any) -> bool:
        if type(tensors) is not list or len(tensors) != 1 or getattr(opts, "asyncOp", True):
            return False
        tensor = tensors[0]
        if not _is_plain(tensor):
            return False
        place, reduce_op = tensor.data_ptr(), opts.reduceOp
        if reduce_op == SUM:
            key: tuple[Any, ...] = tensor.dtype, tensor.numel()
            plan = self._reduces.get(key)
            if plan is None:
                plan = self._learn_sum(self._reduces, key, CollectiveName.ALL_REDUCE, opts)
            self._shorten(plan, "all_reduce", SUMS, tensor, tensor)
            return plan is not None and self._run(plan, place, place, opts, None)
        key = tensor.dtype, tensor.numel(), reduce_op.op
        plan = self._others.get(key)
        if plan is None:
            plan = self._learn_sum(self._others, key, CollectiveName.ALL_REDUCE, opts)
        return plan is not None and self._run(plan, place, place, opts, tensor if reduce_op == AVERAGE else None)

    def broadcast(self, tensors: Any, opts: Any) -> bool:
        if type(tensors) is not list or len(tensors) != 1 or getattr(opts, "asyncOp", True):
            return False
        tensor = tensors[0]
        if not _is_plain(tensor):
            return False
        key = opts.rootRank, tensor.dtype, tensor.numel()
        plan = self._spreads.get(key)
        if plan is None and (plan := self._learn(self._spreads, key, CollectiveName.BROADCAST, tensor, key[0])) is None:
            return False
        self._shorten(plan, "broadcast", FROM_ROOT, tensor, tensor, key[0])
        place = tensor.data_ptr()
        return self._run(plan, place, place, opts, None)

    def all_gather(self, output: Any, input: Any, opts: Any) -> bool:
        if not _are_plain(output, input, opts):
            return False
        key = input.dtype, input.numel(), output.numel()
        plan = self._gathers.get(key)
        if plan is None and (plan := self._learn(self._gathers, key, CollectiveName.ALL_GATHER, input)) is None:
            return False
        self._shorten(plan, "all_gather", PLAIN, input, output)
        return self._run(plan, input.data_ptr(), output.data_ptr(), opts, None)

    def reduce_scatter(self, output: Any, input: Any, opts: Any) -> bool:
        if not _are_plain(output, input, opts):
            return False
        reduce_op = opts.reduceOp
        key = output.dtype, output.numel(), input.numel(), None if reduce_op == SUM else reduce_op.op
        plan = self._scatters.get(key)
        if plan is None:
            if key[2] != key[1] * self._size:
                return False
            plan = self._learn_sum(self._scatters, key, CollectiveName.REDUCE_SCATTER, opts)
        if key[3] is None:
            self._shorten(plan, "reduce_scatter", SUMS, input, output)
        averaged = output if reduce_op == AVERAGE else None
        return plan is not None and self._run(plan, input.data_ptr(), output.data_ptr(), opts, averaged)

    def all_to_all(self, output: Any, input: Any, opts: Any) -> bool:
        """Of equal pieces."""
        if not _are_plain(output, input, opts) or output.shape != input.shape or input.dim() == 0:
            return False
        key = input.dtype, input.shape[0], input.numel()
        plan = self._exchanges.get(key)
        if plan is None:
            if input.shape[0] % self._size:
                return False
            plan = self._learn(self._exchanges, key, CollectiveName.ALL_TO_ALL, input, parts=self._size)
        self._shorten(plan, "all_to_all", ROWS, input, output)
        return plan is not None and self._run(plan, input.data_ptr(), output.data_ptr(), opts, None)

    # ---- what they share ---------------------------------------------------------------------------------------------

    def _shorten(self, plan: Plan | None, kind: str, what: int, input: Tensor, output: Tensor, root: int = -1) -> None:
        """The next call like this is made in C."""
        if plan is not None and self.short is not None and (facts := facts_of(plan)) is not None:
            self.short.learn_tensors(facts, kind, what, output, input, root)

    def _run(self, plan: Plan, source: int, target: int, opts: Any, averaged: Tensor | None) -> bool:
        if source == target:
            if not plan.one_array:
                return False
        elif source < target + plan.sizes[1] and target < source + plan.sizes[0]:
            return False  # they overlap
        if not self._running.acquire(False):
            return False
        try:
            if self._queue.submitted != self._queue.ended:
                return False
            try:
                status = self._start(self._group.address, plan.address, source, target, plan.staged)
            except BaseException as error:  # Ctrl-C: the others wait for this rank in vain
                self._failed(error)
                raise
            if status:
                self._rest(plan, status, opts)
            if averaged is not None:
                average(averaged, self._size)
        finally:
            self._running.release()
        return True

    def _learn_sum(self, plans: Plans, key: tuple[Any, ...], collective: CollectiveName, opts: Any) -> Plan | None:
        """`key` begins with the type and the elements of a part."""
        name, factor = reduction_of(opts)
        if factor is not None:
            return None
        return self._keep(plans, key, self._shared.known(collective, key[1], key[0], name, None))

    def _learn(
        self,
        plans: Plans,
        key: tuple[Any, ...],
        collective: CollectiveName,
        given: Tensor,
        root: int | None = None,
        parts: int = 1,
    ) -> Plan | None:
        """Where nothing is reduced; elements are bytes then."""
        if collective is CollectiveName.ALL_GATHER and key[2] != key[1] * self._size:
            return None
        nbytes = given.numel() // parts * given.element_size()
        return self._keep(plans, key, self._shared.known(collective, nbytes, None, None, root))

    def _keep(self, plans: Plans, key: tuple[object, ...], plan: Plan | None) -> Plan | None:
        if plan is None or plan.staged is None or not plan.sizes[0] or not plan.sizes[1]:
            return None
        if len(plans) >= _PLANS_KEPT:
            plans.clear()
        plans[key] = plan
        return plan


def _is_plain(tensor: Any) -> bool:
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided  # asked first: others have no strides to ask about
        and tensor.is_contiguous()
    )


def _are_plain(output: Any, input: Any, opts: Any) -> bool:
    return not getattr(opts, "asyncOp", True) and _is_plain(output) and _is_plain(input) and output.dtype == input.dtype
