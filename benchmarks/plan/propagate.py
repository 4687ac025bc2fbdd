"""How long planning a deep model takes, part by part: propagation, lowering, the proof, certificates from a cold and a
warm cache.

    python benchmarks/plan/propagate.py --layers 12 24 96

The model is the GPT of the demo, thin (width 32): the number of operators is that of a real one, their sizes do not
enter.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

from sennit.capture import capture
from sennit.capture.rules.certify import Certifier
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.mesh import Mesh
from sennit.plan import lower, propagate, tensor_parallel
from sennit.plan.verify import verify


def measure(layers: int) -> None:
    torch.set_num_threads(1)
    config = GPTConfig(vocabulary=48, context=12, width=32, heads=4, layers=layers)
    times = [time.perf_counter()]
    graph = capture(GPT(config), random_batch(config, 8), name="GPT")
    times.append(time.perf_counter())
    plan = tensor_parallel(graph, Mesh.parse("dp=2,tp=2;mb=2"), qkv="*.qkv", column="*.up", row="*.proj|*.down")
    times.append(time.perf_counter())
    decisions = propagate(plan)
    times.append(time.perf_counter())
    program = lower(decisions)
    times.append(time.perf_counter())
    with tempfile.TemporaryDirectory() as folder:
        cold = Certifier(Path(folder))
        verify(program, graph, certifier=cold)
        times.append(time.perf_counter())
        verify(program, graph, certifier=Certifier(Path(folder)))
        times.append(time.perf_counter())
    names = ("capture", "plan", "propagate", "lower", "proof, cold", "proof, warm")
    parts = ", ".join(f"{name} {b - a:.2f} s" for name, a, b in zip(names, times, times[1:], strict=False))
    print(f"{layers} layers, {len(graph.ops)} operators: {parts}; {cold.tried} ways certified", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, nargs="+", default=[12, 24])
    for layers in parser.parse_args().layers:
        measure(layers)


if __name__ == "__main__":
    main()
