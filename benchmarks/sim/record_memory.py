"""What a step allocates on a GPU, from torch's caching allocator itself: for the accuracy of simulated memory.

    python benchmarks/sim/record_memory.py --out memory.json          # about a minute on one GPU

For each block of blocks.py, beside peaks of a step that starts with an empty cache:

- `trace`: every event of the allocator in order, [what, block, bytes]: "alloc" and "free" of a block, "map" and "unmap"
  of a segment that
  it took from or gave back to the driver. Replaying it checks a model of the allocator (accuracy.py --only allocator).
- `temporary`: by operator with its arguments, the bytes that it needs while it runs beyond what is there before and
  after: workspaces
  of kernels, copies in another memory format. Nothing but a GPU tells these.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blocks import CASES, Case, make
from torch.utils._python_dispatch import TorchDispatchMode

ACTIONS = {"alloc": "alloc", "free_completed": "free", "segment_alloc": "map", "segment_free": "unmap"}


def described(value: Any) -> Any:
    """An argument as text: of a tensor its type, shape and strides."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}"
    if isinstance(value, (list, tuple)):
        return [described(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value)


class Temporaries(TorchDispatchMode):
    """What each operator needs beyond what is there before and after it, the most of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = func(*args, **(kwargs or {}))
        beyond = torch.cuda.max_memory_allocated() - max(before, torch.cuda.memory_allocated())
        if beyond > 0:
            key = json.dumps([str(func), described(args)])
            self.found[key] = max(self.found.get(key, 0), beyond)
        return result


def trace_of(snapshot: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Events with blocks numbered in the order in which they were first seen."""
    names: dict[int, int] = {}
    found = []
    for event in snapshot["device_traces"][torch.cuda.current_device()]:
        if event["action"] in ACTIONS:
            block = names.setdefault(event["addr"], len(names))
            found.append((ACTIONS[event["action"]], block, event["size"]))
    return found


def record(case: Case) -> dict[str, Any]:
    module, arguments = make(case, "cuda")

    def step() -> None:
        module(*arguments).backward()

    def cleared(call: Callable[[], None]) -> None:
        module.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        call()

    for _ in range(2):  # libraries take their workspaces
        cleared(step)
    row: dict[str, Any] = {"name": case.name}

    def peaks() -> None:
        row["before"], row["reserved_before"] = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        row["peak"], row["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()

    def traced() -> None:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=200_000)
        step()
        torch.cuda.synchronize()
        row["trace"] = trace_of(torch.cuda.memory._snapshot())
        torch.cuda.memory._record_memory_history(None)

    def by_operator() -> None:
        with Temporaries() as temporaries:
            step()
        row["temporary"] = sorted(temporaries.found.items(), key=lambda item: -item[1])[:60]

    for part in (peaks, traced, by_operator):
        cleared(part)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cuda": torch.version.cuda}
    result: dict[str, Any] = {"about": about, "steps": [], "failures": []}
    for case in CASES:
        start = time.monotonic()
        try:
            result["steps"].append(record(case))
        except Exception:
            result["failures"].append([case.name, traceback.format_exc()])
            torch.cuda.memory._record_memory_history(None)
        gc.collect()
        torch.cuda.empty_cache()
        options.out.write_text(json.dumps(result, separators=(",", ":")), encoding="utf-8")
        print(f"{case.name}: {time.monotonic() - start:.1f} s", flush=True)
    print(f"{len(result['steps'])} recorded, {len(result['failures'])} failed")
    for name, text in result["failures"]:
        print(name, text.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
