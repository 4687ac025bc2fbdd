"""Splits of operators chosen by linear program beside Megatron's, as the zoo writes them: the program's own price, and
the simulation of what is lowered.

    python benchmarks/plan/operators.py [--devices 4] [--model gpt t5 swin swin-one]

One layer of each kind (of a Swin, two), f32, one micro-batch (of two samples, four, four and one) on `devices` of one
node dgx-h100; everything is simulated. "whole" does not split at all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from sennit.capture import capture, capture_call
from sennit.cluster import load
from sennit.demo.gpt import GPT, GPTConfig
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.plan import Plan, lower, propagate, zoo
from sennit.plan.propagate import Decisions
from sennit.plan.search.operators import AxisCost, choose_ops, seconds_of
from sennit.plan.verify import verify
from sennit.sim import simulate
from sennit.testing.families_torch import transformers_module
from sennit.testing.random_plans import trained


def gpt() -> Graph:
    config = GPTConfig(vocabulary=8192, context=1024, width=4096, heads=32, layers=1)
    with torch.device("meta"):
        tokens = torch.zeros((2, config.context), dtype=torch.int64)
        return capture(GPT(config), (tokens, tokens))


def t5() -> Graph:
    library = transformers_module()
    config = library.T5Config(
        use_cache=False,
        d_model=2048,
        d_kv=64,
        d_ff=8192,
        num_heads=32,
        num_layers=1,
        num_decoder_layers=1,
        vocab_size=32768,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        model = library.T5ForConditionalGeneration(config).train()
        ids = torch.zeros((4, 512), dtype=torch.int64)
    return trained(capture_call(model, (), {"input_ids": ids, "labels": ids}).graph)


def swin(samples: int = 4) -> Graph:
    library = transformers_module()
    config = library.SwinConfig(
        image_size=448, window_size=14, embed_dim=512, depths=[2], num_heads=[16], drop_path_rate=0.0, num_labels=1000
    )
    with torch.device("meta"):
        model = library.SwinForImageClassification(config).train()
        pixels, labels = torch.zeros((samples, 3, 448, 448)), torch.zeros((samples,), dtype=torch.int64)
    return trained(capture_call(model, (), {"pixel_values": pixels, "labels": labels}).graph)


MODELS: dict[str, Callable[[], Graph]] = {"gpt": gpt, "t5": t5, "swin": swin, "swin-one": partial(swin, 1)}


def rows(name: str, devices: int) -> None:
    graph, cluster, mesh = MODELS[name](), load("dgx-h100"), Mesh.parse(f"tp={devices}")
    cost = AxisCost(graph, cluster, devices)

    def show(what: str, decisions: Decisions, own: float, more: str = "") -> None:
        program = lower(decisions)
        verify(program, graph)
        print(
            f"| {name} | {what} | {1e3 * own:.3f} | {1e3 * simulate(program, cluster).span:.3f} | {more} |", flush=True
        )

    whole = propagate(Plan("whole", graph, mesh))
    show("whole", whole, seconds_of(whole, "tp", cost))
    seeds: list[Decisions] = []
    for sequence in (False, True):
        try:
            seeds.append(propagate(zoo.tensor_parallel(graph, mesh, sequence=sequence)))
        except PlanError as error:
            print(f"| {name} | zoo, sequence={sequence} | | | {error.what} |")
            continue
        show(f"zoo, sequence={sequence}", seeds[-1], seconds_of(seeds[-1], "tp", cost))
    for what, given in (("linear program", []), ("linear program, and the zoo's strategies", seeds)):
        begin = time.process_time()
        plan, chosen = choose_ops(Plan("chosen", graph, mesh), "tp", cost, given)
        took = time.process_time() - begin
        show(
            what,
            propagate(plan),
            chosen.seconds,
            f"bound {1e3 * chosen.bound:.3f}, {len(graph.ops)} operators, {took:.1f} s of processor",
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--model", nargs="*", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    print("| model | splits | own price, ms | lowered and simulated, ms | |\n|---|---|---|---|---|")
    for name in options.model:
        rows(name, options.devices)


if __name__ == "__main__":
    main()
