"""GPT-3 175B on 512 H100: capture and search, with the bound and where the step goes.

    python benchmarks/plan/search_gpt3.py [--batch 1536] [--nodes 64] [--baselines] [--gap] [--written]

Times of capture and search are measured (by the clock and of the processor); all others are simulated. `--gap` takes
the gap apart: the certificate again, with bounds that count one part more each time (`plan/search/relax.py`).
`--written` has attention in its mathematical form, with the scores kept.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import fields, replace

import torch

from sennit.capture import capture_call
from sennit.cluster import Cluster, load
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan.search import Found, Space, probes_of, search
from sennit.plan.search.baselines import baselines
from sennit.plan.search.costs import Probes
from sennit.plan.search.relax import Counted
from sennit.testing.families_torch import transformers_module


def gpt3(batch: int) -> Graph:
    """96 layers, width 12288, 96 heads, 2048 tokens; the vocabulary is padded to a multiple of 1024, as Megatron does."""
    library = transformers_module()
    sizes = {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "vocab_size": 51200}
    config = library.GPT2Config(use_cache=False, **sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    with torch.device("meta"):
        model = library.GPT2LMHeadModel(config).bfloat16().train()
        ids = torch.zeros((batch, 2048), dtype=torch.int64)
    return capture_call(model, (), {"input_ids": ids, "labels": ids}).graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1536)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--baselines", action="store_true", help="also what other systems could do")
    parser.add_argument("--gap", action="store_true", help="also the gap, part by part")
    parser.add_argument("--written", action="store_true", help="attention in its mathematical form")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores")
    clock, processor = time.perf_counter(), time.process_time()
    graph = gpt3(options.batch)
    print(
        f"capture: {time.perf_counter() - clock:.1f} s by the clock, {time.process_time() - processor:.1f} s of the processor"
    )
    cluster = load(f"dgx-h100:{options.nodes}")
    clock, processor = time.perf_counter(), time.process_time()
    probes = probes_of(graph, cluster, fused_attention=not options.written)
    found = show(graph, cluster, Space(), probes, clock, processor)
    if options.gap and found is not None:
        gap(graph, cluster, probes, found.choice.step)
    for space in baselines() if options.baselines else ():
        show(graph, cluster, space, probes, time.perf_counter(), time.process_time())


def show(graph: Graph, cluster: Cluster, space: Space, probes: Probes, clock: float, processor: float) -> Found | None:
    try:
        found: Found = search(graph, cluster, space=space, probes=probes)
    except PlanError as error:
        print(f"{space.name}: {error}")
        return None
    spent = (
        f"{time.perf_counter() - clock:.1f} s by the clock, {time.process_time() - processor:.1f} s of the processor"
    )
    choice = found.choice
    print(f"\n{space.name}: {choice.title}")
    print(f"search: {spent}; {found.configs} configs, {found.probes} probes, {found.estimated} schedules")
    print(
        f"simulated: step {choice.step:.3f} s, bound {choice.bound:.3f} s, gap {100 * choice.gap:.2f} %, {choice.memory / 1e9:.1f} GB"
    )
    print(f"where the step goes: {found.why()}")
    print(found.certificate())
    for other in found.alternatives[:5]:
        print(f"  {other.step:.3f} s  {other.title}")
    return found


def gap(graph: Graph, cluster: Cluster, probes: Probes, step: float) -> None:
    """The bound with one part more counted each time.

    The walk is the same: what it estimated is estimated again, with the same probes.
    """
    counted = Counted(**dict.fromkeys((part.name for part in fields(Counted)), False))
    print("\n| the bound counts | s | gap |\n|---|---|---|")
    for part in (None, *fields(Counted)):
        counted = replace(counted, **{part.name: True}) if part is not None else counted
        bound = search(graph, cluster, space=Space(counted=counted), probes=probes).choice.bound
        name = "units: their seconds and what they hold" if part is None else f"+ {part.name}"
        print(f"| {name} | {bound:.3f} | {100 * (step / bound - 1):.2f} % |", flush=True)
    print(f"| the plan that was found | {step:.3f} | |")


if __name__ == "__main__":
    main()
