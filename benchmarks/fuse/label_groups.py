"""Times of fused groups on a GPU: the data that the estimator of `fuse/` is trained on.

    python benchmarks/fuse/label_groups.py --out groups.jsonl.gz --seconds 420 --workers 12

Training steps of several model families are captured, in float32 and bfloat16, at sizes that people train at. Random legal groups of their operators (`fuse/moves.py`) are
compiled by Inductor, each by itself, and timed with CUDA events: the median of batches of launches, inputs larger than the cache where the group's are. Workers compile in parallel; one
lock keeps the GPU to one timing at a time. A line of the output is one group: the group as a graph in text form, seconds, and quartiles.
Groups with the same structure are timed once. Needs a GPU; families whose library is absent are left out and named.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import multiprocessing
import os
import queue
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

# ---- models ----------------------------------------------------------------------------------------------------------------


def models() -> dict[str, Any]:
    """Builders of (model, sample kwargs) whose result has a scalar loss; two layers each, since layers repeat."""
    return {
        "gpt2": lambda: language(
            "GPT2", "GPT2LMHeadModel", n_layer=2, n_embd=768, n_head=12, n_positions=512, vocab_size=16384
        ),
        "gpt2 wide": lambda: language(
            "GPT2", "GPT2LMHeadModel", batch=4, n_layer=2, n_embd=1600, n_head=25, n_positions=512, vocab_size=8192
        ),
        "llama": lambda: language(
            "Llama",
            "LlamaForCausalLM",
            num_hidden_layers=2,
            hidden_size=1024,
            intermediate_size=2816,
            num_attention_heads=16,
            num_key_value_heads=4,
            vocab_size=16384,
        ),
        "mixtral": lambda: language(
            "Mixtral",
            "MixtralForCausalLM",
            batch=2,
            num_hidden_layers=2,
            hidden_size=512,
            intermediate_size=1024,
            num_attention_heads=8,
            num_key_value_heads=4,
            vocab_size=8192,
            num_local_experts=4,
            experts_implementation="batched_mm",
        ),
        "t5": lambda: language(
            "T5",
            "T5ForConditionalGeneration",
            num_layers=2,
            d_model=768,
            d_ff=2048,
            num_heads=12,
            d_kv=64,
            vocab_size=16384,
            batch=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        ),
        "bert": lambda: language(
            "Bert",
            "BertForMaskedLM",
            num_hidden_layers=2,
            hidden_size=768,
            intermediate_size=3072,
            num_attention_heads=12,
            vocab_size=16384,
        ),
        "vit": lambda: vision(
            "ViT",
            "ViTForImageClassification",
            224,
            num_hidden_layers=2,
            hidden_size=768,
            intermediate_size=3072,
            num_attention_heads=12,
            image_size=224,
        ),
        "swin": lambda: vision(
            "Swin",
            "SwinForImageClassification",
            224,
            image_size=224,
            embed_dim=96,
            depths=[2, 2, 2, 2],
            num_heads=[3, 6, 12, 24],
        ),
        "resnet": lambda: vision("ResNet", "ResNetForImageClassification", 224, depths=[2, 2, 2, 2]),
        "evoformer": evoformer,
    }


def language(
    config: str, model: str, *, batch: int = 8, tokens: int = 512, **options: Any
) -> tuple[Any, dict[str, Any]]:
    import torch

    from sennit.testing.families_torch import transformers_module

    transformers = transformers_module()
    made = getattr(transformers, f"{config}Config")(use_cache=False, attn_implementation="eager", **options)
    ids = torch.randint(0, made.vocab_size, (batch, tokens))
    return getattr(transformers, model)(made), {"input_ids": ids, "labels": ids}


def vision(config: str, model: str, size: int, **options: Any) -> tuple[Any, dict[str, Any]]:
    import torch

    from sennit.testing.families_torch import transformers_module

    transformers = transformers_module()
    made = getattr(transformers, f"{config}Config")(num_labels=1000, **options)
    images, labels = torch.randn(32, 3, size, size), torch.randint(0, 1000, (32,))
    return getattr(transformers, model)(made), {"pixel_values": images, "labels": labels}


def evoformer() -> tuple[Any, dict[str, Any]]:
    import torch

    from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig

    config = EvoformerConfig(residues=128, sequences=64, msa_width=128, pair_width=64, heads=4, blocks=1, passes=1)
    residues = torch.randint(config.amino_acids - 1, (1, config.sequences, config.residues))
    distances = torch.randint(config.distance_bins, (1, config.residues, config.residues))
    return AlphaFoldTrunk(config), {"sequences": residues, "residues": residues, "distances": distances}


def graphs(names: list[str], folder: Path | None) -> Iterator[tuple[str, Any]]:
    """Captured training steps, from the folder where they are there. A family that cannot be had is named and left out."""
    import torch

    from sennit.capture import capture
    from sennit.ir.graph import Graph

    if folder is not None and any(folder.glob("*.graph")):
        for path in sorted(folder.glob("*.graph")):
            yield path.stem.replace("_", " "), Graph.parse(path.read_text())
        return
    for name in names:
        try:
            torch.manual_seed(0)
            model, kwargs = models()[name]()
            for dtype in (torch.float32, torch.bfloat16):
                cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in kwargs.items()}
                start = time.perf_counter()
                graph = capture(model.to(dtype).train(), (), cast)
                print(f"{name} {dtype}: {len(graph.ops)} operators in {time.perf_counter() - start:.1f} s", flush=True)
                title = f"{name} {str(dtype).removeprefix('torch.')}"
                if folder is not None:
                    (folder / f"{title.replace(' ', '_')}.graph").write_text(str(graph))
                yield title, graph
        except Exception:
            print(f"{name} is left out:\n{traceback.format_exc(limit=2)}", flush=True)


# ---- groups ----------------------------------------------------------------------------------------------------------------


def random_groups(graph: Any, seed: int, count: int) -> Iterator[tuple[tuple[int, ...], frozenset[str]]]:
    """Operators by number, and the values that others read; a group grows from a random operator along random edges."""
    from sennit.fuse.model import Channel, Class, StepModel
    from sennit.fuse.moves import Limits, has_detour, is_legal

    model = StepModel(graph, None, Channel(0.0, 0.0))  # type: ignore[arg-type]
    draw = random.Random(seed)
    usable = [place for place, kind in enumerate(model.kind) if kind not in (Class.OTHER, Class.VIEW)]
    for _ in range(count):
        group = frozenset((draw.choice(usable),))
        for _ in range(draw.choice((0, 1, 2, 3, 4, 6, 8, 12, 16, 24))):
            member = draw.choice(sorted(group))
            around = [place for place in (*model.reads[member], *model.readers[member]) if place not in group]
            if not around:
                continue
            other = frozenset((draw.choice(around),))
            if is_legal(model, group | other, Limits()) and not has_detour(model, {}, group, other):
                group |= other
        written = frozenset(
            value.name
            for place in group
            if place in model.outputs or any(reader not in group for reader in model.readers[place])
            for value in model.ops[place].results
        )
        if written:
            yield tuple(sorted(group)), written


def describe(graph: Any, places: tuple[int, ...], written: frozenset[str]) -> str:
    """A group as a graph in text form: what it reads are the inputs, what others read the results."""
    from sennit.ir.graph import Graph, Input, Output, OutputKind, Role, Value
    from sennit.ir.strategy_check import Kernel

    types = graph.types()
    kernel = Kernel(tuple(graph.ops[place] for place in places))
    inputs = tuple(Input(Role.INPUT, Value(name, types[name]), name) for name in kernel.reads)
    outputs = tuple(Output(OutputKind.RESULT, name, name) for name in sorted(written))
    return str(Graph("group", inputs, kernel.body, outputs))


# ---- timing ----------------------------------------------------------------------------------------------------------------


def worker(jobs: Any, answers: Any, lock: Any, number: int) -> None:
    import torch

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(1)
    from torch._inductor import config

    config.compile_threads = 1
    from sennit.fuse.kernel_torch import compile_kernel, kernel_module, sample_inputs

    while True:
        job = jobs.get()
        if job is None:
            return
        key, kernel, written, types = job
        try:
            module, reads, _ = kernel_module(kernel, written)
            inputs = sample_inputs(reads, types, "cuda")
            start = time.perf_counter()
            call = compile_kernel(module, inputs)
            call(*inputs)
            torch.cuda.synchronize()
            compiling = time.perf_counter() - start
            with lock:
                answers.put((key, timed(call, inputs), compiling, None))
        except Exception as error:
            answers.put((key, None, 0.0, f"{type(error).__name__}: {str(error)[:200]}"))


def timed(call: Any, inputs: list[Any]) -> tuple[float, float, float]:
    """Median and quartiles of seconds a call, launches queued behind each other so that the host does not count."""
    import torch

    for _ in range(3):
        call(*inputs)
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call(*inputs)
    end.record()
    torch.cuda.synchronize()
    launches = max(3, min(40, int(2.0 / max(start.elapsed_time(end), 0.02))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the host's part of a call is longer than small kernels are
        for _ in range(launches):
            call(*inputs)
    found: list[float] = []
    for _ in range(7):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / launches / 1e3)
    quartiles = statistics.quantiles(found, n=4)
    return quartiles[1], quartiles[0], quartiles[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--families", nargs="*", default=list(models()))
    parser.add_argument(
        "--graphs", type=Path, help="folder to read captured graphs from, or to write them to where it is empty"
    )
    parser.add_argument("--per-graph", type=int, default=4000, help="groups drawn from one graph at most")
    parser.add_argument("--dry", action="store_true", help="draw groups and count them; compile and time none")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds

    from sennit.fuse.kernel_torch import signature
    from sennit.ir.strategy_check import Kernel

    context = multiprocessing.get_context("spawn")
    jobs, answers, lock = context.Queue(), context.Queue(), context.Lock()
    workers = [
        context.Process(target=worker, args=(jobs, answers, lock, number), daemon=True)
        for number in range(0 if arguments.dry else arguments.workers)
    ]
    for process in workers:
        process.start()
    waiting: dict[str, list[tuple[Any, ...]]] = {}
    described: dict[str, tuple[str, str]] = {}
    for name, graph in graphs(arguments.families, arguments.graphs):
        types = graph.types()
        mine = waiting.setdefault(name, [])
        for places, written in random_groups(graph, seed=len(waiting), count=arguments.per_graph):
            kernel = Kernel(tuple(graph.ops[place] for place in places))
            key = hashlib.sha256(signature(kernel, written, types).encode()).hexdigest()[:20]
            if key not in described:
                described[key] = (name, describe(graph, places, written))
                needed = {*kernel.reads, *(value.name for op in kernel.body for value in op.results)}
                mine.append((key, kernel, written, {value: types[value] for value in needed}))
        print(f"{name}: {len(mine)} groups of different structure", flush=True)
    if arguments.dry:
        return
    order = [job for turn in range(arguments.per_graph) for mine in waiting.values() for job in mine[turn : turn + 1]]
    for job in order:
        jobs.put(job)
    done, failed, reasons = 0, 0, {}  # type: int, int, dict[str, int]
    with gzip.open(arguments.out, "wt") as out:
        while done + failed < len(order) and time.monotonic() < deadline:
            try:
                key, found, compiling, error = answers.get(timeout=1.0)
            except queue.Empty:
                continue
            if found is None:
                failed += 1
                reasons[error] = reasons.get(error, 0) + 1
                continue
            done += 1
            name, data = described[key]
            row = {
                "family": name,
                "seconds": found[0],
                "quartiles": found[1:],
                "compiling": round(compiling, 3),
                **data,
            }
            out.write(json.dumps(row) + "\n")
            if done % 500 == 0:
                print(f"{done} timed, {failed} failed", flush=True)
    for process in workers:
        process.kill()
    print(f"{done} groups timed, {failed} failed, of {len(order)} drawn")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:8]:
        print(f"  {count} x {reason}")


if __name__ == "__main__":
    main()
