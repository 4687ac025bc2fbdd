"""Gradients on their way: buckets packed, reduced and waited for, in one order on all ranks.

Each bucket has one flat buffer, made once. A gradient is scaled by 1 / ranks while it is copied in, as DDP does, or,
where a product makes it, computed in its place; then the bucket is summed over the ranks. Buckets are issued in the
order of the strategy: one that is ready out of turn waits for those before it. The group runs one collective at a time,
in the order of issue, so the order on the wire is the order of the strategy on every rank, and no two ranks can wait
for each other. Shares of a bucket that was reduced to shares are gathered when it is waited for: all ranks wait in the
same order too, that of the forward pass, also where one of them waits earlier than the others (to save a state).

A part of a gradient lies in its bucket's buffer. `gradient(path)` gives the whole of it: a view of the buffer, or,
where it is cut, a tensor of its own. A bucket that holds one part of a cut gradient and nothing else lies in that
tensor, so that nothing has to be put together; parts that share a bucket with others are copied.

Of tables (`looked_up.py`) packed rows travel. `begin` starts the exchange of the ranks' indices, and of whether a rank
needs the table whole since it adds to a gradient that is there; if one does, the table travels whole behind its bucket,
on all ranks. Packed rows lie at the end of their bucket, and what is not used of them is not sent. Rows of a head that
is a table too lie at the end of theirs, and those that travel packed are left out (`table_rows_torch.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from sennit.errors import RunError
from sennit.fuse.looked_up import ROWS, LookUp, in_one_piece, parameter_of
from sennit.fuse.products_torch import RowBlocks
from sennit.fuse.table_rows_torch import HeadEnd, HeadRows, LeftOut, looked_up_rows, looked_up_table
from sennit.ir.strategy import Bucket, Reduce

__all__ = ["GradientChannel"]


@dataclass(slots=True)
class _Slot:
    """A bucket's buffer, where its parts lie in it, and what is under way."""

    bucket: Bucket
    buffer: Tensor
    offsets: tuple[int, ...]
    missing: int
    work: dist.Work | None = None
    used: int = 0  # elements that travel
    tables: list[str] = field(default_factory=list)  # tables that travel whole behind it, this time
    head: HeadEnd | None = None
    left_out: LeftOut | None = None  # while it is under way
    share: Tensor | None = None  # this rank's part of a bucket that is reduced to shares


@dataclass(slots=True)
class _Piece:
    """The elements `start` to `stop` of a gradient, where they lie in a bucket's buffer: in the gradient's shape where
    it is whole, else flat. `missing` of them have not come.
    """

    slot: _Slot
    start: int
    stop: int
    view: Tensor
    missing: int


@dataclass(slots=True)
class _Exchange:
    """The ranks' indices on their way: for each table, by rank, whether it must be whole and the indices."""

    paths: tuple[str, ...]
    told: list[Tensor]
    work: dist.Work | None


class GradientChannel:
    """The buckets of one strategy.

    `shapes` gives every gradient's shape and type, `packed` the tables of which rows travel; one that the strategy cuts
    travels whole.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        shapes: Mapping[str, tuple[torch.Size, torch.dtype]],
        device: torch.device,
        group: dist.ProcessGroup,
        packed: Mapping[str, LookUp] | None = None,
    ) -> None:
        self.shapes, self.group, self.ranks = dict(shapes), group, group.size()
        self.packed = in_one_piece(packed or {}, buckets)
        self.unions: dict[str, Tensor] = {}  # the rows of each table that travel packed this time
        self.heads: dict[
            str, HeadRows | Tensor
        ] = {}  # rows of the head's gradient, or all of it, until the look-up's come
        self.behind: dict[str, dist.Work | None] = {}  # tables that travel whole
        self._exchange: _Exchange | None = None
        self.places: dict[str, list[tuple[int, int]]] = {}  # path -> (bucket, part), in the order of elements
        for number, bucket in enumerate(buckets):
            for place, part in enumerate(bucket.parts):
                self.places.setdefault(part.path, []).append((number, place))
        self.whole = {
            path: torch.empty(self.shapes[path][0], dtype=self.shapes[path][1], device=device)
            for path, where in self.places.items()
            if len(where) > 1 or path in self.packed
        }
        self.slots = [self._slot(bucket, device) for bucket in buckets]
        for where in self.places.values():
            where.sort(key=lambda item: self._span(*item)[0])
        # once: to cut views anew for each gradient costs more than the copy of a small one
        self.pieces = {path: [self._piece(*place) for place in where] for path, where in self.places.items()}
        self.in_rows: dict[str, tuple[list[_Piece], list[Tensor]]] = {}  # gradients that products make, once asked for
        self.issued = 0  # how many of the buckets are under way or done

    def _slot(self, bucket: Bucket, device: torch.device) -> _Slot:
        sizes = [self._carried(part.path, part.span) for part in bucket.parts]
        dtype = self.shapes[bucket.parts[0].path][1]
        if others := [part.path for part in bucket.parts if self.shapes[part.path][1] is not dtype]:
            raise RunError(
                f"a bucket mixes element types: {bucket.parts[0].path} is {dtype}, {others[0]} is {self.shapes[others[0]][1]}",
                fix="put parameters of different types in different buckets of the strategy",
            )
        # packed rows last: fewer of them may be used; before them those of a head, of which some are left out
        order = sorted(range(len(sizes)), key=lambda place: self._turn(bucket.parts[place].path))
        offsets, total = [0] * len(sizes), 0
        for place in order:
            offsets[place], total = total, total + sizes[place]
        if bucket.reduce is Reduce.REDUCE_SCATTER:
            total = -(-total // self.ranks) * self.ranks
        first = bucket.parts[0]
        if (
            len(bucket.parts) == 1
            and first.path in self.whole
            and first.path not in self.packed
            and first.span is not None
            and total == sizes[0]
        ):
            buffer = self.whole[first.path].view(-1)[slice(*first.span)]
        else:
            buffer = torch.zeros(total, dtype=dtype, device=device)
        is_summed = bucket.reduce is Reduce.ALL_REDUCE
        head = HeadEnd.of([bucket.parts[place] for place in order], self.packed, buffer) if is_summed else None
        return _Slot(bucket, buffer, tuple(offsets), len(bucket.parts), used=total, head=head)

    def _turn(self, path: str) -> int:
        return 2 if path in self.packed else 1 if path + ROWS in self.packed else 0

    def _carried(self, path: str, span: tuple[int, int] | None) -> int:
        return self.packed[path].elements if path in self.packed else self._elements(path, span)

    def _elements(self, path: str, span: tuple[int, int] | None) -> int:
        return self.shapes[path][0].numel() if span is None else span[1] - span[0]

    def _span(self, number: int, place: int) -> tuple[int, int]:
        part = self.slots[number].bucket.parts[place]
        return part.span or (0, self._elements(part.path, None))

    def _piece(self, number: int, place: int) -> _Piece:
        slot = self.slots[number]
        start, stop = self._span(number, place)
        if (path := slot.bucket.parts[place].path) in self.packed:
            item = self.packed[path]
            view = slot.buffer[slot.offsets[place] : slot.offsets[place] + item.elements]
            return _Piece(slot, start, stop, view.view(item.most, item.width), stop - start)
        view = slot.buffer[slot.offsets[place] : slot.offsets[place] + stop - start]
        whole = len(self.places[path]) == 1
        return _Piece(slot, start, stop, view.view(self.shapes[path][0]) if whole else view, stop - start)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def begin(self, indices: Mapping[str, Tensor] | None = None, whole: Collection[str] = ()) -> None:
        """A new backward pass fills the buckets anew.

        Everything before it was waited for. `indices` are those of every packed table, `whole` the tables that must
        travel whole.
        """
        self.unions = {}
        if self.packed and indices is not None:
            paths = tuple(self.packed)
            own = torch.cat(
                [part for path in paths for part in (torch.tensor([path in whole]), indices[path].reshape(-1))]
            ).long()
            told = [torch.empty_like(own) for _ in range(self.ranks)]
            self._exchange = _Exchange(paths, told, dist.all_gather(told, own, group=self.group, async_op=True))
        for slot in self.slots:
            assert slot.work is None, "a bucket of the step before is still under way"
            slot.missing, slot.used, slot.tables = len(slot.bucket.parts), slot.buffer.numel(), []
        for pieces in self.pieces.values():
            for piece in pieces:
                piece.missing = piece.stop - piece.start
        self.issued = 0

    def put(self, path: str, gradient: Tensor) -> None:
        """A gradient is there: into its buckets, and off with those that are full and next."""
        if path in self.packed:
            self._pack(path, gradient)
            return
        pieces = self.pieces[path]
        # a gradient that is whole is read as it lies in memory: to flatten a transposed one first would be a second
        # copy
        parts = [gradient] if len(pieces) == 1 else [gradient.reshape(-1)[piece.start : piece.stop] for piece in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            torch.mul(part, 1.0 / self.ranks, out=piece.view)
            piece.slot.missing -= 1
        self._send()

    def _pack(self, path: str, gradient: Tensor) -> None:
        """The rows of the union into their bucket; or the whole table beside it."""
        self._hear()
        (piece,) = self.pieces[path]
        if (union := self.unions.get(path)) is None:
            torch.mul(gradient, 1.0 / self.ranks, out=self.whole[path])
            piece.slot.tables.append(path)
            self._packed(piece, 0)
        else:
            torch.index_select(gradient, 0, union, out=piece.view[: union.numel()]).mul_(1.0 / self.ranks)
            self._packed(piece, union.numel())

    def put_rows(self, path: str, source: Tensor, places: Tensor, before: Tensor | None = None) -> None:
        """The gradient of a look-up is there, as what it adds up and where. `before` is added to it."""
        self._hear()
        (piece,) = self.pieces[path]
        item, union, head = self.packed[path], self.unions.get(path), self.heads.pop(path, None)
        if union is None:
            whole = looked_up_table(item, source, places)
            assert not isinstance(head, HeadRows)
            for other in (head, before):
                whole = whole if other is None else other + whole
            self._pack(path, whole)
            return
        made, view = looked_up_rows(item, source, places, union), piece.view[: union.numel()]
        if isinstance(head, HeadRows):
            head.add(made, 1.0 / self.ranks, view)
        else:
            torch.mul(made, 1.0 / self.ranks, out=view)
        self._packed(piece, union.numel())

    def _packed(self, piece: _Piece, used: int) -> None:
        """So many rows are in their bucket."""
        slot = piece.slot
        is_last = piece.view.data_ptr() + piece.view.nbytes == slot.buffer.data_ptr() + slot.buffer.nbytes
        if is_last and slot.bucket.reduce is Reduce.ALL_REDUCE:
            slot.used -= (piece.view.shape[0] - max(used, 1)) * piece.view.shape[1]  # no collective of nothing
        else:
            piece.view[used:].zero_()
        slot.missing -= 1
        self._send()

    def _hear(self) -> None:
        """What the ranks told each other when the pass began."""
        if self._exchange is None:
            return
        paths, told, work = self._exchange.paths, self._exchange.told, self._exchange.work
        self._exchange = None
        if work is not None:
            work.wait()
        at = 0
        for path in paths:
            count = self.packed[path].count
            said = torch.stack([one[at : at + 1 + count] for one in told])
            if not said[:, 0].any():
                self.unions[path] = torch.unique(said[:, 1:])
            at += 1 + count

    def put_part(self, path: str, start: int, part: Tensor) -> None:
        """The elements of a gradient from `start` on are there.

        It lies flat in memory, and its parts may come in any order.
        """
        flat = part.reshape(-1)
        stop = start + flat.numel()
        for piece in self.pieces[path]:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                target = piece.view.view(-1)[low - piece.start : high - piece.start]
                torch.mul(flat[low - start : high - start], 1.0 / self.ranks, out=target)
                piece.missing -= high - low
                piece.slot.missing -= not piece.missing
        self._send()

    def put_product(self, path: str, product: RowBlocks, left: Tensor, right: Tensor) -> None:
        """A gradient is left @ right: computed in the place from which it travels where its blocks lie there as they
        are, and off with each bucket once its rows are there.
        """
        if path not in self.in_rows:
            self.in_rows[path] = self._in_rows(path, product)
        pieces, places = self.in_rows[path]
        written = product.written(left, right, places, 1.0 / self.ranks) if places else None
        if path + ROWS in self.packed:
            self._put_head(path, product, left, right, written)
        elif written is None:
            for start, block in product(left, right):
                self.put_part(path, start, block)
        else:
            for piece, _ in zip(pieces, written, strict=True):
                piece.slot.missing -= 1
                self._send()

    def _put_head(
        self, path: str, product: RowBlocks, left: Tensor, right: Tensor, written: Iterator[tuple[int, int]] | None
    ) -> None:
        """The same, with the rows kept that the look-up's are added to.

        The first block is made before the ranks' indices are asked for: they may still be on their way.
        """
        pieces, places = self.in_rows[path]
        head: HeadRows | None = None
        made: Iterator[tuple[int, Tensor, _Piece | None]]
        if written is None:
            made = ((start // product.width, block, None) for start, block in product(left, right))
        else:
            made = ((row, place, piece) for (row, _), place, piece in zip(written, places, pieces, strict=True))
        for row, block, piece in made:
            if head is None:
                kept = self._head(path, 1.0 if written is None else 1.0 / self.ranks)
                if isinstance(kept, Tensor):
                    self.put_part(path, 0, torch.mm(left, right, out=kept))
                    return
                head = kept
            head.keep(row, block)
            if piece is None:
                self.put_part(path, row * product.width, block)
            else:
                piece.slot.missing -= 1
                self._send()

    def _head(self, path: str, scale: float) -> HeadRows | Tensor:
        """Where rows of the head's gradient, times `scale`, are kept for the sum with the look-up's; or all of it, if
        the table travels whole.
        """
        self._hear()
        union, (shape, dtype) = self.unions.get(path + ROWS), self.shapes[path]
        count = shape[0] if union is None else union.numel()
        rows = torch.empty((count, *shape[1:]), dtype=dtype)
        self.heads[path + ROWS] = head = rows if union is None else HeadRows(union, rows, scale)
        return head

    def _in_rows(self, path: str, product: RowBlocks) -> tuple[list[_Piece], list[Tensor]]:
        """For each block of rows its piece, and the place in it, as rows.

        Nothing where one ends inside a row, or packed rows travel.
        """
        by_span = {(piece.start, piece.stop): piece for piece in self.pieces[path]}
        spans = [(start * product.width, stop * product.width) for start, stop in product.rows]
        if path in self.packed or by_span.keys() != set(spans):
            return [], []
        pieces = [by_span[span] for span in spans]
        return pieces, [piece.view.view(-1, product.width) for piece in pieces]

    def _send(self) -> None:
        """Off with the buckets that are full and next."""
        while self.issued < len(self.slots) and self.slots[self.issued].missing == 0:
            self._issue(self.slots[self.issued])
            self.issued += 1

    def _issue(self, slot: _Slot) -> None:
        if slot.head is not None:
            self._hear()
            if (union := self.unions.get(slot.head.path)) is not None:
                slot.left_out = LeftOut.of(slot.head.region, slot.head.spans, union)
                slot.used -= (slot.head.region.shape[0] - max(slot.left_out.sent, 1)) * slot.head.region.shape[1]
        self._start(slot)

    def _start(self, slot: _Slot) -> None:
        """The bucket's collectives, behind all that were started before."""
        match slot.bucket.reduce:
            case Reduce.ALL_REDUCE:
                slot.work = dist.all_reduce(slot.buffer[: slot.used], group=self.group, async_op=True)
            case Reduce.REDUCE_SCATTER:
                slot.share = slot.buffer.new_empty(slot.buffer.numel() // self.ranks)
                slot.work = dist.reduce_scatter(slot.share, self._shares(slot), group=self.group, async_op=True)
        for path in slot.tables:
            self.behind[path] = dist.all_reduce(self.whole[path], group=self.group, async_op=True)

    def wait(self, number: int) -> None:
        """Until the mean of this bucket is there."""
        slot = self.slots[number]
        if slot.work is None:
            return
        slot.work.wait()
        slot.work = None
        if slot.left_out is not None:
            slot.left_out.move_back()
            slot.left_out = None
        if slot.share is not None:
            dist.all_gather(self._shares(slot), slot.share, group=self.group)
            slot.share = None
        for path in slot.tables:
            if (behind := self.behind.pop(path)) is not None:
                behind.wait()

    def _shares(self, slot: _Slot) -> list[Tensor]:
        return list(slot.buffer.view(self.ranks, -1).unbind(0))

    def gradient(self, path: str) -> Tensor:
        """The mean gradient, once all its buckets were waited for."""
        pieces = self.pieces[path]
        if path in self.packed:
            return self._unpacked(path)
        if len(pieces) == 1:
            return pieces[0].view
        whole = self.whole[path]
        for piece in pieces:
            place = whole.view(-1)[piece.start : piece.stop]
            if place.data_ptr() != piece.view.data_ptr():
                place.copy_(piece.view)
        return whole

    def brought(self, path: str, number: int) -> Iterator[tuple[int, int, Tensor]]:
        """The elements of a gradient that this bucket brought, once it was waited for: the first, the one behind the
        last, and their values, flat.
        """
        for (bucket, _), piece in zip(self.places[path], self.pieces[path], strict=True):
            if bucket == number:
                yield piece.start, piece.stop, piece.view.view(-1)

    def _unpacked(self, path: str) -> Tensor:
        """The whole table: zeros, or what the head's gradient has in it, and the packed rows."""
        union, whole = self.unions.get(path), self.whole[path]
        if union is not None:
            whole = self.gradient(parameter_of(path)) if path.endswith(ROWS) else whole.zero_()
            whole.index_copy_(0, union, self.pieces[path][0].view[: union.numel()])
        return whole
