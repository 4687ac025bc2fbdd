"""The models of the SuperScaler paper (arXiv 2301.08984) on 4 to 32 V100: our best plan against the best of three baselines, simulated.

    python benchmarks/plan/paper.py [--model gpt|t5|swin] [--gpus 4 8 16 32] [--batch 64]

Everything is simulated, on the preset v100x16 (nodes of 16 V100 of 32 GB, one EDR NIC each), in f16 with Adam and master weights, at one global batch for all
plans of a row. Baselines are searched exhaustively over what each system can do (`plan/search/baselines.py`); ours over the same and zero-bubble schedules,
co-shard and interlaced plans. The mechanism is what differs between the two steps. Sizes of Swin and T5 are the paper's; those of GPT are of its family, with
2048 tokens. Attention is captured in its mathematical form: its scores lie in memory, for all plans alike.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from sennit.capture import capture_call
from sennit.cluster import Cluster, load
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan.search import Found, Space, search
from sennit.plan.search.baselines import baselines
from sennit.testing.families_torch import transformers_module

GPT = {4: (24, 2048, 32), 8: (32, 2560, 32), 16: (32, 4096, 32), 32: (48, 5120, 40)}
T5 = {4: (24, 2048, 32, 512), 8: (32, 3072, 48, 1024), 16: (32, 4096, 64, 1536), 32: (32, 6144, 96, 2048)}
SWIN = {4: (32, 512, 16), 8: (40, 768, 24), 16: (48, 1024, 32), 32: (56, 1536, 32)}
PAPER = {"gpt": "-", "t5": "2.2x", "swin": "3.5x"}


def gpt(gpus: int, batch: int) -> Graph:
    layers, width, heads = GPT[gpus]
    library = transformers_module()
    config = library.GPT2Config(
        use_cache=False,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        n_positions=2048,
        vocab_size=51200,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    return _language(lambda: library.GPT2LMHeadModel(config), batch, 2048)


def t5(gpus: int, batch: int) -> Graph:
    layers, width, heads, thousands = T5[gpus]
    library = transformers_module()
    config = library.T5Config(
        use_cache=False,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_heads=heads,
        num_layers=layers // 2,
        num_decoder_layers=layers // 2,
        vocab_size=thousands * 1024,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _language(lambda: library.T5ForConditionalGeneration(config), batch, 1024)


def _language(make: Callable[[], nn.Module], batch: int, tokens: int) -> Graph:
    with torch.device("meta"):
        model = make().half().train()
        ids = torch.zeros((batch, tokens), dtype=torch.int64)
    return capture_call(model, (), {"input_ids": ids, "labels": ids}).graph


def swin(gpus: int, batch: int) -> Graph:
    """Four resolutions with 2, 2, n - 6 and 2 layers, as Swin has; the width is that of the first."""
    layers, width, heads = SWIN[gpus]
    library = transformers_module()
    config = library.SwinConfig(
        image_size=1536,
        patch_size=4,
        window_size=48,
        embed_dim=width,
        depths=[2, 2, layers - 6, 2],
        num_heads=[heads, 2 * heads, 4 * heads, 8 * heads],
        drop_path_rate=0.0,
        num_labels=1000,
    )
    with torch.device("meta"):
        model = library.SwinForImageClassification(config).half().train()
        pixels = torch.zeros((batch, 3, 1536, 1536), dtype=torch.float16)
        labels = torch.zeros((batch,), dtype=torch.int64)
    return capture_call(model, (), {"pixel_values": pixels, "labels": labels}).graph


MODELS: dict[str, Callable[[int, int], Graph]] = {"gpt": gpt, "t5": t5, "swin": swin}


def cluster_of(gpus: int) -> Cluster:
    """The paper's nodes of 16; fewer GPUs are a part of one node."""
    if gpus >= 16:
        return load("v100x16" if gpus == 16 else f"v100x16:{gpus // 16}")
    whole = load("v100x16")
    device = whole.device
    fields = {name: getattr(device, name) for name in device.__struct_fields__}
    smaller = type(device)(**{**fields, "per_node": gpus})
    return type(whole)(**{**{name: getattr(whole, name) for name in whole.__struct_fields__}, "device": smaller})


def mechanism(ours: Found, theirs: Found) -> str:
    """The parts of the step in which we are more than 1 % of their step faster or slower, largest first."""
    parts = ("compute", "recompute", "talk", "bubble", "sync", "optimizer")
    step = theirs.choice.step
    rows = [(getattr(theirs.breakdown, name) - getattr(ours.breakdown, name), name) for name in parts]
    said = [
        f"{name} {100 * -won / step:+.0f} %"
        for won, name in sorted(rows, key=lambda row: -abs(row[0]))
        if abs(won) > 0.01 * step
    ]
    return ", ".join(said) or "the same"


def tuned(graph: Graph, cluster: Cluster, space: Space) -> Found | str:
    try:
        return search(graph, cluster, space=space, optimizer="adam-master")
    except PlanError as error:
        return error.what


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], help="one of them")
    parser.add_argument("--gpus", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, the same for all plans")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"simulated, global batch {options.batch}; load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores\n")
    print("| model | GPUs | our plan | step, s | best baseline | step, s | ratio | paper | where the difference lies |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in [options.model] if options.model else MODELS:
        for gpus in options.gpus:
            row(name, gpus, options.batch)


def row(name: str, gpus: int, batch: int) -> None:
    begin = time.process_time()
    graph, cluster = MODELS[name](gpus, batch), cluster_of(gpus)
    sizes = tuple(size for size in (1, 2, 4) if batch % size == 0)
    pieces = (1, 2, 4) if name == "swin" else (1,)
    found = [(space.name, tuned(graph, cluster, replace(space, sizes=sizes))) for space in baselines()]
    fitting = [(which, result) for which, result in found if isinstance(result, Found)]
    ours = tuned(graph, cluster, Space(name="sennit", sizes=sizes, pieces=pieces, interlaced=name == "t5"))
    if isinstance(ours, str):
        print(f"| {name} | {gpus} | {ours} |", flush=True)
        return
    mine = f"{ours.choice.title} | {ours.choice.step:.3f}"
    if not fitting:
        reason = "; ".join(f"{which}: {why}" for which, why in found)
        print(f"| {name} | {gpus} | {mine} | none fits: {reason} | - | - | {PAPER[name]} | memory |", flush=True)
        return
    which, best = min(fitting, key=lambda item: item[1].choice.step)
    ratio = best.choice.step / ours.choice.step
    print(
        f"| {name} | {gpus} | {mine} | {which}: {best.choice.title} | {best.choice.step:.3f} | {ratio:.2f}x | {PAPER[name]} "
        f"| {mechanism(ours, best)} | ({time.process_time() - begin:.0f} s of processor time)",
        flush=True,
    )


if __name__ == "__main__":
    main()
