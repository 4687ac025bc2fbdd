"""Fine-tune a Hugging Face model over four ranks and save it as Hugging Face does.

    torchrun --nproc-per-node 4 examples/plan_finetune_hf.py                    # a small GPT-2 with random weights
    torchrun --nproc-per-node 4 examples/plan_finetune_hf.py PATH OUT           # a GPT-2 from a folder, saved to OUT

Tensor parallel inside pairs of ranks, data parallel across; the loop is the one of one device.
"""

from __future__ import annotations

import functools
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import sennit
from sennit.plan import zoo

megatron = functools.partial(zoo.tensor_parallel, qkv="*.c_attn", column="*.c_fc", row="*.c_proj")


def load(path: str | None) -> GPT2LMHeadModel:
    if path is not None:
        return GPT2LMHeadModel.from_pretrained(path)
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 32, "vocab_size": 128}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def batches(vocabulary: int, count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocabulary, (8, 16), generator=generator) for _ in range(2)]
    return [{"input_ids": tokens[step % 2], "labels": tokens[step % 2]} for step in range(count)]


def main(path: str | None, out: str) -> None:
    model = load(path)
    model.config.use_cache = False  # for generation, and no tensor
    data = batches(model.config.vocab_size, 6)
    model = sennit.parallelize(model, data[0], plan=megatron, mesh="dp=2,tp=2")

    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for step, batch in enumerate(data):
        loss = model(**batch).loss
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    model.eval()
    evaluated = model(**data[0])  # forward alone, without dropout; every rank has the loss and the logits
    single = model.single_device().eval()  # a GPT2LMHeadModel again, on every rank
    if dist.get_rank() == 0:
        single.save_pretrained(out)
        again = GPT2LMHeadModel.from_pretrained(out)(**data[0])
        print(f"evaluated: {evaluated.loss.item():.5f}, from the saved model: {again.loss.item():.5f}")
        print(f"logits differ by {(evaluated.logits - again.logits).abs().max().item():.1e}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(*(sys.argv[1:3] if len(sys.argv) > 2 else (None, folder)))
    dist.destroy_process_group()
