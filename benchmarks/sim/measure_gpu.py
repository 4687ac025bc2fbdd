"""Times single operators on the GPU at hand, to set and to check the efficiency curve of `cost/operator.py`.

    python benchmarks/sim/measure_gpu.py [results.json]

Random data, three warm-ups, CUDA events around ten runs, inputs rotated so that small ones do not stay in the L2 cache.
`launch` is the time an eager stream of tiny operators takes for each of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch


def seconds(call: Callable[[int], object], runs: int = 10) -> float:
    for i in range(3):
        call(i)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for i in range(runs):
        call(i)
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e-3 / runs


def graphed(call: Callable[[int], object], runs: int = 20) -> float:
    """Replayed from a CUDA graph: the time on the device without the host's dispatch."""
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(runs):
            call(i)
    return seconds(lambda _: graph.replay(), 5) / runs


def products() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    sizes = [(s, s, s) for s in (128, 256, 512, 1024, 2048, 4096, 8192)]
    sizes += [(4096, 4096, k) for k in (64, 256, 1024)] + [(m, 4096, 4096) for m in (16, 64, 256, 1024)]
    sizes += [(8192, 1024, 4096), (2048, 12288, 3072), (16384, 2560, 2560), (4224, 4096, 4096), (1000, 1000, 1000)]
    for dtype in (torch.bfloat16, torch.float32):
        for m, n, k in sizes:
            if dtype is torch.float32 and m * n * k > 4096**3:
                continue
            a = [torch.randn(m, k, device="cuda", dtype=dtype) for _ in range(4)]
            b = [torch.randn(k, n, device="cuda", dtype=dtype) for _ in range(4)]

            def product(i: int, a: list[torch.Tensor] = a, b: list[torch.Tensor] = b) -> torch.Tensor:
                return a[i % 4] @ b[i % 4]

            row = {"op": "mm", "dtype": str(dtype), "m": m, "n": n, "k": k}
            rows.append({**row, "seconds": graphed(product), "eager": seconds(product)})
    return rows


def streams() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    calls: dict[str, Callable[[torch.Tensor], object]] = {
        "copy": lambda x: x.clone(),
        "add": lambda x: x + x,
        "gelu": torch.nn.functional.gelu,
        "softmax": lambda x: torch.softmax(x, -1),
        "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
        "transpose": lambda x: x.T.contiguous(),
        "sum": lambda x: x.sum(),
    }
    for rows_count in (64, 1024, 16384, 65536):
        for name, call in calls.items():
            x = [torch.randn(rows_count, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(4)]

            def one(i: int, call: Callable[[torch.Tensor], object] = call, x: list[torch.Tensor] = x) -> object:
                return call(x[i % 4])

            rows.append({"op": name, "m": rows_count, "n": 4096, "seconds": graphed(one), "eager": seconds(one)})
    return rows


def main() -> None:
    tiny = torch.zeros(16, device="cuda")
    launch = seconds(lambda _: tiny.add_(1.0), 2000)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "launch": launch,
        "launch_graphed": graphed(lambda _: tiny.add_(1.0)),
        "rows": products() + streams(),
    }
    text = json.dumps(result, indent=1)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            file.write(text)
    print(text)


if __name__ == "__main__":
    main()
