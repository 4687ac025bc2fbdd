"""The GPU interpreter measured: virtual ranks on one GPU, against the copy of as many bytes, hand-written kernels and
Triton.

    python benchmarks/collective/gpu.py [--json out.json] [--markdown out.md] [--ranks 8] [--quick] [--only SECTION]

Needs an NVIDIA GPU, torch and numpy (Triton and several processes where they are there). Each section is run for
itself: one that fails prints its traceback and the others go on; the exit status is then 1.

What is counted: the bytes that the collective must read and write in device memory, each input element once and each
output element once (all-reduce of n bytes on p ranks: 2 p n). `of copy` is the time of a device-to-device copy that
reads and writes as many bytes over the collective's time. Every result is compared with torch's on random data before
it is timed; outputs hold NaN before. Times are medians, from CUDA events around batches of launches. Arrays of 64 MiB a
rank do not fit in the cache; small ones do, for the copy as well.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from gpu_cases import (
    MIB,
    Data,
    code_of,
    data_for,
    data_of,
    in_turn,
    launches_for,
    must_move,
    program_of,
    ring_in_place,
    rotation,
    size,
    timed,
    timed_graph,
    verify,
)

from sennit.collective.library import Options, recipes
from sennit.collective.runtime.code import Code
from sennit.collective.runtime.encode import encode
from sennit.collective.runtime.gpu_driver import Kernel, compile_kernel
from sennit.collective.runtime.gpu_join import join_blocks, without_gates
from sennit.collective.runtime.gpu_torch import GpuGroup, GpuKernels
from sennit.errors import RunError
from sennit.ir.collective import CollectiveName, CollectiveSpec
from sennit.ir.layout import Reduction
from sennit.ir.one_sided import Await, OneSided, OneSidedRank

SIZES = [1 << 10, 8 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
HERE = Path(__file__).parent


@dataclass
class Row:
    """One time. `bytes` is a rank's larger buffer, `must_move` what the collective must read and write in all."""

    section: str
    what: str
    collective: str
    bytes: int
    seconds: float
    must_move: int
    copy_seconds: float | None = None
    note: str = ""

    @property
    def bandwidth(self) -> float:
        return self.must_move / self.seconds

    @property
    def of_copy(self) -> float | None:
        return None if self.copy_seconds is None else self.copy_seconds / self.seconds


@dataclass
class Bench:
    ranks: int
    quick: bool
    device: torch.device
    kernels: GpuKernels
    rows: list[Row] = field(default_factory=list)
    checks: list[str] = field(default_factory=list)
    copies: dict[int, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    references: dict[tuple[str, int, bool], Kernel] = field(default_factory=dict)

    def section(self, title: str, work: Callable[[Bench], None]) -> None:
        print(f"\n== {title}", flush=True)
        start = time.monotonic()
        try:
            work(self)
            torch.cuda.synchronize()
        except Exception:  # a section that fails must not take the others with it
            self.failed.append(title)
            traceback.print_exc(file=sys.stdout)
        print(f"   ({time.monotonic() - start:.1f} s)", flush=True)
        torch.cuda.empty_cache()

    def add(self, row: Row) -> Row:
        row.copy_seconds = self.copy_of(row.must_move)
        self.rows.append(row)
        share = "" if row.of_copy is None else f"{row.of_copy:7.1%} of copy"
        print(
            f"   {row.what:44} {row.collective:15} {size(row.bytes):>9} {row.seconds * 1e6:10.1f} us "
            f"{row.bandwidth / 1e9:8.0f} GB/s {share} {row.note}",
            flush=True,
        )
        return row

    def copy_of(self, must_move: int) -> float:
        """The time of a device-to-device copy that reads and writes `must_move` bytes in all."""
        if must_move not in self.copies:
            half = max(16, must_move // 2)
            pairs = [tuple(torch.randn(half // 4, device=self.device) for _ in range(2)) for _ in range(rotation(half))]
            turn = in_turn(pairs)

            def copy() -> None:
                source, target = next(turn)
                target.copy_(source)

            self.copies[must_move] = timed_graph(copy, launches=launches_for(must_move))
        return self.copies[must_move]


def measured(bench: Bench, group: GpuGroup, nbytes: int, what: str, section: str, note: str = "") -> Row:
    """Check one call on random data, then time calls on sets of buffers in turn."""
    spec = group.code.collective
    assert isinstance(spec, CollectiveSpec)
    sets = [data_for(bench.device, group.code, nbytes) for _ in range(rotation(2 * nbytes * bench.ranks))]
    for data in sets:
        group.run(data.given, data.outputs)
    group.check()
    for data in sets[:2]:
        verify(spec, data)
    turn = in_turn(sets)

    def call() -> None:
        data = next(turn)
        group.run(data.given, data.outputs)

    seconds = timed_graph(call, launches=launches_for(must_move(spec, nbytes)))
    group.check()
    if not sets[0].in_place:
        verify(spec, sets[0])
    return bench.add(Row(section, what, spec.name.value, nbytes, seconds, must_move(spec, nbytes), note=note))


# ---- sections --------------------------------------------------------------------------------------------------------


def check_everything(bench: Bench) -> None:
    """Every algorithm of the library, sizes that nothing divides, element types and reductions, with and without gates."""
    count = 0
    for item in recipes():
        if item.across:
            continue
        for gates, join in ((False, True), (True, True), (True, False)):
            code = code_of(item.name, bench.ranks, gates=gates, join=join)
            try:
                group = GpuGroup(code, bench.kernels)
                for elements in (1, 37, 1000, 65536 + 3):
                    data = data_of(bench.device, code, elements, torch.float32)
                    for _ in range(2):
                        group.run(data.given, data.outputs)
                    group.check()
                    assert isinstance(code.collective, CollectiveSpec)
                    verify(code.collective, data)
                    count += 1
            except RunError as error:
                print(f"   {item.name}, gates {gates}, joined {join}: {error.what}")
    print(f"   library: {count} calls right")
    kinds: list[tuple[torch.dtype, Reduction]] = [
        (dtype, Reduction.SUM)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8)
    ]
    kinds += [(torch.float32, r) for r in (Reduction.PROD, Reduction.MIN, Reduction.MAX)]
    kinds += [(torch.bfloat16, Reduction.MAX), (torch.int64, Reduction.MIN)]
    for dtype, reduction in kinds:
        for name in ("direct_all_reduce", "ring_all_reduce", "ring_reduce_scatter"):
            code = code_of(name, bench.ranks)
            group = GpuGroup(code, bench.kernels)
            for elements in (5, 12345):
                data = data_of(bench.device, code, elements, dtype)
                group.run(data.inputs, data.outputs, reduction)
                group.check()
                assert isinstance(code.collective, CollectiveSpec)
                verify(code.collective, data, reduction)
                count += 1
    print(f"   with {len(kinds)} pairs of element type and reduction: {count} calls right")
    bench.checks.append(f"{count} calls right")


def check_same_bits(bench: Bench) -> None:
    """The same inputs give the same bits in every call, and every rank gets the same."""
    for name in ("direct_all_reduce", "ring_all_reduce", "halving_doubling_all_reduce"):
        code = code_of(name, bench.ranks)
        group = GpuGroup(code, bench.kernels)
        data = data_for(bench.device, code, 4 * MIB, torch.bfloat16)
        group.run(data.given, data.outputs)
        group.check()
        first = data.outputs[0].clone()
        for _ in range(20):
            group.run(data.given, data.outputs)
        group.check()
        for output in data.outputs:
            assert torch.equal(output.view(torch.int16), first.view(torch.int16)), name
    print("   20 calls and all ranks: the same bits")
    bench.checks.append("same bits over 20 calls and all ranks")


def check_failure(bench: Bench) -> None:
    """A program that waits for a signal that nobody sends ends with an error and not never."""
    program = without_gates(join_blocks(program_of("ring_all_reduce", 2)))
    ranks = []
    for ranked in program.ranks:
        steps = (Await(1, 1, 99), *ranked.blocks[1]) if ranked.rank == 0 else ranked.blocks[1]
        ranks.append(OneSidedRank(ranked.rank, ((), steps), ranked.scratch))
    code = encode(OneSided(program.name, program.collective, tuple(ranks)))
    group = GpuGroup(code, bench.kernels, patience=0.2)
    data = data_for(bench.device, code, 1 << 16)
    start = time.monotonic()
    group.run(data.given, data.outputs)
    try:
        group.check()
    except RunError as error:
        took = time.monotonic() - start
        print(f"   after {took:.2f} s: {error}")
        bench.checks.append(f"a wait in vain raised after {took:.2f} s")
        return
    raise AssertionError("no error")


def ceilings(bench: Bench) -> None:
    """What a copy reaches: cudaMemcpy, and a kernel."""
    kernel = reference(bench, "copy_vectors")
    for nbytes in (MIB, 16 * MIB, 64 * MIB, 512 * MIB):
        move = 2 * nbytes
        seconds = bench.copy_of(move)
        print(f"   cudaMemcpy of {size(nbytes):>8}: {seconds * 1e6:8.1f} us, {move / seconds / 1e9:6.0f} GB/s")
        source, target = torch.randn(nbytes // 4, device=bench.device), torch.empty(nbytes // 4, device=bench.device)
        arrays = Arrays()
        arrays.input[0], arrays.output[0], arrays.vectors = source.data_ptr(), target.data_ptr(), nbytes // 16
        launch = kernel.prepare(4 * kernel.multiprocessors, arrays)
        took = timed_graph(lambda made=launch: made.start(stream()), launches=launches_for(move))
        assert torch.equal(source, target)
        print(f"   copy kernel of {size(nbytes):>7}: {took * 1e6:8.1f} us, {move / took / 1e9:6.0f} GB/s")
        bench.rows.append(Row("ceiling", "copy kernel", "copy", nbytes, took, move, seconds))
        bench.rows.append(Row("ceiling", "cudaMemcpy", "copy", nbytes, seconds, move, seconds))


def by_size(bench: Bench) -> None:
    for name in ("direct_all_reduce", "ring_all_reduce", "halving_doubling_all_reduce", "all_pairs_all_reduce"):
        group = GpuGroup(code_of(name, bench.ranks), bench.kernels)
        for nbytes in SIZES[::2] if bench.quick else SIZES:
            if name == "all_pairs_all_reduce" and nbytes > 64 * MIB:
                continue
            measured(bench, group, nbytes, name, "by size")


def other_collectives(bench: Bench) -> None:
    names = ("all_pairs_all_gather", "ring_all_gather", "direct_reduce_scatter", "ring_reduce_scatter")
    for name in (*names, "direct_all_to_all", "direct_broadcast", "chain_broadcast"):
        options = Options(pieces=16) if name == "chain_broadcast" else Options()
        group = GpuGroup(code_of(name, bench.ranks, options), bench.kernels)
        for nbytes in (64 << 10, MIB, 64 * MIB):
            measured(bench, group, nbytes, name, "collectives")


def variants(bench: Bench) -> None:
    """What each part of the lowering and of the launch is worth, at 64 KiB and 64 MiB."""
    ranks = bench.ranks
    for nbytes in (64 << 10, 64 * MIB):
        for name in ("direct_all_reduce", "ring_all_reduce"):
            for title, code, join in (
                ("joined blocks and moves", code_of(name, ranks), True),
                ("joined blocks, moves apart", code_of(name, ranks), False),
                ("with gates", code_of(name, ranks, gates=True), True),
                ("a block for each peer", code_of(name, ranks, gates=True, join=False), True),
            ):
                try:
                    group = GpuGroup(code, bench.kernels, join=join)
                    measured(bench, group, nbytes, f"{name}: {title}", "variants")
                except RunError as error:
                    print(f"   {name}: {title}: {error.what}")


def teams(bench: Bench) -> None:
    """How the threads of a block, the blocks of a multiprocessor and the size of a team matter."""
    for threads, resident in ((256, 4), (512, 2), (1024, 1), (256, 2), (512, 1)):
        kernels = GpuKernels(bench.device, threads, resident)
        for name in ("direct_all_reduce", "ring_all_reduce"):
            for team in (8, 16, 32, None):
                group = GpuGroup(code_of(name, bench.ranks), kernels, team=team)
                try:
                    what = f"{name}, {threads}x{resident}, team {team or 'by size'}"
                    measured(bench, group, 64 * MIB, what, "teams")
                except RunError as error:
                    print(f"   {name}, {threads}x{resident}, team {team}: {error.what}")
    for nbytes in (64 << 10, MIB, 4 * MIB):
        for team in (1, 2, 4, 8, 16, 32):
            for name in ("direct_all_reduce", "ring_all_reduce"):
                group = GpuGroup(code_of(name, bench.ranks), bench.kernels, team=team)
                measured(bench, group, nbytes, f"{name}, team {team}", "teams")


class Arrays(ctypes.Structure):
    """As in gpu_reference.cu, for 8 ranks."""

    _fields_ = (
        ("input", ctypes.c_uint64 * 8),
        ("output", ctypes.c_uint64 * 8),
        ("flags", ctypes.c_uint64),
        ("epoch", ctypes.c_uint64),
        ("vectors", ctypes.c_int64),
        ("team", ctypes.c_int32),
    )


def reference(bench: Bench, name: str, threads: int = 512, interleaved: bool = True) -> Kernel:
    key = name, threads, interleaved
    if key not in bench.references:
        source = (HERE / "gpu_reference.cu").read_text(encoding="utf-8")
        torch.zeros(1, device=bench.device)  # makes the context
        defines = {"RANKS": 8, "THREADS": threads, "INTERLEAVED": int(interleaved)}
        bench.references[key] = compile_kernel(source, name, defines, threads)
    return bench.references[key]


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def hand_written(bench: Bench) -> None:
    """The interpreter beside kernels written for one algorithm; each with its best team."""
    if bench.ranks != 8:
        print("   only for 8 ranks")
        return
    direct = code_of("direct_all_reduce", 8)
    pairs = (
        ("direct_all_reduce", direct, True),
        ("two_pass_all_reduce", direct, False),
        ("ring_all_reduce", ring_in_place(8), True),
    )
    for nbytes in (16 * MIB, 64 * MIB, 256 * MIB):
        for kernel_name, code, join in pairs:
            best: tuple[float, str] | None = None
            spec = CollectiveSpec(CollectiveName.ALL_REDUCE, 8, 8)
            for threads, interleaved in ((256, False), (512, False), (256, True), (512, True)):
                kernel = reference(bench, kernel_name, threads, interleaved)
                for team in (16, 32, 33, 64):
                    if 8 * team > kernel.resident_blocks():
                        continue
                    seconds = time_reference(bench, kernel, team, nbytes, code)
                    if best is None or seconds < best[0]:
                        best = seconds, f"{threads} threads, team {team}{', interleaved' if interleaved else ''}"
            assert best is not None
            hand = bench.add(
                Row(
                    "hand-written",
                    f"hand-written {kernel_name}",
                    "all_reduce",
                    nbytes,
                    best[0],
                    must_move(spec, nbytes),
                    note=best[1],
                )
            )
            group = GpuGroup(code, bench.kernels, join=join)
            row = measured(bench, group, nbytes, f"interpreted {kernel_name}", "hand-written")
            print(f"      interpreted takes {row.seconds / hand.seconds:.3f} of the hand-written time")


def time_reference(bench: Bench, kernel: Kernel, team: int, nbytes: int, code: Code) -> float:
    sets = [data_for(bench.device, code, nbytes) for _ in range(rotation(2 * nbytes * 8))]
    flags = torch.zeros(8 * team, dtype=torch.int64, device=bench.device)
    launches = []
    for data in sets:
        arrays = Arrays(flags=flags.data_ptr(), vectors=data.elements // 4, team=team)
        for rank in range(8):
            arrays.input[rank], arrays.output[rank] = data.given[rank].data_ptr(), data.outputs[rank].data_ptr()
        launches.append(kernel.prepare(8 * team, arrays))
    calls = 0

    def call() -> None:
        nonlocal calls
        launch = launches[calls % len(launches)]
        calls += 1
        launch.argument.epoch = calls
        launch.start(stream())

    call()
    assert isinstance(code.collective, CollectiveSpec)
    verify(code.collective, sets[0])
    return timed(call, seconds=0.05)


def hints(bench: Bench) -> None:
    """What the caches are told about data that passes once."""
    loads = ("", ".L1::no_allocate", ".cs", ".L1::no_allocate.L2::256B")
    for load, store in [(load, "") for load in loads] + [(".L1::no_allocate", ".cs"), (".L1::no_allocate", ".wt")]:
        extra = (("LOAD_HINT", f'"{load}"'), ("STORE_HINT", f'"{store}"'))
        kernels = GpuKernels(bench.device, extra=extra)
        for name in ("direct_all_reduce", "all_pairs_all_gather"):
            group = GpuGroup(code_of(name, bench.ranks), kernels)
            measured(bench, group, 64 * MIB, f"ld{load or ' plain'}, st{store or ' plain'}", "hints")


def triton_candidates(bench: Bench) -> None:
    import gpu_triton

    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, bench.ranks, bench.ranks)
    for nbytes in (64 * MIB, 256 * MIB):
        n = nbytes // 4
        inputs = torch.randn(bench.ranks, n, device=bench.device)
        outputs = torch.full_like(inputs, float("nan"))

        def candidate(what: str, call: Callable[..., None], x=inputs, y=outputs, size=nbytes, **options: int) -> None:  # type: ignore[no-untyped-def]
            y.fill_(float("nan"))
            call(x, y, **options)
            verify(spec, Data(list(x), list(y), x.shape[1]))
            seconds = timed(lambda: call(x, y, **options))
            bench.add(Row("triton", what, "all_reduce", size, seconds, must_move(spec, size)))

        for team in (8, 16, 32):
            made = gpu_triton.TritonAllReduce(bench.ranks, team, bench.device)
            for warps in (8, 16):
                candidate(f"Triton ring, team {team}, {warps} warps", made.ring, warps=warps)
        made = gpu_triton.TritonAllReduce(bench.ranks, 1, bench.device)
        for block in (1024, 2048, 4096):
            candidate(f"Triton direct, block {block}", made.direct, block=block)


def launch_cost(bench: Bench) -> None:
    """What the host spends on a call."""
    code = code_of("direct_all_reduce", bench.ranks)
    group = GpuGroup(code, bench.kernels)
    data = data_for(bench.device, code, 1024)
    group.run(data.given, data.outputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(300):
        group.run(data.given, data.outputs)
    took = (time.perf_counter() - start) / 300
    torch.cuda.synchronize()
    print(f"   {took * 1e6:.1f} us of the host for a call")
    bench.checks.append(f"host: {took * 1e6:.1f} us a call")


# ---- several processes -----------------------------------------------------------------------------------------------


def processes(bench: Bench) -> None:
    """Processes that share the GPU through CUDA IPC: their kernels take turns."""
    from gpu_processes import process_work

    from sennit.cluster.ranks_torch import GlooRanks

    for count in (2, 4):
        with GlooRanks(count, timeout=100.0) as ranks:
            for name in ("direct_all_reduce", "ring_all_reduce"):
                for nbytes in (MIB, 64 * MIB):
                    found = ranks.call(process_work, name, count, nbytes)
                    seconds = max(item[0] for item in found)
                    spec = CollectiveSpec(CollectiveName.ALL_REDUCE, count, count)
                    what = f"{count} processes, {name}, {found[0][1]} phases"
                    bench.add(Row("processes", what, "all_reduce", nbytes, seconds, must_move(spec, nbytes)))


# ---- the whole -------------------------------------------------------------------------------------------------------


def summary(bench: Bench) -> None:
    print("\n== summary: all-reduce, f32, virtual ranks on one GPU")
    print(f"   {'bytes a rank':>12} {'copy of as many bytes':>22} {'best interpreted':>30} {'time':>12} {'of copy':>8}")
    for nbytes in sorted({row.bytes for row in bench.rows if row.section == "by size"}):
        rows = [row for row in bench.rows if row.section == "by size" and row.bytes == nbytes]
        best = min(rows, key=lambda row: row.seconds)
        assert best.copy_seconds is not None
        print(
            f"   {size(nbytes):>12} {best.copy_seconds * 1e6:19.1f} us {best.what:>30} {best.seconds * 1e6:9.1f} us "
            f"{best.of_copy or 0:8.1%}"
        )
    hand = [row for row in bench.rows if row.section == "hand-written"]
    for one, other in zip(hand[::2], hand[1::2], strict=False):
        print(f"   {other.what} of {size(one.bytes)}: {other.seconds / one.seconds:.3f} of the hand-written time")
    for check in bench.checks:
        print(f"   {check}")
    print(f"   failed sections: {', '.join(bench.failed) or 'none'}")


def markdown(bench: Bench, where: str) -> str:
    """The tables of docs/runtime-gpu.md."""
    lines = [
        f"{where}; {bench.ranks} virtual ranks, f32, medians.",
        "",
        "| all-reduce, bytes a rank | copy of as many bytes | best | time | of copy |",
    ]
    lines.append("|" + "---|" * 5)
    for nbytes in sorted({row.bytes for row in bench.rows if row.section == "by size"}):
        best = min((r for r in bench.rows if r.section == "by size" and r.bytes == nbytes), key=lambda r: r.seconds)
        cells = [size(nbytes), f"{(best.copy_seconds or 0) * 1e6:.1f} us", best.what, f"{best.seconds * 1e6:.1f} us"]
        lines.append(f"| {' | '.join(cells)} | {best.of_copy or 0:.0%} |")
    lines += ["", "| 64 MiB a rank | time | bandwidth | of copy |", "|" + "---|" * 4]
    for row in bench.rows:
        if row.bytes == 64 * MIB and row.section in ("by size", "collectives", "triton"):
            cells = [
                row.what,
                f"{row.seconds * 1e6:.1f} us",
                f"{row.bandwidth / 1e12:.2f} TB/s",
                f"{row.of_copy or 0:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| the same algorithm | bytes a rank | hand-written | interpreted | ratio |", "|" + "---|" * 5]
    hand = [row for row in bench.rows if row.section == "hand-written"]
    for one, other in zip(hand[::2], hand[1::2], strict=False):
        times = f"{one.seconds * 1e6:.1f} us | {other.seconds * 1e6:.1f} us | {other.seconds / one.seconds:.2f}"
        lines.append(f"| {other.what.removeprefix('interpreted ')} | {size(one.bytes)} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--markdown", type=Path, help="write the tables of docs/runtime-gpu.md here")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    parser.add_argument("--only", help="sections whose title contains this")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch sees no CUDA device: nothing to measure")
        return 2
    torch.manual_seed(11)
    device = torch.device("cuda", torch.cuda.current_device())
    found = torch.cuda.get_device_properties(device)
    where = (
        f"{found.name}, {found.multi_processor_count} multiprocessors, {found.L2_cache_size / MIB:.0f} MiB of cache, "
        f"torch {torch.__version__}, Python {platform.python_version()}"
    )
    print(where)
    bench = Bench(options.ranks, options.quick, device, GpuKernels(device))
    sections: list[tuple[str, Callable[[Bench], None]]] = [
        ("ceilings", ceilings),
        ("results", check_everything),
        ("the same bits", check_same_bits),
        ("a wait in vain", check_failure),
        ("all-reduce by size", by_size),
        ("hand-written kernels", hand_written),
        ("other collectives", other_collectives),
        ("variants", variants),
        ("cost of a call", launch_cost),
        ("Triton", triton_candidates),
        ("hints", hints),
        ("teams", teams),
        ("processes", processes),
    ]
    for title, work in sections:
        if options.only is None or options.only in title:
            bench.section(title, work)
    summary(bench)
    if options.markdown is not None:
        options.markdown.write_text(markdown(bench, where), encoding="utf-8")
    if options.json is not None:
        rows = [{**asdict(row), "bandwidth": row.bandwidth, "of_copy": row.of_copy} for row in bench.rows]
        document = {"where": where, "ranks": bench.ranks, "rows": rows, "checks": bench.checks, "failed": bench.failed}
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
        print(f"written: {options.json}")
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
