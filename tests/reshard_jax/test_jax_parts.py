"""All-to-alls and gathers as permutes of single parts: every sequence gives the values of `jax.device_put`, in groups
of any size.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

jax = pytest.importorskip("jax")

from jax_problems import Problem, problem, problems, spec  # noqa: E402

from sennit.ir.layout import Layout  # noqa: E402
from sennit.ir.mesh import Mesh  # noqa: E402
from sennit.reshard.fused_jax import sequences  # noqa: E402
from sennit.reshard.lower_jax import lower  # noqa: E402
from sennit.reshard.phases_jax import ways  # noqa: E402
from sennit.reshard.pieces_jax import Frame, Piece, cut, held, local, positions  # noqa: E402
from sennit.reshard.redistribution import StepKind  # noqa: E402

MESHES = ((2, 2, 2), (4, 2), (2, 4), (2, 3))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(problems(MESHES))
def test_parts_sent_one_by_one_arrive_in_place(case: Problem) -> None:
    mesh = Mesh.make(dict(case.axes))
    before, after = (
        Layout.block(mesh, case.shape, dict(enumerate(dims))).refined() for dims in (case.before, case.after)
    )
    if positions([before, after]) is None:
        return
    source, target = case.shardings()
    x = jax.device_put(case.values(), source)
    kinds = (StepKind.ALL_TO_ALL, StepKind.ALL_GATHER)
    communicating = (steps for steps in sequences(before, after) if any(step.kind in kinds for step in steps))
    for steps in islice(communicating, 2):
        every = positions([before, *(step.result for step in steps)])
        assert every is not None
        *_, way = ways(steps, every)  # as much in parts as can be
        result = jax.jit(
            jax.shard_map(
                lambda piece, way=way: lower(way, source.mesh.axis_names, piece),
                mesh=source.mesh,
                in_specs=spec(case.before),
                out_specs=spec(case.after),
                check_vma=False,
            )
        )(x)
        expected = jax.device_put(case.values(), target)
        for ours, theirs in zip(result.addressable_shards, expected.addressable_shards, strict=True):
            np.testing.assert_array_equal(np.asarray(ours.data), np.asarray(theirs.data))


@pytest.mark.parametrize("branches", [0, 8])
def test_slices_at_places_that_depend_on_the_device(branches: int) -> None:
    case = problem("x=2,y=4", (8, 6, 16), "- - -", "x - y")
    mesh = Mesh.make(dict(case.axes))
    before, after = (
        Layout.block(mesh, case.shape, dict(enumerate(dims))).refined() for dims in (case.before, case.after)
    )
    every = positions([before, after])
    assert every is not None
    taken = {
        held(after, axis, every): np.array([point[after.mesh.index(axis)] for point in after.mesh.points()], np.int32)
        for axis in after.mesh.names
    }
    source, target = case.shardings()
    values = case.values()

    def sliced(value: Any) -> Any:
        (part,) = cut(
            Piece(value, local(before, every)), [taken], source.mesh.axis_names, frame=Frame(), branches=branches
        )
        return part.reshape(after.local_shape())

    mapped = jax.shard_map(
        sliced, mesh=source.mesh, in_specs=spec(case.before), out_specs=spec(case.after), check_vma=False
    )
    result = jax.jit(mapped)(jax.device_put(values, source))
    assert result.sharding == target
    np.testing.assert_array_equal(np.asarray(result), values)
