"""The models of the SuperScaler paper (arXiv 2301.08984) on 4 to 32 V100: our best plan against the best of three other
systems, simulated.

    python benchmarks/plan/paper.py [--model gpt|t5|mbart|swin|evoformer] [--gpus 4 8 16 32] [--form kernel|written] [--table]

Everything is simulated, on the preset v100x16 (nodes of 16 V100 of 32 GB, one EDR NIC each), in f16 with Adam and
master weights, at one global batch for all plans of a row.

- **Ours**: the whole space of the search, with zero-bubble schedules; co-shard for Swin, interlaced stages for T5 and
  mBART, 3F1B for the Evoformer.
- **Tuned**: Megatron-, DeepSpeed- and Alpa-style spaces, searched as exhaustively and with per-layer recomputation and
  ZeRO (`plan/search/baselines.py`).
- **Published**: the same systems as the paper could run them: one flag for recomputation, equal stages, no ZeRO beside
  Megatron, no split sequence.

Each row comes in two forms of attention. `written`: products and a softmax in f16, the scores kept for the backward
pass, as the systems of 2023 ran these models. `kernel`: what torch calls today, also on V100 (the memory-efficient
kernel takes masks and gives their gradient); no scores are kept.

Sizes of Swin and T5 are the paper's. mBART has T5's. Those of GPT are of its family, with 2048 tokens. Those of the
Evoformer are our own: blocks, width of the alignment and of pairs, for 256 residues, 128 sequences and three passes.

A row is written to `paper.json` (`--out`) when it ends, and not run again; several processes may write to one file.
`--table` prints what is there.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sennit.capture import capture_call
from sennit.cluster import Cluster, load
from sennit.errors import PlanError
from sennit.ir.graph import Graph
from sennit.plan.search import Found, Kind, Space, probes_of, search
from sennit.plan.search.baselines import baselines, published
from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig
from sennit.testing.families_torch import transformers_module

GPT = {4: (24, 2048, 32), 8: (32, 2560, 32), 16: (32, 4096, 32), 32: (48, 5120, 40)}
T5 = {4: (24, 2048, 32, 512), 8: (32, 3072, 48, 1024), 16: (32, 4096, 64, 1536), 32: (32, 6144, 96, 2048)}
SWIN = {4: (32, 512, 16), 8: (40, 768, 24), 16: (48, 1024, 32), 32: (56, 1536, 32)}
EVOFORMER = {4: (48, 256, 128, 8), 8: (64, 512, 256, 16), 16: (96, 768, 384, 16), 32: (128, 1024, 512, 32)}
PAPER = {"gpt": "-", "t5": "2.2x", "mbart": "2.2x", "swin": "3.5x", "evoformer": "1.8x"}
FORMS = ("kernel", "written")
RESULTS = Path(__file__).with_name("paper.json")


def gpt(gpus: int, batch: int, form: str) -> Graph:
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
        attn_implementation=_attention(form),
    )
    return _language(lambda: library.GPT2LMHeadModel(config), batch, 2048)


def t5(gpus: int, batch: int, form: str) -> Graph:
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
        attn_implementation=_attention(form),
    )
    return _language(lambda: library.T5ForConditionalGeneration(config), batch, 1024)


def mbart(gpus: int, batch: int, form: str) -> Graph:
    """Of T5's sizes: one table for encoder, decoder and head, learned positions, and no biases of positions in
    attention.
    """
    layers, width, heads, thousands = T5[gpus]
    library = transformers_module()
    config = library.MBartConfig(
        use_cache=False,
        d_model=width,
        encoder_layers=layers // 2,
        decoder_layers=layers // 2,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_position_embeddings=1024,
        vocab_size=thousands * 1024,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        attn_implementation=_attention(form),
    )
    return _language(lambda: library.MBartForConditionalGeneration(config), batch, 1024)


def _attention(form: str) -> str:
    return "sdpa" if form == "kernel" else "eager"


def _language(make: Callable[[], nn.Module], batch: int, tokens: int) -> Graph:
    with torch.device("meta"):
        model = make().half().train()
        ids = torch.zeros((batch, tokens), dtype=torch.int64)
    return capture_call(model, (), {"input_ids": ids, "labels": ids}).graph


def written_in_half(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Attention by hand with all of it in the model's own type.

    The library's Swin takes its softmax in f32, which holds twice the scores, where its other models do not.
    """
    scores = torch.matmul(query, key.transpose(2, 3)) * (scaling or query.shape[-1] ** -0.5)
    weights = nn.functional.softmax(scores if attention_mask is None else scores + attention_mask, dim=-1)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def swin(gpus: int, batch: int, form: str) -> Graph:
    """Four resolutions with 2, 2, n - 6 and 2 layers, as Swin has; the width is that of the first."""
    layers, width, heads = SWIN[gpus]
    library = transformers_module()
    library.AttentionInterface.register("written_in_half", written_in_half)
    config = library.SwinConfig(
        image_size=1536,
        patch_size=4,
        window_size=48,
        embed_dim=width,
        depths=[2, 2, layers - 6, 2],
        num_heads=[heads, 2 * heads, 4 * heads, 8 * heads],
        drop_path_rate=0.0,
        num_labels=1000,
        attn_implementation="sdpa" if form == "kernel" else "written_in_half",
    )
    with torch.device("meta"):
        model = library.SwinForImageClassification(config).half().train()
        pixels = torch.zeros((batch, 3, 1536, 1536), dtype=torch.float16)
        labels = torch.zeros((batch,), dtype=torch.int64)
    return capture_call(model, (), {"pixel_values": pixels, "labels": labels}).graph


def evoformer(gpus: int, batch: int, form: str) -> Graph:
    blocks, width, pairs, heads = EVOFORMER[gpus]
    config = EvoformerConfig(
        residues=256,
        sequences=128,
        msa_width=width,
        pair_width=pairs,
        heads=heads,
        blocks=blocks,
        passes=3,
        distance_bins=64,
        msa_dropout=0.0,
        pair_dropout=0.0,
        by_hand=form == "written",
    )
    with torch.device("meta"):
        model = AlphaFoldTrunk(config).half().train()
        sequences = torch.zeros((batch, 128, 256), dtype=torch.int64)
        distances = torch.zeros((batch, 256, 256), dtype=torch.int64)
    return capture_call(model, (), {"sequences": sequences, "residues": sequences, "distances": distances}).graph


MODELS: dict[str, Callable[[int, int, str], Graph]] = {
    "gpt": gpt,
    "t5": t5,
    "mbart": mbart,
    "swin": swin,
    "evoformer": evoformer,
}


def cluster_of(gpus: int) -> Cluster:
    """The paper's nodes of 16; fewer GPUs are a part of one node."""
    if gpus >= 16:
        return load("v100x16" if gpus == 16 else f"v100x16:{gpus // 16}")
    whole = load("v100x16")
    device = whole.device
    fields = {name: getattr(device, name) for name in device.__struct_fields__}
    smaller = type(device)(**{**fields, "per_node": gpus})
    return type(whole)(**{**{name: getattr(whole, name) for name in whole.__struct_fields__}, "device": smaller})


# ---- a row -----------------------------------------------------------------------------------------------------------


def ours(model: str) -> Space:
    space = Space(name="sennit", tps=(1, 2, 4, 8))
    match model:
        case "swin":
            return replace(space, pieces=(1, 4))
        case "t5" | "mbart":
            return replace(space, interlaced=True)
        case "evoformer":
            return replace(space, kinds=(Kind.SEVERAL_FORWARD, Kind.ONE_F_ONE_B))
        case _:
            return space


def row(model: str, gpus: int, batch: int, form: str) -> dict[str, Any]:
    clock, begin = time.perf_counter(), time.process_time()
    graph, cluster = MODELS[model](gpus, batch, form), cluster_of(gpus)
    captured = time.process_time()
    probes = probes_of(graph, cluster, "adam-master")
    sizes = (1, 2) if model == "swin" else (1, 2, 4)

    def tuned(space: Space) -> dict[str, Any]:
        tps = tuple(tp for tp in (space.tps or (1, 2, 4, 8)) if tp <= gpus)
        try:
            found = search(
                graph,
                cluster,
                space=replace(space, sizes=sizes, tps=tps),
                probes=probes,
            )
        except PlanError as error:
            return {"fits": False, "reason": error.what}
        return described(found)

    systems: dict[str, dict[str, Any]] = {"sennit": tuned(ours(model))}
    columns: dict[str, dict[str, dict[str, Any]]] = {}
    for column, spaces in (("tuned", baselines()), ("published", published())):
        columns[column] = {}
        for space in spaces:
            if model == "evoformer":  # the paper's systems knew no pipeline of several forward passes
                space = replace(space, kinds=(Kind.ONE_F_ONE_B,), most_pp=1 if column == "published" else None)
            columns[column][space.name] = better(columns[column].get(space.name), tuned(space))
    return {
        "model": model,
        "gpus": gpus,
        "batch": batch,
        "form": form,
        "ours": systems["sennit"],
        **columns,
        "probes": sum(costs is not None for costs in probes.found.values()),
        "capture_processor_s": round(captured - begin, 1),
        "search_processor_s": round(time.process_time() - captured, 1),
        "clock_s": round(time.perf_counter() - clock, 1),
    }


def better(one: dict[str, Any] | None, other: dict[str, Any]) -> dict[str, Any]:
    if one is None or (not one["fits"] and other["fits"]):
        return other
    return min(one, other, key=lambda item: item["step_s"]) if other["fits"] else one


def described(found: Found) -> dict[str, Any]:
    choice = found.choice
    units = Counter[str]()
    for part in (part for stage in choice.stages for part in stage):
        pieces = f" in {part.pieces} pieces" if part.pieces > 1 else ""
        units[f"keep {part.keep.value}{pieces}"] += part.units
    return {
        "fits": True,
        "plan": choice.title,
        "units": dict(units),
        "step_s": choice.step,
        "bound_s": choice.bound,
        "memory_gb": choice.memory / 1e9,
        "wire_gb": found.estimate.wire_bytes / 1e9,
        "breakdown_s": asdict(found.breakdown),
    }


# ---- the table -------------------------------------------------------------------------------------------------------


def mechanism(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """The parts of the step in which we are more than 1 % of their step faster or slower, largest first."""
    step = theirs["step_s"]
    won = {name: theirs["breakdown_s"][name] - mine["breakdown_s"][name] for name in mine["breakdown_s"]}
    said = [
        f"{name} {-100 * seconds / step:+.0f} %"
        for name, seconds in sorted(won.items(), key=lambda item: -abs(item[1]))
        if abs(seconds) > 0.01 * step
    ]
    return ", ".join(said) or "the same"


def best(column: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    fitting = [(name, found) for name, found in column.items() if found["fits"]]
    return min(fitting, key=lambda item: item[1]["step_s"]) if fitting else None


def table(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    yield (
        "| model | GPUs | attention | ours | s | best tuned | s | ratio | best as published | s | ratio | paper "
        "| where the step differs from the published one |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|---|"
    for item in rows:
        mine = item["ours"]
        cells = [item["model"], str(item["gpus"]), item["form"]]
        cells += [_plan(mine), f"{mine['step_s']:.2f}"] if mine["fits"] else [mine["reason"], "-"]
        for column in ("tuned", "published"):
            other = best(item[column])
            if other is None:
                cells += ["none fits", "-", "-"]
                continue
            ratio = f"{other[1]['step_s'] / mine['step_s']:.2f}x" if mine["fits"] else "-"
            cells += [f"{other[0]}: {_plan(other[1])}", f"{other[1]['step_s']:.2f}", ratio]
        theirs = best(item["published"]) or best(item["tuned"])
        cells += [PAPER[item["model"]], mechanism(mine, theirs[1]) if theirs and mine["fits"] else "memory"]
        yield "| " + " | ".join(cells) + " |"


def _plan(found: dict[str, Any]) -> str:
    kept = [f"{count} {what}" for what, count in found["units"].items() if what != "keep all"]
    return found["plan"] + (f" ({', '.join(kept)})" if kept else "")


def saved(path: Path, key: str | None = None, item: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """What is in the file, with one row more where one is given. Nobody else writes in between."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        found: dict[str, dict[str, Any]] = json.loads(file.read() or "{}")
        if key is not None and item is not None:
            found[key] = item
            file.truncate(0)
            file.write(json.dumps(found, indent=1) + "\n")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=[*MODELS], nargs="*", default=[*MODELS])
    parser.add_argument("--gpus", type=int, nargs="*", default=[4, 8, 16, 32])
    parser.add_argument("--form", choices=FORMS, nargs="*", default=[*FORMS])
    parser.add_argument("--batch", type=int, default=64, help="samples of a step, the same for all plans")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what is there already")
    parser.add_argument("--table", action="store_true", help="print what is there, and run nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = saved(options.out)
    wanted = [(name, gpus, form) for gpus in options.gpus for name in options.model for form in options.form]
    for name, gpus, form in wanted if not options.table else ():
        key = f"{name} {gpus} {form}"
        if key in found and not options.again:
            continue
        print(f"{key}: load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores", flush=True)
        found = saved(options.out, key, row(name, gpus, options.batch, form))
        print(
            f"  {found[key]['clock_s']} s by the clock, {found[key]['search_processor_s']} s of the processor",
            flush=True,
        )
    order = [f"{name} {gpus} {form}" for name in MODELS for gpus in (4, 8, 16, 32) for form in FORMS]
    print(f"\nsimulated, global batch {options.batch}\n")
    for line in table(found[key] for key in order if key in found):
        print(line)


if __name__ == "__main__":
    main()
