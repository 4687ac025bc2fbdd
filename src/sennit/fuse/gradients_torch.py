"""From the kernel that makes a gradient to `parameter.grad`.

    gradients = Gradients(trained, sent, channel)
    gradients.begin(values)                  # a backward pass that communicates begins
    program.backward(values, gradients.take, gradients.take_product, gradients.take_rows)
    gradients.end()                          # all buckets are under way: they are owed
    gradients.arrive(b)                      # bucket b is there: the parameters whose gradients it completes
    gradients.rows(b, path)                  # and of one whose rows are used as they come, those that it brought

`take` adds to a gradient that is there already and sends the sum. `keep` does the same for a pass that communicates
nothing, and leaves it with the parameter. A product is handed on as its factors (`products_torch.py`), the gradient of
a look-up as what it adds up and where (`table_rows_torch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from sennit.fuse.awaited_torch import Awaited
from sennit.fuse.channel_torch import GradientChannel
from sennit.fuse.looked_up import ROWS, parameter_of
from sennit.fuse.products_torch import RowBlocks
from sennit.fuse.row_uses import UseBlock
from sennit.fuse.table_rows_torch import looked_up_table

__all__ = ["Gradients"]


class Gradients:
    """Those of one strategy.

    `trained` are the parameters by path; `sent` are they by gradient: a table that is also the head has two. `blocks`
    are those that are read in blocks of rows (`row_uses.py`).
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Parameter],
        sent: Mapping[str, nn.Parameter],
        channel: GradientChannel,
        blocks: Mapping[str, Sequence[UseBlock]] | None = None,
        *,
        late: Collection[int] = (),
        flush: Callable[[], Callable[[], None] | None] | None = None,
    ) -> None:
        """Gradients of the buckets in `late` are on their way when the backward pass ends; `flush` is a weak reference
        to what waits for all of them."""
        self.trained, self.sent, self.channel, self.blocks = trained, sent, channel, dict(blocks or {})
        self._heads: dict[str, Tensor] = {}  # that stay on this rank, until the look-up's rows come
        self.owed: dict[int, bool] = {}  # buckets of the last backward pass that were not waited for yet
        self._asked: set[str] = set()  # those of which the optimizer's step was asked for
        self._awaited: dict[str, Awaited] = {}  # what stands at `parameter.grad` until then
        if flush is not None:
            paths = {parameter_of(part.path) for number in late for part in channel.slots[number].bucket.parts}
            self._awaited = {path: Awaited(path, self.trained[path], flush) for path in paths}

    def begin(self, values: Mapping[str, Tensor]) -> None:
        packed = self.channel.packed
        indices = {path: values[item.indices] for path, item in packed.items()}
        self.channel.begin(indices, [path for path in packed if self.sent[path].grad is not None])

    def end(self) -> None:
        self.owed = dict.fromkeys(range(len(self.channel.slots)), True)
        for path, awaited in self._awaited.items():
            self.trained[path].grad = awaited
        self._asked = set()

    def take(self, path: str, gradient: Tensor) -> None:
        """A gradient is there, to be sent."""
        before = self._before(path)
        self.channel.put(path, gradient if before is None else before + gradient)

    def _before(self, path: str) -> Tensor | None:
        """What a gradient is added to."""
        parameter = self.sent[path]
        if path + ROWS in self.sent:
            # it is added to the sum that comes under that name; until then it may lie in the bucket that this part goes
            # to
            parameter.grad = None if parameter.grad is None else parameter.grad.clone()
            return None
        before, parameter.grad = parameter.grad, None
        return before

    def take_product(self, path: str, product: RowBlocks, left: Tensor, right: Tensor) -> None:
        """A gradient is left @ right, to be sent."""
        before = self._before(path)
        if before is None:
            self.channel.put_product(path, product, left, right)
            return
        flat = before.reshape(-1)
        for start, part in product(left, right):
            self.channel.put_part(path, start, flat[start : start + part.numel()].view_as(part) + part)

    def take_rows(self, path: str, source: Tensor, places: Tensor) -> None:
        """The gradient of a look-up is there, to be sent."""
        self.channel.put_rows(path, source, places, self._before(path))

    def keep(self, path: str, gradient: Tensor) -> None:
        """A gradient is there, and stays on this rank."""
        if path + ROWS in self.sent:  # a part of the sum that comes under that name
            return
        parameter = self.sent[path]
        parameter.grad = gradient.clone() if parameter.grad is None else parameter.grad + gradient

    def keep_product(self, path: str, product: RowBlocks, left: Tensor, right: Tensor) -> None:
        """A gradient is left @ right, and stays on this rank: in one piece, since none of it leaves."""
        parameter = self.sent[path]
        gradient = torch.mm(left, right)
        if path + ROWS in self.sent:
            self._heads[path + ROWS] = gradient
            return
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def keep_rows(self, path: str, source: Tensor, places: Tensor) -> None:
        """The gradient of a look-up is there, and stays on this rank."""
        gradient = looked_up_table(self.channel.packed[path], source, places)
        head = self._heads.pop(path, None)
        self.keep(path, gradient if head is None else head + gradient)

    def is_wanted(self, path: str) -> bool:
        """Whether this gradient is still asked for: somebody may have set another one meanwhile, or none."""
        if (awaited := self._awaited.get(path)) is None:
            return True
        return path in self._asked or self.trained[path].grad is awaited

    def in_blocks(self, number: int) -> list[str]:
        """Parameters that are read in blocks, of which this bucket has some."""
        if not self.blocks:
            return []
        paths = dict.fromkeys(part.path for part in self.channel.slots[number].bucket.parts)
        return [path for path in paths if path in self.blocks]

    def rows(self, number: int, path: str) -> Iterator[tuple[slice, Tensor, bool]]:
        """The rows of a parameter that a bucket brought, with their gradient, and whether these are the last."""
        width = self.trained[path][0].numel()
        brought = list(self.channel.brought(path, number))
        is_complete = not any(bucket in self.owed for bucket, _ in self.channel.places[path])
        for place, (start, stop, gradient) in enumerate(brought):
            yield slice(start // width, stop // width), gradient, is_complete and place == len(brought) - 1

    def arrive(self, number: int, in_rows: Collection[str] = ()) -> list[nn.Parameter]:
        """A bucket is there: the gradients that it completes are the parameters' now, but for parameters whose rows are
        taken one by one.
        """
        self.channel.wait(number)
        del self.owed[number]
        complete: list[nn.Parameter] = []
        for path in dict.fromkeys(parameter_of(part.path) for part in self.channel.slots[number].bucket.parts):
            if path in in_rows:
                continue
            paths = [path, path + ROWS] if path + ROWS in self.sent else [path]
            if not any(bucket in self.owed for one in paths for bucket, _ in self.channel.places[one]):
                if not self.is_wanted(path):
                    continue
                parameter = self.trained[path]
                parameter.grad = self.channel.gradient(paths[-1])
                complete.append(parameter)
        return complete

    def ask(self) -> set[int]:
        """The optimizer is asked for its step. The parameters, by `id`, that are updated later, since their gradients
        are owed: like the others these gradients are gone now."""
        owed = {parameter_of(part.path) for number in self.owed for part in self.channel.slots[number].bucket.parts}
        self._asked |= {path for path in owed if self.is_wanted(path)}
        for path in self._asked:
            self.trained[path].grad = None
        return {id(self.trained[path]) for path in self._asked}
