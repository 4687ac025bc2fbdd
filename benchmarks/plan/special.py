"""Co-shard, interlaced and recycled plans on four real ranks, beside what torch has for the same models.

    sudo python benchmarks/plan/special.py [--rate 200mbit] [--cases t5 swin evoformer] [--steps 5]
    python benchmarks/plan/special.py --rate none            # all ranks on this host

Four gloo ranks, one thread each, on four hosts that are joined by links of the given rate (network namespaces of this machine). The models
are Hugging Face's T5, timm's Swin and an Evoformer with three passes; no dropout, float32, AdamW, one global batch for all contenders.
Each contender runs in processes of its own. Printed: the least and median seconds of a step (the slowest rank's), the most memory that a rank took above
what it had before the model was built (resident set, after a first step), bytes that a host sent in a step, and the loss after the last step,
which must agree.

Contenders are what people use: DDP; FSDP2 by blocks; both with activation checkpointing; for Swin, which is a sequence of layers, torch's own
pipelining in 1F1B order. T5 would have to be rewritten for that, and no schedule of torch's runs a block several times.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

RANKS = 4
CASES: dict[str, tuple[str, ...]] = {
    "t5": ("interlaced", "interlaced, recomputed", "ddp", "ddp, checkpoints", "fsdp2", "fsdp2, checkpoints"),
    "swin": (
        "co-shard",
        "co-shard, zero-2",
        "ddp",
        "ddp, checkpoints",
        "fsdp2",
        "fsdp2, checkpoints",
        "pipelining 1f1b",
    ),
    "evoformer": ("recycled", "ddp", "fsdp2"),
}
OURS = ("interlaced", "co-shard", "recycled")
MICROBATCHES = 8


# ---- models --------------------------------------------------------------------------------------------------------------


def build(case: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    match case:
        case "t5":
            from sennit.testing.families_torch import transformers_module

            library = transformers_module()
            config = library.T5Config(
                vocab_size=32768, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, dropout_rate=0.0, use_cache=False,
                decoder_start_token_id=0, pad_token_id=0,
            )  # fmt: skip
            tokens = torch.randint(1, 32768, (16, 32))
            return library.T5ForConditionalGeneration(config), {"input_ids": tokens, "labels": tokens.roll(1, 1)}
        case "swin":
            from sennit.testing.families_torch import transformers_module

            transformers_module()  # clears the way for torchvision, which timm imports
            from timm.models.swin_transformer import SwinTransformer

            model = SwinTransformer(
                img_size=64, patch_size=4, embed_dim=64, depths=(2, 2), num_heads=(4, 8), window_size=8, num_classes=16, drop_path_rate=0.0
            )  # fmt: skip
            return Classifier(model), {"images": torch.randn(16, 3, 64, 64), "labels": torch.randint(16, (16,))}
        case "evoformer":
            from sennit.testing.evoformer_torch import AlphaFoldTrunk, EvoformerConfig

            config = EvoformerConfig(
                residues=16,
                sequences=8,
                msa_width=64,
                pair_width=64,
                heads=4,
                blocks=4,
                msa_dropout=0.0,
                pair_dropout=0.0,
            )
            rows = (16, config.sequences, config.residues)
            return AlphaFoldTrunk(config), {
                "sequences": torch.randint(config.amino_acids, rows),
                "residues": torch.randint(config.amino_acids - 1, rows),
                "distances": torch.randint(config.distance_bins, (16, config.residues, config.residues)),
            }
    raise ValueError(case)


class Classifier(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(images), labels)


def blocks(case: str, model: nn.Module) -> list[nn.Module]:
    if case == "t5":
        return [*model.encoder.block, *model.decoder.block]
    return [b for layer in model.model.layers for b in layer.blocks] if case == "swin" else [*model.blocks]


# ---- contenders ----------------------------------------------------------------------------------------------------------

Step = Callable[[], float]


def step_of(case: str, contender: str) -> Step:
    model, batch = build(case)
    if contender == "pipelining 1f1b":
        return pipelining(model, batch)
    mine = {key: value[dist.get_rank() :: RANKS].contiguous() for key, value in batch.items()}
    if contender.endswith("checkpoints"):
        checkpointed(case, model)
    match contender.partition(",")[0]:
        case "ddp":
            wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
        case "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for block in blocks(case, model):
                fully_shard(block)
            wrapped = fully_shard(model)
        case _:
            wrapped, mine = parallel(case, contender, model, batch), batch
    optimizer = torch.optim.AdamW(wrapped.parameters(), 1e-3)
    ours = contender.partition(",")[0] in OURS

    def step() -> float:
        loss = loss_of(wrapped(**mine))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach().clone()
        if not ours:
            dist.all_reduce(value)
            value /= RANKS
        return float(value)

    return step


def loss_of(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    return result["loss"]


def checkpointed(case: str, model: nn.Module) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    wanted = blocks(case, model)
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is block for block in wanted))


def parallel(case: str, contender: str, model: nn.Module, batch: dict[str, Any]) -> nn.Module:
    import sennit
    from sennit.plan import zoo

    match contender:
        case "interlaced":
            planner, mesh = zoo.interlaced, f"pp=4;mb={MICROBATCHES}"
        case "interlaced, recomputed":
            planner, mesh = recomputed, f"pp=4;mb={MICROBATCHES}"
        case "recycled":
            planner, mesh = zoo.recycled, f"pp=4;mb={MICROBATCHES}"
        case "co-shard":
            planner, mesh = partial(zoo.co_shard, pieces=4), "dp=4"
        case _:
            planner, mesh = lean_pieces, "dp=4"
    return sennit.parallelize(model, batch, plan=planner, mesh=mesh, losses=["loss"] if case == "evoformer" else None)


def recomputed(graph: Any, mesh: Any) -> Any:
    from sennit.ir.graph import Phase
    from sennit.plan import recompute, zoo
    from sennit.plan.zoo.stages import layers_of

    plan = zoo.interlaced(graph, mesh)
    for layer in layers_of(graph):
        plan = recompute(plan, plan.graph.select(f"{layer}|{layer}.*", phase=Phase.FORWARD))
    return plan


def lean_pieces(graph: Any, mesh: Any) -> Any:
    from sennit.plan import zoo

    return zoo.sharded(zoo.co_shard(graph, mesh, pieces=4), level=2)


def pipelining(model: nn.Module, batch: dict[str, Any]) -> Step:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    swin = model.model
    first, second = swin.layers
    pieces = [
        nn.Sequential(swin.patch_embed, first.downsample, first.blocks[0]),
        first.blocks[1],
        nn.Sequential(second.downsample, second.blocks[0]),
        nn.Sequential(second.blocks[1], swin.norm, swin.head),
    ]
    rank = dist.get_rank()
    stage = PipelineStage(pieces[rank], rank, RANKS, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.cross_entropy)
    optimizer = torch.optim.AdamW(pieces[rank].parameters(), 1e-3)

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(batch["images"])
        elif rank == RANKS - 1:
            schedule.step(target=batch["labels"], losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        value = torch.stack([loss.detach() for loss in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(value, RANKS - 1)
        return float(value)

    return step


# ---- a rank --------------------------------------------------------------------------------------------------------------


def rank_main(case: str, contender: str, steps: int, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.barrier()
    before = resident("VmRSS")
    step = step_of(case, contender)
    losses = [step()]
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak from here on
    seconds = []
    for _ in range(steps):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - start)
    found = torch.tensor([*seconds, float(resident("VmHWM") - before)], dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        answer = {"seconds": found[:-1].tolist(), "bytes": float(found[-1]), "losses": losses}
        Path(out).write_text(json.dumps(answer), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


# ---- all of them ---------------------------------------------------------------------------------------------------------


def run(case: str, contender: str, steps: int, rate: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = str(Path(folder) / "answer.json")
        argv = [sys.executable, __file__, "--rank-of", case, contender, str(steps), out]
        shared = {"WORLD_SIZE": str(RANKS), "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        shared["MALLOC_MMAP_THRESHOLD_"] = "65536"  # what is freed leaves the resident set, for every contender
        if rate == "none":
            ranks = [
                subprocess.Popen(argv, env={**os.environ, **shared, "MASTER_ADDR": "127.0.0.1", "RANK": str(rank)})
                for rank in range(RANKS)
            ]
            wait(ranks, contender)
            return json.loads(Path(out).read_text(encoding="utf-8"))
        from sennit.testing.testbed import network

        with network(RANKS, rate) as net:
            ranks = [net.run(rank, argv, env={**shared, "RANK": str(rank)}) for rank in range(RANKS)]
            wait(ranks, contender)
            sent = max(net.bytes_sent(rank) for rank in range(RANKS)) / (steps + 1)
            return {**json.loads(Path(out).read_text(encoding="utf-8")), "sent": sent}


def wait(ranks: list[subprocess.Popen[bytes]], contender: str) -> None:
    codes = [rank.wait(timeout=600) for rank in ranks]
    if any(codes):
        raise SystemExit(f"{contender}: a rank ended with {codes}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    if len(sys.argv) > 1 and sys.argv[1] == "--rank-of":
        rank_main(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json")
    options = parser.parse_args()
    found = {}
    print(
        f"torch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {RANKS} ranks, links of {options.rate}"
    )
    for case in options.cases:
        rows = {contender: run(case, contender, options.steps, options.rate) for contender in CASES[case]}
        found[case] = rows
        peers = {name: row for name, row in rows.items() if name.partition(",")[0] not in OURS}
        fastest = min(min(row["seconds"]) for row in peers.values())
        leanest = min(row["bytes"] for row in peers.values())
        print(
            f"\n{case}\n  {'contender':24s} {'least s':>8s} {'median':>8s} {'x best peer':>12s} {'peak MB':>8s} {'x leanest':>10s} {'MB sent':>8s}  last loss"
        )
        for name, row in rows.items():
            least = min(row["seconds"])
            sent = f"{row['sent'] / 1e6:8.1f}" if "sent" in row else f"{'-':>8s}"
            print(
                f"  {name:24s} {least:8.3f} {median(row['seconds']):8.3f} {fastest / least:11.2f}x {row['bytes'] / 1e6:8.0f} "
                f"{leanest / row['bytes']:9.2f}x {sent}  {row['losses'][-1]:.5f}"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
