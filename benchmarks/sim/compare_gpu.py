"""Predicted against measured operator times: the tables of docs/cluster.md.

    python benchmarks/sim/compare_gpu.py [results.json] [cluster]

Reads what `measure_gpu.py` wrote (default: h200.json beside this file, one H200) and prints every row of it, good and bad.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from sennit.cluster import Device, load
from sennit.cost import operator_cost
from sennit.ir.dtype import DType, TensorType
from sennit.ir.graph import Phase, Ref
from sennit.ir.layout import Layout
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


def predicted(row: dict[str, object], device: Device) -> float:
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
    return operator_cost(step, types, device).seconds


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("h200.json")
    device = load(sys.argv[2] if len(sys.argv) > 2 else "h200x8").device
    result = json.loads(path.read_text(encoding="utf-8"))
    print(f"{result['device']}, torch {result['torch']}, against {device.kind}")
    print("| operator | measured, µs | predicted, µs | off by |\n|---|---|---|---|")
    errors: dict[str, list[float]] = {}
    for row in result["rows"]:
        shape = " × ".join(str(row[dim]) for dim in ("m", "n", "k") if dim in row)
        kind = "f32" if row.get("dtype") == "torch.float32" else "bf16"
        seconds, guess = row["seconds"], predicted(row, device)
        error = guess / seconds - 1
        group = f"products in {kind}" if row["op"] == "mm" else "other operators"
        errors.setdefault(group, []).append(abs(error))
        print(f"| {row['op']} {kind} {shape} | {seconds * 1e6:.1f} | {guess * 1e6:.1f} | {error:+.0%} |")
    for group, values in errors.items():
        print(f"{group}: {len(values)}, median error {median(values):.0%}, worst {max(values):.0%}")


if __name__ == "__main__":
    main()
