"""What the search says of a plan beside the simulation of the program that the plan is lowered to: how far estimates
are off.

    python benchmarks/plan/estimates.py [--width 2048] [--context 512] [--only NAME ...]

A GPT of six layers (f32, Adam, a batch of 32) on one node dgx-h100, under pins that force each kind of plan. Everything
is simulated; the estimate adds up costs of units, the simulation runs the lowered and verified program with its
gradients in the buckets that ranks send. Nothing is fused: attention is in its mathematical form on both sides.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields

import torch

from sennit.capture import capture
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig
from sennit.ir.graph import Graph
from sennit.kernels import in_buckets
from sennit.plan import lower, propagate
from sennit.plan.search import Space, mesh_of, planner_of, search
from sennit.plan.verify import verify
from sennit.sim import optimizer, simulate_fully

CASES: dict[str, dict[str, dict[str, object]]] = {
    "tensor parallel": {"*": {"tp": 2, "pp": 1, "size": 4, "zero": 0}},
    "1F1B": {"*": {"tp": 2, "pp": 2, "size": 4, "schedule": "1f1b", "zero": 0}},
    "zero bubble H1": {"*": {"tp": 1, "pp": 2, "size": 4, "schedule": "zero-bubble-h1", "zero": 0}},
    "zero bubble H2": {"*": {"tp": 1, "pp": 4, "size": 4, "schedule": "zero-bubble-h2", "zero": 0}},
    "DualPipeV": {"*": {"tp": 1, "pp": 2, "size": 1, "schedule": "dual-pipe-v", "zero": 0}},
    "interleaved": {"*": {"tp": 1, "pp": 2, "size": 4, "schedule": "interleaved", "zero": 0}},
    "1F1B, products kept": {
        "*": {"tp": 1, "pp": 2, "size": 4, "schedule": "1f1b", "zero": 0},
        "blocks.*": {"keep": "products"},
    },
    "1F1B, nothing kept": {
        "*": {"tp": 1, "pp": 2, "size": 4, "schedule": "1f1b", "zero": 0},
        "blocks.*": {"keep": "none"},
    },
    "ZeRO-1": {"*": {"tp": 1, "pp": 1, "size": 4, "zero": 1}},
    "ZeRO-2": {"*": {"tp": 1, "pp": 1, "size": 1, "zero": 2}},
    "ZeRO-3": {"*": {"tp": 1, "pp": 1, "size": 1, "zero": 3}},
    "1F1B, ZeRO-1": {"*": {"tp": 1, "pp": 2, "size": 4, "schedule": "1f1b", "zero": 1}},
    "1F1B, ZeRO-2": {"*": {"tp": 1, "pp": 2, "size": 1, "schedule": "1f1b", "zero": 2}},
    "1F1B, tensor parallel, ZeRO-3": {"*": {"tp": 2, "pp": 2, "size": 1, "schedule": "1f1b", "zero": 3}},
    "co-shard in 2": {"*": {"tp": 1, "pp": 1, "size": 4, "zero": 0}, "blocks.*": {"co": 2}},
    "co-shard in 4, tensor parallel": {"*": {"tp": 2, "pp": 1, "size": 4, "zero": 0}, "blocks.*": {"co": 4}},
    "interlaced": {"*": {"tp": 1, "pp": 4, "size": 1, "zero": 0, "schedule": "interlaced"}},
    "interlaced, tensor parallel, ZeRO-1": {"*": {"tp": 2, "pp": 2, "size": 1, "zero": 1, "schedule": "interlaced"}},
}


def graph_of(width: int, context: int) -> Graph:
    config = GPTConfig(vocabulary=2 * width, context=context, width=width, heads=8, layers=6)
    with torch.device("meta"):
        tokens = torch.zeros((32, context), dtype=torch.int64)
        return capture(GPT(config), (tokens, tokens))


def row(graph: Graph, pins: Mapping[str, Mapping[str, object]]) -> str:
    cluster, adam = load("dgx-h100"), optimizer("adam")
    plain = {"fused_attention": False} if "fused_attention" in {field.name for field in fields(Space)} else {}
    space = Space(tps=(1, 2), sequence=(False,), sizes=(1, 4), chunks=(2,), **plain)
    choice = search(graph, cluster, space=space, optimizer=adam, pins=pins).choice
    plan = planner_of(choice)(graph, mesh_of(choice))
    program = lower(propagate(plan))
    verify(program, plan.graph)
    simulated = simulate_fully(in_buckets(program), cluster, optimizer=adam).timeline
    peak = max(simulated.peak_memory(device) for device in range(cluster.devices))
    return (
        f"{1e3 * choice.step:.1f} | {1e3 * simulated.span:.1f} | {100 * (choice.step / simulated.span - 1):+.1f} % | "
        f"{choice.memory / 1e9:.2f} | {peak / 1e9:.2f} | {100 * (choice.memory / peak - 1):+.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    graph = graph_of(options.width, options.context)
    print("| plan | step, ms: estimated | lowered | off by | GB: estimated | lowered | off by |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only:
        print(f"| {name} | {row(graph, CASES[name])} |", flush=True)


if __name__ == "__main__":
    main()
