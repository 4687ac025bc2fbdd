"""Predicted against measured operator times, of a run that no profile was fitted to.

    python benchmarks/sim/compare_gpu.py [results.json] [cluster]

Reads what `measure_gpu.py` wrote (default: h200.json beside this file, one H200 on another day than the profile) and
prints every row of it, good and bad, with the profile's prediction and with the roofline's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from sennit.cluster import Device, load
from sennit.cost import OperatorCosts, operator_cost
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Phase, Ref
from sennit.ir.layout import Layout
from sennit.ir.memory_order import MemoryOrder
from sennit.ir.mesh import Mesh
from sennit.ir.program import Buffer, Compute

KINDS = {
    "mm": "aten.mm.default",
    "copy": "aten.clone.default",
    "add": "aten.add.Tensor",
    "gelu": "aten.gelu.default",
    "softmax": "aten._softmax.default",
    "layer_norm": "aten.native_layer_norm.default",
    "transpose": "aten.clone.default",
    "sum": "aten.sum.default",
}


def predicted(row: dict[str, object], device: Device, costs: OperatorCosts) -> tuple[float, float]:
    """By the profile, and by the roofline."""
    m, n = int(str(row["m"])), int(str(row["n"]))
    dtype = DType.F32 if row.get("dtype") == "torch.float32" else DType.BF16
    inputs, result = {"a": (m, n)}, (m, n)
    if row["op"] == "mm":
        k = int(str(row["k"]))
        inputs = {"a": (m, k), "b": (k, n)}
    elif row["op"] == "sum":
        result = (1, 1)
    types = {name: TensorType(shape, dtype) for name, shape in {**inputs, "out": result}.items()}
    buffer = Buffer("out", "out", dtype, Layout(Mesh.make({"x": 1}), result))
    step = Compute(KINDS[str(row["op"])], tuple(map(Ref, inputs)), (), (buffer,), Phase.FORWARD)
    orders = {"a": MemoryOrder((1, 0))} if row["op"] == "transpose" else {}
    if row["op"] == "transpose":
        types["a"] = TensorType((n, m), dtype)
    return costs.cost(step, types, orders).seconds, operator_cost(step, types, device).seconds


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("h200.json")
    device = load(sys.argv[2] if len(sys.argv) > 2 else "h200x8").device
    result = json.loads(path.read_text(encoding="utf-8"))
    print(f"{result['device']}, torch {result['torch']}, against {device.kind}")
    print("| operator | measured, µs | profile, µs | off by | roofline, µs | off by |\n|---|---|---|---|---|---|")
    errors: dict[str, list[tuple[float, float]]] = {}
    costs = OperatorCosts.of(device)
    for row in result["rows"]:
        shape = " × ".join(str(row[dim]) for dim in ("m", "n", "k") if dim in row)
        kind = "f32" if row.get("dtype") == "torch.float32" else "bf16"
        seconds = row["seconds"]
        guess, bound = predicted(row, device, costs)
        error, other = guess / seconds - 1, bound / seconds - 1
        group = f"products in {kind}" if row["op"] == "mm" else "other operators"
        errors.setdefault(group, []).append((abs(error), abs(other)))
        print(
            f"| {row['op']} {kind} {shape} | {seconds * 1e6:.1f} | {guess * 1e6:.1f} | {error:+.0%} | "
            f"{bound * 1e6:.1f} | {other:+.0%} |"
        )
    for group, values in errors.items():
        mine, theirs = ([pair[side] for pair in values] for side in (0, 1))
        print(f"{group}: {len(values)}, profile: median {median(mine):.0%}, worst {max(mine):.0%};", end=" ")
        print(f"roofline: median {median(theirs):.0%}, worst {max(theirs):.0%}")


if __name__ == "__main__":
    main()
