"""`GpuRank`: a launch for each rank, all at once, as on several GPUs; on a host that stands in for them, with a thread
for each rank.
"""

from __future__ import annotations

import threading
from pathlib import Path

import gpu_host
import pytest
import torch

from sennit.collective.compile_one_sided import compile_one_sided
from sennit.collective.library import Options, recipe
from sennit.collective.runtime.code import Code
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.gpu_peers_torch import GpuRank, PeerMemory, arena_of
from sennit.collective.runtime.gpu_program import gpu_program
from sennit.collective.runtime.gpu_torch import GpuKernels
from sennit.errors import RunError
from sennit.ir.dtype import DType

pytestmark = pytest.mark.skipif(gpu_host.compiler() is None, reason="no C++ compiler to build the stand-in for a GPU")
RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpu_host.shared_folder(tmp_path_factory)


def with_gates(name: str) -> Code:
    return encode(gpu_program(compile_one_sided(recipe(name).build(1, RANKS, Options())), gates=True))


def peers_of(code: Code, elements: int, folder: Path, patience: float = 20.0) -> list[GpuRank]:
    kernels: GpuKernels = gpu_host.HostKernels(folder)  # type: ignore[assignment]
    arena = arena_of(code, elements, DType.F32, most=4)
    arenas = [torch.zeros(arena.bytes, dtype=torch.uint8) for _ in range(RANKS)]
    addresses = tuple(tensor.data_ptr() for tensor in arenas)
    return [
        GpuRank(
            code,
            rank,
            elements,
            DType.F32,
            arena,
            PeerMemory(arenas[rank], addresses, at_once=True),
            lambda told: [told] * RANKS,
            patience=patience,
            kernels=kernels,
        )
        for rank in range(RANKS)
    ]


def at_once(peers: list[GpuRank]) -> None:
    threads = [threading.Thread(target=peer.run) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize("name", ["direct_all_reduce", "ring_all_reduce", "all_pairs_all_reduce"])
def test_all_reduce_call_after_call(name: str, folder: Path) -> None:
    elements = 77
    peers = peers_of(with_gates(name), elements, folder)
    for call in range(5):  # a rank may be a call ahead: its gate keeps the others' buffers safe
        inputs = [torch.arange(elements, dtype=torch.float32) * (rank + 1) + call for rank in range(RANKS)]
        for peer, given in zip(peers, inputs, strict=True):
            peer.input.copy_(given)
            peer.output.fill_(float("nan"))
        at_once(peers)
        for peer in peers:
            peer.check()
            assert torch.equal(peer.output, torch.stack(inputs).sum(0))


def test_all_to_all(folder: Path) -> None:
    elements = 10
    peers = peers_of(with_gates("direct_all_to_all"), elements, folder)
    for peer in peers:
        peer.input.copy_(torch.arange(RANKS * elements) + 1000 * peer.rank)
    at_once(peers)
    for peer in peers:
        parts = [other.input[peer.rank * elements : (peer.rank + 1) * elements] for other in peers]
        assert torch.equal(peer.output, torch.cat(parts))


def test_code_without_gates_is_refused(folder: Path) -> None:
    program = compile_one_sided(recipe("ring_all_reduce").build(1, RANKS, Options()))
    with pytest.raises(RunError, match="has no gates"):
        peers_of(encode(gpu_program(program)), 8, folder)


def test_a_rank_that_does_not_call(folder: Path) -> None:
    peers = peers_of(with_gates("ring_all_reduce"), 40, folder, patience=0.3)
    at_once(peers[:2])
    with pytest.raises(RunError, match=r"waited 0\.3 s in vain"):
        peers[0].check()
    with pytest.raises(RunError, match=r"waited 0\.3 s in vain"):
        peers[1].check()
