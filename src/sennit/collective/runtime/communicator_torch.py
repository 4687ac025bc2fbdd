"""What the c10d backend asks of whatever moves its bytes: collectives on flat tensors, by ranks of the group.

Tensors are contiguous, one-dimensional, on the CPU. A reduction gets a type that it can reduce; where nothing is
reduced, tensors are bytes. "Parts" are the equal pieces of a tensor, one for each rank.

| | input | output | after |
|---|---|---|---|
| all_reduce(x) | x | x | the reduction of all |
| all_gather(out, x) | x | out: parts | part r is x of rank r |
| reduce_scatter(out, x) | x: parts | out | the reduction of part `rank` of all |
| all_to_all(out, x, out_sizes, in_sizes) | x: pieces of in_sizes | out: pieces of out_sizes | piece r of out is piece `rank` of x of rank r |
| broadcast(x, root) | x of the root | x | |
| reduce(x, root) | x | x of the root | the reduction of all; others keep theirs |
| gather(out, x, root) | x | out of the root: parts | |
| scatter(out, x, root) | x of the root: parts | out | |
| barrier() | | | all have come |

`Solo` is a group of one rank. `Linked` (`linked_torch.py`) runs compiled schedules over sockets, `Shared`
(`shared_torch.py`) runs them in shared memory, `Hosts` (`hosts_torch.py`) joins the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Communicator", "Solo"]


class Communicator(Protocol):
    """One rank's end. Calls block; they are made one after another, in the same order on all ranks."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> None: ...
    def all_gather(self, output: Tensor, input: Tensor, timeout: float) -> None: ...
    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: str, timeout: float) -> None: ...
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        timeout: float,
    ) -> None:
        """Without sizes the pieces are equal, and all ranks know it."""
        ...

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None: ...
    def reduce(self, tensor: Tensor, root: int, reduction: str, timeout: float) -> None: ...
    def gather(self, output: Tensor | None, input: Tensor, root: int, timeout: float) -> None: ...
    def scatter(self, output: Tensor, input: Tensor | None, root: int, timeout: float) -> None: ...
    def barrier(self, timeout: float) -> None: ...
    def abort(self, why: str) -> None:
        """Break the group for all ranks that can be told: a rank of it has failed."""

    def allocate(self, nbytes: int) -> Tensor | None:
        """Bytes that the ranks of this host read where they are; None where they share no memory."""
        ...

    def close(self) -> None: ...


class Solo:
    """A group of one rank."""

    rank, size = 0, 1

    def all_reduce(self, tensor: Tensor, reduction: str, timeout: float) -> None:
        pass

    def all_gather(self, output: Tensor, input: Tensor, timeout: float) -> None:
        output.copy_(input)

    def reduce_scatter(self, output: Tensor, input: Tensor, reduction: str, timeout: float) -> None:
        output.copy_(input)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None,
        input_sizes: Sequence[int] | None,
        timeout: float,
    ) -> None:
        output.copy_(input)

    def broadcast(self, tensor: Tensor, root: int, timeout: float) -> None:
        pass

    def reduce(self, tensor: Tensor, root: int, reduction: str, timeout: float) -> None:
        pass

    def gather(self, output: Tensor | None, input: Tensor, root: int, timeout: float) -> None:
        assert output is not None  # this rank is the root
        output.copy_(input)

    def scatter(self, output: Tensor, input: Tensor | None, root: int, timeout: float) -> None:
        assert input is not None
        output.copy_(input)

    def barrier(self, timeout: float) -> None:
        pass

    def abort(self, why: str) -> None:
        pass

    def allocate(self, nbytes: int) -> Tensor | None:
        return None

    def close(self) -> None:
        pass
