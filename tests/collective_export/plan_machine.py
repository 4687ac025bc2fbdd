"""An mscclpp plan, interpreted: all ranks in one process, one operation of a random thread block at a time.

It follows the executor's kernel: `put` writes the peer's buffer, `signal` and `wait` count on a channel, semaphores
count, a wait that cannot go on lets others run. Channel number i of rank a to peer b is paired with the same occurrence
of a among b's channels.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import numpy.typing as npt

Buffers = dict[str, npt.NDArray[np.int64]]


class PlanDeadlockError(Exception):
    pass


class PlanMachine:
    def __init__(self, text: str, inputs: list[npt.NDArray[np.int64]], seed: int) -> None:
        self.plan = json.loads(text)
        self.random = random.Random(seed)
        self.gpus: list[dict[str, Any]] = self.plan["gpus"]
        width = inputs[0].shape[1]
        self.buffers: list[Buffers] = []
        for gpu, data in zip(self.gpus, inputs, strict=True):
            given = data.copy()
            output = given if self.plan["inplace"] else np.full((gpu["output_chunks"], width), -7)
            self.buffers.append({"i": given, "o": output, "s": np.full((gpu["scratch_chunks"], width), -9)})
        self.signals: dict[tuple[int, str, int], int] = {}  # arrived at (rank, type, channel)
        self.semaphores = {
            (gpu["id"], n): s["init_value"] for gpu in self.gpus for n, s in enumerate(gpu["semaphores"])
        }

    def run(self) -> list[npt.NDArray[np.int64]]:
        blocks = [(gpu, block) for gpu in self.gpus for block in gpu["threadblocks"]]
        at = [0] * len(blocks)
        while waiting := [n for n, (_, block) in enumerate(blocks) if at[n] < len(block["ops"])]:
            self.random.shuffle(waiting)
            for n in waiting:
                if self.step(*blocks[n], blocks[n][1]["ops"][at[n]]):
                    at[n] += 1
                    break
            else:
                raise PlanDeadlockError([(blocks[n][0]["id"], blocks[n][1]["id"], at[n]) for n in waiting])
        assert not any(self.signals.values()), "signals are left for the next run"
        assert not any(self.semaphores.values()), "semaphores are left for the next run"
        return [buffers["o"] for buffers in self.buffers]

    def far(self, rank: int, kind: str, channel: int) -> tuple[int, str, int]:
        mine = self.connected(rank, kind)
        peer = mine[channel]
        occurrence = mine[:channel].count(peer)
        theirs = [number for number, other in enumerate(self.connected(peer, kind)) if other == rank]
        return peer, kind, theirs[occurrence]

    def connected(self, rank: int, kind: str) -> list[int]:
        return [p for item in self.gpus[rank]["channels"] if item["channel_type"] == kind for p in item["connected_to"]]

    def step(self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any]) -> bool:
        rank, name = gpu["id"], op["name"]
        match name:
            case "nop" | "flush":
                pass
            case "signal" | "wait":
                kind = op["channel_type"]
                ids = next(item["channel_ids"] for item in block["channels"] if item["channel_type"] == kind)
                keys = [(rank, kind, ids[number]) for number in op["channel_ids"]]
                if name == "wait":
                    if any(self.signals.get(key, 0) < 1 for key in keys):
                        return False
                    for key in keys:
                        self.signals[key] -= 1
                else:
                    for key in keys:
                        far = self.far(*key)
                        self.signals[far] = self.signals.get(far, 0) + 1
            case "sem_acquire" | "sem_release":
                change = 1 if name == "sem_release" else -1
                keys2 = [(rank, number) for number in op["semaphore_ids"]]
                if change < 0 and any(self.semaphores[key] < 1 for key in keys2):
                    return False
                for key2 in keys2:
                    self.semaphores[key2] += change
            case "gstore" | "glres":
                sources = [view for ref in op["src_buff"] for view in self.views(gpu, block, op, ref)]
                value = sum(view.copy() for view in sources)
                for ref in op["dst_buff"]:
                    for view in self.views(gpu, block, op, ref):
                        view[...] = value
            case "copy" | "put" | "re" | "res" | "rre":
                value = sum(self.view(gpu, block, op, ref).copy() for ref in op["src_buff"])
                for ref in op["dst_buff"]:
                    self.view(gpu, block, op, ref)[...] = value
            case _:
                raise AssertionError(f"the executor does not know {name}")
        return True

    def views(
        self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], ref: dict[str, Any]
    ) -> list[npt.NDArray[np.int64]]:
        """One place, or that of every rank of a switch channel."""
        if "switch_channel_id" not in ref:
            return [self.view(gpu, block, op, ref)]
        groups = [
            (channel["buffer_type"], group)
            for channel in gpu["channels"]
            if channel["channel_type"] == "switch"
            for group in channel["rank_groups"]
        ]
        ids = next(item["channel_ids"] for item in block["channels"] if item["channel_type"] == "switch")
        kind, group = groups[ids[ref["switch_channel_id"]]]
        assert gpu["id"] in group["ranks"]
        assert ref["index"] + ref["size"] <= group["size"]
        return [self.buffers[rank][kind][ref["index"] : ref["index"] + ref["size"]] for rank in group["ranks"]]

    def view(
        self, gpu: dict[str, Any], block: dict[str, Any], op: dict[str, Any], ref: dict[str, Any]
    ) -> npt.NDArray[np.int64]:
        rank, kind = gpu["id"], ref.get("type")
        if "buffer_id" in ref:
            access = op["channel_type"]
            refs = next(r for r in block["remote_buffer_refs"] if r["access_channel_type"] == access)
            remote = gpu["remote_buffers"][refs["remote_buffer_ids"][ref["buffer_id"]]]
            assert access in remote["access_channel_types"]
            rank, kind = remote["rank"], remote["type"]
        array = self.buffers[rank][kind]
        assert ref["index"] + ref["size"] <= len(array)
        return array[ref["index"] : ref["index"] + ref["size"]]
