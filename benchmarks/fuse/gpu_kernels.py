"""The kernels that a chain launches, by torch's profiler: where two ways to run one step differ."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpu_subject import Chain, run_all

SORTS = (  # the first that occurs in a kernel's name
    ("triton_poi", "Triton, pointwise"),
    ("triton_per", "Triton, reduction in one pass"),
    ("triton_red", "Triton, reduction in a loop"),
    ("triton", "Triton, other"),
    ("nvjet", "library product"),
    ("gemm", "library product"),
    ("cutlass", "library product"),
    ("cudnn", "library product"),
    ("splitKreduce", "library product"),
    ("Memcpy", "copy"),
    ("Memset", "fill"),
    ("elementwise", "torch, pointwise"),
    ("", "torch, other"),
)


def sort_of(name: str) -> str:
    return next(sort for part, sort in SORTS if part.lower() in name.lower())


def launched(chain: Chain, inputs: dict[str, Any]) -> list[tuple[str, float]]:
    """(name, seconds) of every kernel of one run, in order."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    run_all(chain, inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run_all(chain, inputs)
        torch.cuda.synchronize()
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, 1e-6 * event.time_range.elapsed_us()) for event in events]


def by_sort(found: list[tuple[str, float]]) -> list[tuple[str, int, float]]:
    """(sort, launches, seconds), the longest first."""
    seconds: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for name, length in found:
        seconds[sort_of(name)] += length  # type: ignore[assignment]
        count[sort_of(name)] += 1
    return [(sort, count[sort], total) for sort, total in seconds.most_common()]


def table(tables: dict[str, list[tuple[str, float]]]) -> str:
    """Sorts of kernels in rows, ways to run the step in columns: microseconds and launches."""
    rows = {
        name: {sort: (launches, total) for sort, launches, total in by_sort(found)} for name, found in tables.items()
    }
    sorts = sorted({sort for row in rows.values() for sort in row})
    lines = ["  " + " " * 30 + "".join(f"{name:>24s}" for name in rows)]
    for sort in [*sorts, "all"]:
        cells = []
        for row in rows.values():
            launches, total = (
                row.get(sort, (0, 0.0)) if sort != "all" else tuple(map(sum, zip(*row.values(), strict=True)))
            )
            cells.append(f"{1e6 * total:15.1f} us {launches:4d} x")
        lines.append(f"  {sort:30s}" + "".join(f"{cell:>24s}" for cell in cells))
    return "\n".join(lines)
