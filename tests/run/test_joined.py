"""What the source does in one call: which reductions share a bucket, which sums are taken in place, and that both
compute the same.
"""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sennit.ir.mesh import Mesh
from sennit.ir.program import Collective, Compute, Program
from sennit.plan import lower, propagate, zoo
from sennit.run import emit_lane
from sennit.run.apart import apart
from sennit.run.bucket import Bucket
from sennit.run.joined import joined
from sennit.run.local_forms import Indices, LocalForms

EARLY = """
program "one is read early" {
  mesh m0 = dp=2
  lane both on 0-1 {
    param %w : f32[4,2] of %w on m0 "w"
    forward %a : f32[4,2]{sum:dp} of %a on m0 = sennit.partial(%w) for %w ""
    all_reduce %ra : f32[4,2] of %a on m0 = %a over dp
    forward %b : f32[4,2]{sum:dp} of %b on m0 = sennit.partial(%w) for %w ""
    all_reduce %rb : f32[4,2] of %b on m0 = %b over dp
    forward %c : f32[4,2]{sum:dp} of %c on m0 = sennit.partial(%w) for %w ""
    all_reduce %rc : f32[4,2] of %c on m0 = %c over dp
    forward %v : f32[2,4] of %v on m0 = aten.permute.default(%rc, [1, 0]) for %v ""
    forward %x : f32[4,2] of %x on m0 = aten.relu.default(%ra) for %x ""
    result "x" %x
    result "b" %rb
    result "v" %v
  }
}
"""


def test_what_is_read_before_the_end_is_reduced_by_itself() -> None:
    program = Program.parse(EARLY)
    (lane,) = program.lanes
    found = joined(lane).buckets
    assert set(found) == {"rb", "rc"}  # a view reads nothing before it is read itself
    assert len({bucket.number for bucket in found.values()}) == 1
    assert found["rb"].sources == ("b", "c")
    source = emit_lane(program, lane)
    assert "3 all_reduce over dp; 2 of them in 1 bucket." in source
    assert source.count("rank.all_reduce(") == 1


def test_gradients_of_replicas_share_buckets(small_gpt) -> None:
    program = lower(propagate(zoo.data_parallel(small_gpt.graph, Mesh.parse("dp=2;mb=2"))))
    (lane,) = program.lanes
    reductions = [step for step in lane.steps if isinstance(step, Collective)]
    found = joined(lane)
    alone = [step for step in reductions if step.result.name not in found.buckets]
    # alone: the number of targets and the sum over the batch that the table of positions gets, which are read; what
    # fills a bucket by itself
    assert 2 <= len(alone) < len(found.buckets)
    assert found.onto  # gradients of weights are added to those of the micro-batch before
    assert all(isinstance(step, Compute) and step.kind == "sennit.accumulate" for step in found.onto.values())
    assert "rank.add_product(" in emit_lane(program, lane)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.lists(st.lists(st.integers(1, 4), min_size=0, max_size=3), min_size=1, max_size=6), st.sampled_from([None, 2])
)
def test_a_bucket_is_its_parts_side_by_side(shapes: list[list[int]], pieces: int | None) -> None:
    lead = [] if pieces is None else [pieces]
    parts = [torch.randn([*lead, *shape], dtype=torch.float64) for shape in shapes]
    started: list[Tensor] = []

    class Done:
        def wait(self) -> Tensor:
            return started[0] if pieces is None else started[0].sum(0)

    def start(flat: Tensor) -> Done:
        started.append(flat)
        return Done()

    bucket = Bucket(len(parts), sum(torch.Size(shape).numel() for shape in shapes), pieces, start)
    handles = []
    for part in parts:
        assert not started
        handles.append(bucket.add(part))
    for part, handle in zip(parts, handles, strict=True):
        torch.testing.assert_close(handle.wait(), part if pieces is None else part.sum(0), rtol=0, atol=0)
    assert len(started) == 1


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 6)), min_size=1, max_size=8))
def test_tensors_apart_share_no_memory(cuts: list[tuple[int, int, int]]) -> None:
    bases = [torch.arange(16.0) + 100 * k for k in range(3)]
    tensors = [bases[base][start : start + size] for base, start, size in cuts]
    made = apart(tensors)
    taken: set[int] = set()
    for tensor, same in zip(tensors, made, strict=True):
        torch.testing.assert_close(same, tensor, rtol=0, atol=0)
        addresses = set(range(same.data_ptr(), same.data_ptr() + same.nbytes))
        assert not addresses & taken
        taken |= addresses


def test_neighbours_in_a_full_storage_stay_where_they_are() -> None:
    flat = torch.zeros(10)
    parts = [flat[:4], flat[4:10]]
    assert [part.data_ptr() for part in apart(parts)] == [part.data_ptr() for part in parts]
    assert apart([flat[:4]])[0].untyped_storage().nbytes() == 16  # the rest of the storage would stay for nothing


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.data())
def test_rows_are_added_as_the_dense_gradient_would_be(data: st.DataObject) -> None:
    rows, width, pieces = 12, 3, data.draw(st.sampled_from([1, 2, 3]))
    index = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=9)))
    padding, fresh = data.draw(st.sampled_from([-1, 0, 5])), data.draw(st.booleans())
    grad = torch.randn(len(index), width, dtype=torch.float64)
    total = torch.randn(rows, width, dtype=torch.float64)
    whole = total + torch.ops.aten.embedding_dense_backward.default(grad, index, rows, padding, False)
    forms = LocalForms()
    each = rows // pieces
    for at in range(pieces):
        held = Indices(((pieces, at), (each, None))) if pieces > 1 else None
        part = total[at * each : (at + 1) * each].clone()
        before = part.clone()
        added = forms.add_rows(part, grad, index, padding, fresh, rows=held)
        torch.testing.assert_close(added, whole[at * each : (at + 1) * each], rtol=1e-14, atol=1e-14)
        assert not fresh or torch.equal(part, before)
