"""How long capture takes, and what comes out: every family at its smallest, and models of full size without memory.

    python benchmarks/plan/capture.py [--small] [--large] [--only NAME]

For each: the operators of the forward and the backward pass, the seconds by the clock and the seconds of processor time
(on a machine that others use, the second is the one to compare), and the largest difference from eager torch in
float64. For models of full size also the layers, the parameters, the seconds without folding where that is asked for
with --whole, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import time
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from sennit.capture import Captured, capture_call
from sennit.ir.graph import Phase
from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig
from sennit.testing.families_torch import Sample, families, transformers_module
from sennit.testing.parity_torch import compare


def count(captured: Captured, phase: Phase) -> int:
    return sum(op.phase is phase for op in captured.graph.ops)


def small(only: str | None) -> None:
    print("| family | layers | forward | backward | drawn | training, s | inference, s | exact | largest difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, family in families().items():
        if (only and name != only) or find_spec(family.library) is None:
            continue
        sample = family.build(family.layers)
        clocks = []
        for training in (True, False):
            begin = time.process_time()
            capture_call(sample.model, (), sample.kwargs, training=training)
            clocks.append(time.process_time() - begin)
        found = compare(sample, training=True)
        drawn = sum(op.kind == "sennit.uniform" for op in found.captured.graph.ops)
        exact = len(found.differences) - len(found.inexact)
        print(
            f"| {name} | {family.layers} | {count(found.captured, Phase.FORWARD)} | {count(found.captured, Phase.BACKWARD)} "
            f"| {drawn} | {clocks[0]:.1f} | {clocks[1]:.1f} | {exact} of {len(found.differences)} "
            f"| {max(found.differences.values()):.1e} |",
            flush=True,
        )


# ---- full size -------------------------------------------------------------------------------------------------------


def gpt3() -> Sample:
    """GPT-3 175B (Brown et al., 2020, table 2.1)."""
    return _language("GPT2", "LMHeadModel", n_embd=12288, n_layer=96, n_head=96, n_positions=2048, vocab_size=50257)


def llama3() -> Sample:
    """Llama 3 70B (Grattafiori et al., 2024, table 3)."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256}
    return _language("Llama", "ForCausalLM", **sizes, num_attention_heads=64, num_key_value_heads=8, pad_token_id=0)


def t5() -> Sample:
    """The largest T5 of the SuperScaler paper: 32 layers, a vocabulary of two million."""
    sizes = {"d_model": 6144, "d_kv": 64, "d_ff": 24576, "num_heads": 96, "num_layers": 32, "vocab_size": 2048 * 1024}
    return _language("T5", "ForConditionalGeneration", **sizes, decoder_start_token_id=0)


def alphafold() -> Sample:
    """The Evoformer of AlphaFold 2: 48 blocks, three passes, with initial training's crop of 256 residues and 128
    sequences.
    """
    config = EvoformerConfig(residues=256, sequences=128, msa_width=256, pair_width=128, heads=8, blocks=48, passes=3)
    with torch.device("meta"):
        model = AlphaFoldTrunk(config)
        shape = (1, config.sequences, config.residues)
        tokens, distances = torch.zeros(shape, dtype=torch.int64), torch.zeros((1, 256, 256), dtype=torch.int64)
    return Sample(model, {"sequences": tokens, "residues": tokens, "distances": distances})


def _language(name: str, head: str, tokens: int = 2048, **sizes: int) -> Sample:
    transformers = transformers_module()
    config = getattr(transformers, f"{name}Config")(use_cache=False, **sizes)
    with torch.device("meta"):
        model: nn.Module = getattr(transformers, f"{name}{head}")(config).train()
        ids = torch.zeros((1, tokens), dtype=torch.int64)
    return Sample(model, {"input_ids": ids, "labels": ids})


LARGE: dict[str, Callable[[], Sample]] = {
    "GPT-3 175B": gpt3,
    "Llama 3 70B": llama3,
    "T5, 2M tokens": t5,
    "AlphaFold 2 Evoformer": alphafold,
}


def large(only: str | None, whole: bool) -> None:
    print("| model | parameters | operators | copied | by the clock, s | processor, s | peak memory, GiB |")
    print("|---|---|---|---|---|---|---|")
    for name, make in LARGE.items():
        if (only and name != only) or (make is not alphafold and find_spec("transformers") is None):
            continue
        sample = make()
        parameters = sum(parameter.numel() for parameter in sample.model.parameters())
        for fold in (True, False) if whole else (True,):
            gc.collect()
            clock, processor = time.perf_counter(), time.process_time()
            graph = capture_call(sample.model, (), sample.kwargs, fold=fold).graph
            clock, processor = time.perf_counter() - clock, time.process_time() - processor
            copied = sum(repeat.length * (repeat.copies - 1) for repeat in graph.repeats)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(
                f"| {name}{'' if fold else ', not folded'} | {parameters / 1e9:.1f}e9 | {len(graph.ops)} "
                f"| {copied} | {clock:.1f} | {processor:.1f} | {peak:.2f} |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="the families only")
    parser.add_argument("--large", action="store_true", help="the models of full size only")
    parser.add_argument("--only", help="one name of a table")
    parser.add_argument("--whole", action="store_true", help="also without folding: minutes")
    options = parser.parse_args()
    load = f"load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}, {load}\n")
    torch.set_num_threads(1)
    if not options.large:
        small(options.only)
    if not options.small:
        large(options.only, options.whole)


if __name__ == "__main__":
    main()
