"""The backend between network namespaces: every collective against gloo, and the bytes on the link."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sennit.testing import network, why_no_network

pytestmark = pytest.mark.skipif(why_no_network() is not None, reason=str(why_no_network()))

ROOT = Path(__file__).resolve().parents[2]
PER_HOST = 2
RANK = """
import sys, warnings
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
import random_calls, sennit.backend

warnings.simplefilter("ignore")
torch.set_num_threads(1)
sennit.backend.register()
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank = dist.get_rank()
found = random_calls.compare_many(rank, 7000, 25, groups_every=25)[1]
group = dist.new_group(backend="sennit")
kind = type(group._communicator).__name__
counter = Path("/sys/class/net/link0/statistics/tx_bytes")
x = torch.full((1 << 20,), 1.0)
dist.all_reduce(x, group=group)
dist.barrier()
before = int(counter.read_text())
dist.barrier()  # nobody sends before all have read, and all have sent before anybody reads again
dist.all_reduce(x, group=group)
dist.barrier()
sent = int(counter.read_text()) - before
wrong = int((x != dist.get_world_size() ** 2).sum())
dist.barrier()
dist.destroy_process_group()
print(repr((kind, found[:3], wrong, sent / x.nbytes)))
"""


def test_two_hosts() -> None:
    with network(2, rate="2gbit") as net:
        ranks = []
        for rank in range(2 * PER_HOST):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(2 * PER_HOST),
                "MASTER_PORT": "29533",
                "OMP_NUM_THREADS": "1",
            }
            variables["PYTHONPATH"] = f"{ROOT / 'src'}:{ROOT / 'tests' / 'runtime'}"
            ranks.append(
                net.run(
                    rank // PER_HOST,
                    [sys.executable, "-c", RANK],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
            )
        answers = [rank.communicate(timeout=250) for rank in ranks]
        for rank, (output, errors) in zip(ranks, answers, strict=True):
            assert rank.returncode == 0, errors.decode()[-2000:]
            kind, found, wrong, share = eval(output.decode().splitlines()[-1])
            assert kind == "Hosts"
            assert not found
            assert wrong == 0
            assert 0.95 < share < 1.1  # of the array, once each way
