"""The c10d backend `sennit`: torch.distributed's collectives on compiled schedules.

    sennit.backend.register()                      # not needed where sennit is installed: torch finds it
    dist.init_process_group("sennit")

| c10d | here |
|---|---|
| `init_process_group`, `new_group` | `create_group`: the members meet through the store, find out who shares a host, and set up shared memory and sockets |
| a collective, `async_op=False` | runs on the caller's thread, if nothing is under way |
| a collective, `async_op=True`, or called by C++ (DDP, functional collectives) | runs on the group's thread, in the order of the calls; returns a `SennitWork` |
| send, recv | over the group's sockets, at once and in the background; matched by peer and tag |
| an error of one rank | breaks the group on all: who waits raises, names the rank, and so does every later call |

This file translates: it checks and flattens tensors and reads options. A `Communicator` moves the bytes. Calls that
were made before go shorter ways: in C (`_MADE_IN_C`), or in a few lines of Python (`_express`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.autograd import profiler

from sennit.collective.runtime.calls_torch import CallingGroup
from sennit.collective.runtime.linked_torch import bytes_of
from sennit.collective.runtime.p2p_links import Label, Links
from sennit.collective.runtime.p2p_ticket import Ticket
from sennit.collective.runtime.private_torch import reduction_of, untraced
from sennit.collective.runtime.recording_torch import PROFILER_RUNS, recorded
from sennit.collective.runtime.shm_shortcut import FROM_ROOT, PLAIN, ROWS, SUMS
from sennit.collective.runtime.sparse_torch import all_reduce_sparse, check_sparse, is_sparse
from sennit.collective.runtime.tensors_torch import (
    Flat,
    average,
    check_output,
    check_place,
    check_reducible,
    flat_of,
    joined,
    plain_reduction,
    scale,
)
from sennit.collective.runtime.work_torch import SennitWork
from sennit.errors import CollectiveError

__all__ = ["SennitGroup"]

_USER = 0  # the kind of messages that programs send with their own tags

# By the names of c10d: what is called, and what shm_call.c should know about it. Such a call waits, and returns None
# when it is done, as c10d allows to calls that do not ask for a `Work`.
_MADE_IN_C = {
    "allreduce": ("all_reduce", SUMS),
    "broadcast": ("broadcast", FROM_ROOT),
    "_allgather_base": ("all_gather", PLAIN),
    "_reduce_scatter_base": ("reduce_scatter", SUMS),
    "alltoall_base": ("all_to_all", ROWS),
    "all_gather_single": ("all_gather", PLAIN),  # the same three, as torch 2.13 calls them
    "reduce_scatter_single": ("reduce_scatter", SUMS),
    "all_to_all_single": ("all_to_all", ROWS),
}


@untraced
class SennitGroup(CallingGroup):
    """Methods bear the names that c10d calls them by.

    Of those in `_MADE_IN_C` each group has others before these, where the short way was built: a call that it knows
    never comes here.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self._short is not None:
            self._short.give_way(vars(profiler), PROFILER_RUNS)
            for name, (kind, what) in _MADE_IN_C.items():
                setattr(self, name, self._short.method(kind, what, getattr(self, name), None))

    def shutdown(self) -> None:
        for name in _MADE_IN_C:  # they hold the group, which holds them
            self.__dict__.pop(name, None)
        super().shutdown()

    # ---- one tensor --------------------------------------------------------------------------------------------------

    @recorded("all_reduce")
    def allreduce(self, tensors: Any, opts: Any = None) -> SennitWork:
        if self._express is not None and self._express.all_reduce(tensors, opts):
            return self._nothing_left
        if isinstance(tensors, list) and is_sparse(tensors[0]):
            return self._all_reduce_sparse(tensors, opts)
        (tensor,) = listed = _listed(tensors)
        name, factor = reduction_of(opts)
        check_reducible(tensor, name, factor)
        check_output(tensor)
        timeout = self._limit(opts)

        def job() -> None:
            flat = flat_of(tensor)
            if factor is not None:
                flat.tensor.mul_(factor)
            self._all_reduce(flat, name, timeout)
            flat.give_back()

        return self._call(job, listed, opts)

    @recorded("broadcast")
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> SennitWork:
        if self._express is not None and self._express.broadcast(tensors, opts):
            return self._nothing_left
        (tensor,) = listed = _listed(tensors)
        root, timeout = self._member(int(getattr(opts, "rootRank", opts))), self._limit(opts)
        if self._rank != root:
            check_output(tensor)

        def job() -> None:
            flat = flat_of(tensor)  # not before its turn: a call before this one may write to it
            self._communicator.broadcast(flat.bytes, root, timeout)
            if self._rank != root:
                flat.give_back()

        return self._call(job, listed, opts)

    @recorded("reduce")
    def reduce(self, tensors: Any, opts: Any) -> SennitWork:
        (tensor,) = listed = _listed(tensors)
        name, factor = reduction_of(opts)
        check_reducible(tensor, name, factor)
        root, timeout = self._member(opts.rootRank), self._limit(opts)
        if self._rank == root:
            check_output(tensor)

        def job() -> None:
            flat = flat_of(tensor)
            scaled = scale(flat, factor)
            self._communicator.reduce(scaled.tensor, root, plain_reduction(name), timeout)
            if self._rank == root:
                if name == "avg":
                    average(scaled.tensor, self._size)
                if scaled is not flat:
                    flat.tensor.copy_(scaled.tensor)
                flat.give_back()

        return self._call(job, listed, opts)

    @recorded("barrier")
    def barrier(self, opts: Any = None) -> SennitWork:
        timeout = self._limit(opts)
        return self._call(lambda: self._communicator.barrier(timeout), [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier like any other: all of them name who is missing."""
        limit = self._timeout if timeout is None else timeout.total_seconds()
        self._call(lambda: self._communicator.barrier(limit), [], None).wait()

    # ---- a tensor and its parts --------------------------------------------------------------------------------------

    @recorded("all_gather")
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SennitWork:
        if self._express is not None and self._express.all_gather(output, input, opts):
            return self._nothing_left
        self._check_parts("all_gather", output, input)
        check_output(output)
        timeout = self._limit(opts)

        def job() -> None:
            whole = flat_of(output)
            self._communicator.all_gather(whole.bytes, flat_of(input).bytes, timeout)
            whole.give_back()

        return self._call(job, [output], opts)

    @recorded("reduce_scatter")
    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> SennitWork:
        if self._express is not None and self._express.reduce_scatter(output, input, opts):
            return self._nothing_left
        self._check_parts("reduce_scatter", input, output)
        check_output(output)
        name, factor = reduction_of(opts)
        check_reducible(input, name, factor)
        timeout = self._limit(opts)

        def job() -> None:
            part = flat_of(output)
            self._reduce_scatter(part, scale(flat_of(input), factor), name, timeout)
            part.give_back()

        return self._call(job, [output], opts)

    @recorded("all_to_all")
    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> SennitWork:
        even = not output_splits and not input_splits  # on all ranks, or the first of them to differ is told so
        if even and self._express is not None and self._express.all_to_all(output, input, opts):
            return self._nothing_left
        sizes = [self._piece_bytes(item, splits) for item, splits in ((output, output_splits), (input, input_splits))]
        check_output(output)
        timeout = self._limit(opts)

        def job() -> None:
            whole = flat_of(output)
            received, sent = (None, None) if even else (sizes[0], sizes[1])
            self._communicator.all_to_all(whole.bytes, flat_of(input).bytes, received, sent, timeout)
            whole.give_back()

        return self._call(job, [output], opts)

    # ---- lists of tensors --------------------------------------------------------------------------------------------

    @recorded("all_gather")
    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> SennitWork:
        (input,) = _listed(inputs)
        outputs = _inner(output_lists)
        self._check_count("all_gather", outputs)
        for output in outputs:
            check_output(output)
        timeout = self._limit(opts)
        even = all(output.numel() == input.numel() for output in outputs)

        def job() -> None:
            if even:
                whole = joined(outputs)
                self._communicator.all_gather(whole.bytes, flat_of(input).bytes, timeout)
                whole.give_back()
                return
            for root, output in enumerate(outputs):  # sizes differ, and all ranks know them
                part = flat_of(output)
                if root == self._rank:
                    part.tensor.copy_(flat_of(input).tensor)
                self._communicator.broadcast(part.bytes, root, timeout)
                part.give_back()

        return self._call(job, outputs, opts)

    @recorded("gather")
    def gather(self, output_lists: Any, inputs: Any, opts: Any) -> SennitWork:
        (input,) = _listed(inputs)
        outputs = _inner(output_lists) if output_lists else []
        root, timeout = self._member(opts.rootRank), self._limit(opts)
        if self._rank == root:
            self._check_count("gather", outputs, input.numel())
            for output in outputs:
                check_output(output)

        def job() -> None:
            whole = joined(outputs) if self._rank == root else None
            self._communicator.gather(whole.bytes if whole else None, flat_of(input).bytes, root, timeout)
            if whole is not None:
                whole.give_back()

        return self._call(job, outputs, opts)

    @recorded("scatter")
    def scatter(self, outputs: Any, input_lists: Any, opts: Any) -> SennitWork:
        (output,) = listed = _listed(outputs)
        check_output(output)
        inputs = _inner(input_lists) if input_lists else []
        root, timeout = self._member(opts.rootRank), self._limit(opts)
        if self._rank == root:
            self._check_count("scatter", inputs, output.numel())

        def job() -> None:
            part = flat_of(output)
            whole = joined(inputs).bytes if self._rank == root else None
            self._communicator.scatter(part.bytes, whole, root, timeout)
            part.give_back()

        return self._call(job, listed, opts)

    @recorded("reduce_scatter")
    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> SennitWork:
        (output,) = listed = _listed(outputs)
        check_output(output)
        inputs = _inner(input_lists)
        self._check_count("reduce_scatter", inputs)
        name, factor = reduction_of(opts)
        check_reducible(output, name, factor)
        timeout = self._limit(opts)
        even = all(input.numel() == output.numel() for input in inputs)

        def job() -> None:
            part = flat_of(output)
            if even:
                self._reduce_scatter(part, scale(joined(inputs), factor), name, timeout)
            else:  # sizes differ, and all ranks know them
                for root, input in enumerate(inputs):
                    term = scale(flat_of(input.detach().clone()), factor)
                    self._communicator.reduce(term.tensor, root, plain_reduction(name), timeout)
                    if root == self._rank:
                        part.tensor.copy_(term.tensor)
                if name == "avg":
                    average(part.tensor, self._size)
            part.give_back()

        return self._call(job, listed, opts)

    @recorded("all_to_all")
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> SennitWork:
        for tensors in (outputs, inputs):
            self._check_count("all_to_all", tensors)
        for output in outputs:
            check_output(output)
        sizes = [[tensor.numel() * tensor.element_size() for tensor in tensors] for tensors in (outputs, inputs)]
        timeout = self._limit(opts)

        def job() -> None:
            whole = joined(outputs)
            self._communicator.all_to_all(whole.bytes, joined(inputs).bytes, sizes[0], sizes[1], timeout)
            whole.give_back()

        return self._call(job, list(outputs), opts)

    # ---- several calls in one ----------------------------------------------------------------------------------------

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> SennitWork:
        name, factor = reduction_of(opts)
        for tensor in tensors:
            check_place(tensor)
            check_reducible(tensor, name, factor)
            check_output(tensor)
        timeout = self._limit(opts)
        kinds = list(dict.fromkeys(tensor.dtype for tensor in tensors))

        def job() -> None:
            for kind in kinds:  # one all-reduce for each type
                flat = joined([tensor for tensor in tensors if tensor.dtype == kind])
                if factor is not None:
                    flat.tensor.mul_(factor)
                self._all_reduce(flat, name, timeout)
                flat.give_back()

        return self._call(job, list(tensors), opts)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SennitWork:
        return self._together(self._allgather_base, outputs, inputs, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SennitWork:
        return self._together(self._reduce_scatter_base, outputs, inputs, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> SennitWork:
        columns = [[tensors[index] for tensors in output_lists] for index in range(len(inputs))]
        works = [self.allgather([column], [input], opts) for column, input in zip(columns, inputs, strict=True)]
        return _all_of(works, [tensor for tensors in output_lists for tensor in tensors])

    # the names that torch gives to the same calls from 2.13 on
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    # ---- messages ----------------------------------------------------------------------------------------------------

    @recorded("send")
    def send(self, tensors: Any, peer: int, tag: int = 0) -> SennitWork:
        (tensor,) = listed = _listed(tensors)
        flat = flat_of(tensor)
        return self._posted(
            [self._open_links().send(self._member(peer), Label(_USER, tag), bytes_of(flat.tensor))], listed
        )

    @recorded("recv")
    def recv(self, tensors: Any, peer: int, tag: int = 0) -> SennitWork:
        (tensor,) = listed = _listed(tensors)
        check_output(tensor)
        flat = flat_of(tensor)
        ticket = self._open_links().receive(self._member(peer), Label(_USER, tag), bytes_of(flat.tensor))
        return self._posted([_given_back(ticket, flat)], listed)

    @recorded("recv")
    def recv_anysource(self, tensors: Any, tag: int = 0) -> SennitWork:
        (tensor,) = listed = _listed(tensors)
        check_output(tensor)
        flat = flat_of(tensor)
        ticket = self._open_links().receive_any(Label(_USER, tag), bytes_of(flat.tensor))
        return self._posted([_given_back(ticket, flat)], listed)

    def _open_links(self) -> Links:
        self._check_usable()
        if self._links is None:
            raise CollectiveError("a message in a group of one rank", fix="there is nobody to send to")
        return self._links

    def _posted(self, tickets: list[Ticket], tensors: list[Tensor]) -> SennitWork:
        if self._coalesced is not None:
            self._coalesced += tickets
        return SennitWork(tickets, tensors, self._timeout)

    # ---- shared by several -------------------------------------------------------------------------------------------

    def _all_reduce(self, flat: Flat, name: str, timeout: float) -> None:
        self._communicator.all_reduce(flat.tensor, plain_reduction(name), timeout)
        if name == "avg":
            average(flat.tensor, self._size)

    def _all_reduce_sparse(self, tensors: list[Tensor], opts: Any) -> SennitWork:
        (tensor,) = tensors
        name, factor = reduction_of(opts)
        check_sparse(tensor, name, factor)
        timeout = self._limit(opts)
        return self._call(lambda: all_reduce_sparse(self._communicator, tensor, name, factor, timeout), [tensor], opts)

    def _reduce_scatter(self, part: Flat, whole: Flat, name: str, timeout: float) -> None:
        self._communicator.reduce_scatter(part.tensor, whole.tensor, plain_reduction(name), timeout)
        if name == "avg":
            average(part.tensor, self._size)

    def _together(
        self,
        call: Callable[[Tensor, Tensor, Any], SennitWork | None],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
    ) -> SennitWork:
        return _all_of([call(o, i, opts) for o, i in zip(outputs, inputs, strict=True)], list(outputs))

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _member(self, rank: int) -> int:
        if not 0 <= rank < self._size:
            raise CollectiveError(
                f"a call names rank {rank} in a group of {self._size}",
                where=f"rank {self._rank} of {self._size}",
                fix=f"its ranks are 0 to {self._size - 1}",
            )
        return rank

    def _check_parts(self, name: str, whole: Tensor, part: Tensor) -> None:
        check_place(whole)
        check_place(part)
        if whole.numel() != part.numel() * self._size or whole.dtype != part.dtype:
            raise CollectiveError(
                f"{name} of {whole.numel()} elements of {whole.dtype} and parts of {part.numel()} of {part.dtype}",
                where=f"rank {self._rank} of {self._size}",
                fix=f"the whole has {self._size} parts, one for each rank",
            )

    def _check_count(self, name: str, tensors: Sequence[Tensor], each: int | None = None) -> None:
        for tensor in tensors:
            check_place(tensor)
        wrong = [tensor.numel() for tensor in tensors if each is not None and tensor.numel() != each]
        if len(tensors) != self._size or wrong:
            sizes = f", of {wrong[0]} elements where others have {each}" if wrong else ""
            raise CollectiveError(
                f"{name} with {len(tensors)} tensors{sizes}",
                where=f"rank {self._rank} of {self._size}",
                fix=f"pass {self._size} tensors, one for each rank",
            )

    def _piece_bytes(self, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """The bytes of what goes to or comes from each rank; `splits` are along the first dim, or empty for equal ones."""
        check_place(tensor)
        rows = tensor.shape[0] if tensor.dim() else 1
        total = tensor.numel() * tensor.element_size()
        if not splits:
            if rows % self._size:
                raise CollectiveError(
                    f"all_to_all of {rows} rows over {self._size} ranks",
                    where=f"rank {self._rank}",
                    fix="pass split sizes, or a number of rows that the ranks divide",
                )
            return [total // self._size] * self._size
        if len(splits) != self._size or sum(splits) != rows:
            raise CollectiveError(
                f"all_to_all with split sizes {list(splits)} for {rows} rows and {self._size} ranks",
                where=f"rank {self._rank}",
                fix="give one for each rank, that add up to the rows",
            )
        return [split * (total // rows if rows else 0) for split in splits]


def _listed(tensors: Any) -> list[Tensor]:
    """c10d passes lists of one tensor; some callers pass the tensor itself."""
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1:
        raise CollectiveError(f"{len(found)} tensors in one call", fix="pass one, or use the coalesced form")
    check_place(found[0])
    return found


def _inner(lists: Any) -> list[Tensor]:
    """The one inner list of a list of lists; some callers pass the inner one itself."""
    found = list(lists)
    tensors = found if found and isinstance(found[0], Tensor) else list(found[0]) if found else []
    for tensor in tensors:
        check_place(tensor)
    return tensors


def _given_back(ticket: Ticket, flat: Flat) -> Ticket:
    """A ticket that is done once the message is in the user's tensor."""
    outer = Ticket(ticket.what, ticket.peers)

    def ended() -> None:
        if ticket.error is None:
            flat.give_back()
        outer.source = ticket.source
        outer.finish(ticket.error)

    ticket.then(ended)
    return outer


def _all_of(works: Sequence[SennitWork | None], outputs: list[Tensor]) -> SennitWork:
    """None: of a call that is done."""
    return SennitWork([ticket for work in works if work is not None for ticket in work.tickets], outputs, None)
