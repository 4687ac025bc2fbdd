"""`GpuGroup` on a host that stands in for a GPU: element types, reductions, buffers in place, what it refuses."""

from __future__ import annotations

import gpu_host
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.language import Builder, trace
from sennit.collective.library import Options, recipe
from sennit.collective.runtime.code import Code
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.gpu_join import join_blocks, without_gates
from sennit.collective.runtime.gpu_torch import GpuGroup, GpuKernels
from sennit.errors import RunError
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.layout import Reduction

pytestmark = pytest.mark.skipif(gpu_host.compiler() is None, reason="no C++ compiler to build the stand-in for a GPU")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> GpuKernels:
    return gpu_host.HostKernels(gpu_host.shared_folder(tmp_path_factory))  # type: ignore[return-value]


def code_of(name: str, ranks: int, options: Options | None = None) -> Code:
    program = join_blocks(compile_one_sided(recipe(name).build(1, ranks, options or Options())))
    return encode(without_gates(program))


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        (torch.float32, Reduction.SUM),
        (torch.float16, Reduction.SUM),
        (torch.bfloat16, Reduction.SUM),
        (torch.float64, Reduction.PROD),
        (torch.int64, Reduction.MIN),
    ],
)
def test_element_types_and_reductions(kernels: GpuKernels, dtype: torch.dtype, reduction: Reduction) -> None:
    draw = torch.Generator().manual_seed(3)
    combine = {
        Reduction.SUM: lambda t: t.sum(0),
        Reduction.PROD: lambda t: t.prod(0),
        Reduction.MIN: lambda t: t.amin(0),
        Reduction.MAX: lambda t: t.amax(0),
    }[reduction]
    for name in ("direct_all_reduce", "ring_all_reduce"):
        group = GpuGroup(code_of(name, 4), kernels)
        for elements in (1, 333):
            inputs = [(torch.randn(elements, generator=draw) * 8).abs().to(dtype) for _ in range(4)]
            outputs = [torch.full((elements,), 99, dtype=dtype) for _ in range(4)]
            group.run(inputs, outputs, reduction)
            group.check()
            wide = torch.stack(inputs).to(torch.float64 if dtype.is_floating_point else torch.int64)
            wanted = combine(wide).to(dtype)
            # a direct sum is rounded once; in wider types, and in a ring, the order of the sum shows
            once = name.startswith("direct") and dtype.itemsize == 2
            slack = 4 * torch.finfo(dtype).eps if dtype.is_floating_point and not once else 0
            for output in outputs:
                torch.testing.assert_close(output, wanted, rtol=slack, atol=0)
                assert torch.equal(output, outputs[0])


@pytest.mark.parametrize("ranks", [7, 8, 9])
def test_many_sources(kernels: GpuKernels, ranks: int) -> None:
    """There is a version of the kernel's loop for 8 sources; other numbers have a common one."""
    group = GpuGroup(code_of("direct_all_reduce", ranks), kernels)
    inputs = [torch.arange(500, dtype=torch.float32) * (rank + 1) for rank in range(ranks)]
    outputs = [torch.zeros(500) for _ in range(ranks)]
    group.run(inputs, outputs)
    for output in outputs:
        assert torch.equal(output, torch.stack(inputs).sum(0))


def test_nan_wins_in_min_and_max(kernels: GpuKernels) -> None:
    group = GpuGroup(code_of("direct_all_reduce", 2), kernels)
    for reduction in (Reduction.MIN, Reduction.MAX):
        inputs = [torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([float("nan"), 2.0, 4.0])]
        outputs = [torch.zeros(3), torch.zeros(3)]
        group.run(inputs, outputs, reduction)
        for output in outputs:
            assert output.isnan().tolist() == [True, True, False]


@settings(derandomize=True, deadline=None, max_examples=25)
@given(ranks=st.integers(2, 4), elements=st.integers(1, 70), team=st.sampled_from([None, 1, 3]))
def test_in_place(kernels: GpuKernels, ranks: int, elements: int, team: int | None) -> None:
    """A ring on the output alone, which holds the input."""

    def ring(b: Builder) -> None:
        for i, part in enumerate(b.output(0).split(ranks)):
            for hop in range(i, i + ranks - 1):
                part.on(hop % ranks).reduce(into=part.on((hop + 1) % ranks))
            for hop in range(i + ranks - 1, i + 2 * ranks - 2):
                part.on(hop % ranks).copy(to=(hop + 1) % ranks)

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, ranks, ranks, in_place=True)
    code = encode(without_gates(join_blocks(compile_one_sided(trace(ring, spec, "ring in place")))))
    group = GpuGroup(code, kernels, team=team)
    arrays = [torch.arange(elements, dtype=torch.int32) * (rank + 1) for rank in range(ranks)]
    wanted = torch.stack(arrays).sum(0, dtype=torch.int32)
    group.run(arrays, arrays)
    group.check()
    for array in arrays:
        assert torch.equal(array, wanted)
    with pytest.raises(RunError, match="is in place"):
        group.run(arrays, [array.clone() for array in arrays])


def test_misaligned_tensors(kernels: GpuKernels) -> None:
    group = GpuGroup(code_of("all_pairs_all_gather", 3), kernels)
    room = [torch.arange(30, dtype=torch.int32) + 100 * rank for rank in range(3)]
    inputs = [t[1:8] for t in room]
    outputs = [torch.zeros(22, dtype=torch.int32)[1:] for _ in range(3)]
    group.run(inputs, outputs)
    for output in outputs:
        assert torch.equal(output, torch.cat(inputs))


def test_what_is_refused(kernels: GpuKernels) -> None:
    code = code_of("direct_all_reduce", 3)
    group = GpuGroup(code, kernels)
    good = [torch.zeros(6) for _ in range(3)]
    with pytest.raises(RunError, match="2 inputs and 3 outputs for 3 ranks"):
        group.run(good[:2], good)
    with pytest.raises(RunError, match="the output of rank 1 has 5 elements"):
        group.run(good, [good[0], torch.zeros(5), good[2]])
    with pytest.raises(RunError, match="not contiguous"):
        group.run([good[0], good[1], torch.zeros(6, 2)[:, 0]], good)
    with pytest.raises(RunError, match="float64"):
        group.run(good, [good[0], good[1], torch.zeros(6, dtype=torch.float64)])
    with pytest.raises(RunError, match="no bool"):
        group.run([t.bool() for t in good], [t.bool() for t in good])
    with pytest.raises(RunError, match="a team of 99; the device holds 10 members"):
        GpuGroup(code, kernels, team=99).run(good, [t.clone() for t in good])


def test_a_device_that_is_too_small_says_the_numbers(kernels: GpuKernels) -> None:
    small = gpu_host.HostKernels(kernels.folder, room=5)  # type: ignore[attr-defined]
    group = GpuGroup(code_of("ring_all_reduce", 6), small)  # type: ignore[arg-type]
    arrays = [torch.zeros(6) for _ in range(6)]
    with pytest.raises(RunError, match="6 thread blocks wait for each other and the device holds 5 at once"):
        group.run(arrays, [array.clone() for array in arrays])


def test_nothing_to_do(kernels: GpuKernels) -> None:
    group = GpuGroup(code_of("direct_all_reduce", 2), kernels)
    group.run([torch.zeros(0)] * 2, [torch.zeros(0)] * 2)
    group.check()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(RunError, match="no CUDA device"):
        GpuGroup(code_of("direct_all_reduce", 2))
