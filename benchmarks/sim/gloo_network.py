"""Simulated against measured steps of gloo ranks on hosts that are joined by a rate-limited link.

    sudo python benchmarks/sim/gloo_network.py [--rate 50mbit] [--burst 32k] [--ranks-per-host 1] [--repeats 11]

Two hosts are network namespaces of this machine (`sennit.testing.network`: Linux, root, iproute2). Their ranks first
probe the link, as `sennit probe` does, which gives the cluster; then they run a small GPT under several plans. Each
plan is simulated on the probed cluster. Nothing is fitted to the plans' steps. Compute is that of the `laptop` cluster
measured here, times what a step of the whole model takes on every rank at once over what is simulated for it.

Rounds of one step of each plan follow each other, and the least of a plan's steps counts, as it does for the step of
the whole model: on a machine with other work, that is what tells something. Where the load is several times the cores,
take a lower rate, so that the link takes more of a step than compute does.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

import msgspec
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from sennit.capture import capture
from sennit.cluster import Basis, Cluster, Figure
from sennit.cluster.measure_torch import measure_laptop
from sennit.cluster.probe import Probe, cluster_of_probe
from sennit.cluster.probe_torch import probe_ranks
from sennit.demo.gpt import GPT, GPTConfig, random_batch
from sennit.ir.graph import Graph
from sennit.ir.mesh import Mesh
from sennit.ir.program import Program
from sennit.plan import data_parallel, lower, pipeline, propagate, tensor_parallel
from sennit.run.distributed import ProcessCommunicator
from sennit.run.emit import emit_lane
from sennit.run.groups import ProcessGroups, groups_needed
from sennit.run.load import load_source
from sennit.run.pieces import inputs_of
from sennit.run.rank import Rank, seat_of
from sennit.sim import Straggler, exposed_parts, simulate, simulate_fully

HOSTS = 2
CONFIG = GPTConfig(vocabulary=512, context=64, width=128, heads=8, layers=2)
BATCH = 32
PROBED = (8, 64 << 10, 1 << 20, 4 << 20)


def graph_of() -> Graph:
    torch.manual_seed(0)
    return capture(GPT(CONFIG), random_batch(CONFIG, BATCH), name="GPT")


def programs(ranks: int) -> dict[str, Program]:
    """Plans of one model over the ranks, those of a host next to each other."""
    graph = graph_of()
    layers = tuple(f"blocks.{number}" for number in range(CONFIG.layers))
    names = {"qkv": "*.qkv", "column": "*.up", "row": "*.proj|*.down"}
    half = ranks // 2
    plans = {
        f"data parallel, dp={ranks}": data_parallel(graph, Mesh.parse(f"dp={ranks}")),
        f"tensor parallel, tp={ranks}": tensor_parallel(graph, Mesh.parse(f"dp=1,tp={ranks}"), **names),
        f"pipeline, pp=2,dp={half};mb=2": pipeline(graph, Mesh.parse(f"pp=2,dp={half};mb=2"), layers=layers),
        f"pipeline, pp=2,dp={half};mb=4": pipeline(graph, Mesh.parse(f"pp=2,dp={half};mb=4"), layers=layers),
    }
    if half > 1:
        plans[f"both, dp=2,tp={half}"] = tensor_parallel(graph, Mesh.parse(f"dp=2,tp={half}"), **names)
    return {name: lower(propagate(plan)) for name, plan in plans.items()}


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = GPT(CONFIG), random_batch(CONFIG, BATCH)
    parameters = {path: parameter.detach() for path, parameter in model.named_parameters()}
    return {**parameters, "tokens": batch[0], "targets": batch[1], "tangent": torch.ones(())}


# ---- on a rank -------------------------------------------------------------------------------------------------------


def rank_main(folder: Path, host: int, repeats: int) -> None:
    """Probe, then rounds of one step of each plan and one of the whole model: what disturbs the machine for a while
    disturbs all of them. Rank 0 writes the answer.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # messages that are large against the token bucket of the link
    probe = probe_ranks(sizes=PROBED, repeats=7, host=f"host {host}")
    alone = serial_step()
    steps = {path.stem: plan_step(path, folder / "state.pt") for path in sorted(folder.glob("*.program"))}
    seconds: dict[str, list[float]] = {name: [] for name in ("alone", *steps)}
    for _ in range(repeats + 1):
        for name, step in (("alone", alone), *steps.items()):
            dist.barrier()
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    slowest = torch.tensor([row[1:] for row in seconds.values()], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        answer = {
            "probe": msgspec.to_builtins(probe),
            "steps": dict(zip(seconds, slowest.tolist(), strict=True)),
        }
        (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    dist.destroy_process_group()


def plan_step(path: Path, state: Path) -> Callable[[], object]:
    """A step of the program, ready to run on this rank."""
    rank = dist.get_rank()
    program = Program.parse(path.read_text(encoding="utf-8"))
    lane = program.lane_of(rank)
    step = load_source(emit_lane(program, lane), f"{program.name} {lane.name}")
    groups = ProcessGroups()
    groups.make_for(groups_needed(program))
    communicator = ProcessCommunicator(groups)
    handle = Rank(seat_of(program, lane, rank), communicator)
    inputs = inputs_of(lane, rank, torch.load(state))

    def call() -> None:
        with torch.no_grad():
            step(handle, inputs)
            communicator.finish()

    return call


def serial_step() -> Callable[[], object]:
    """A step of the whole model, which every rank does at the same time and for itself."""
    torch.manual_seed(0)
    model, batch = GPT(CONFIG), random_batch(CONFIG, BATCH)

    def call() -> None:
        with sdpa_kernel(SDPBackend.MATH):  # the form of attention that is captured
            model(*batch).backward()
        model.zero_grad()

    return call


# ---- here ------------------------------------------------------------------------------------------------------------


def on_hosts(folder: Path, rate: str, burst: str, per_host: int, repeats: int) -> Mapping[str, object]:
    from sennit.testing import network

    with network(hosts=HOSTS, rate=rate, burst=burst) as net:
        running = []
        for host in range(HOSTS):
            for local in range(per_host):
                env = {
                    "RANK": str(host * per_host + local),
                    "WORLD_SIZE": str(HOSTS * per_host),
                    "MASTER_PORT": "29511",
                }
                command = [
                    sys.executable,
                    __file__,
                    "--on-rank",
                    str(folder),
                    "--host",
                    str(host),
                    "--repeats",
                    str(repeats),
                ]
                running.append(net.run(host, command, env={**env, "PYTHONPATH": os.pathsep.join(sys.path)}))
        for process in running:
            if process.wait(timeout=500) != 0:
                raise SystemExit(f"a rank ended with status {process.returncode}")
    found: Mapping[str, object] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
    return found


def cluster_of(answer: Mapping[str, object], like: Cluster) -> Cluster:
    """The probed cluster; its two hosts share this machine's cores."""
    probe = msgspec.convert(answer["probe"], Probe)
    assert like.host is not None
    cores = Figure(
        like.host.cores.value / HOSTS, Basis.MEASURED, "the cores of this machine, shared by the hosts on it"
    )
    like = msgspec.structs.replace(like, host=msgspec.structs.replace(like.host, cores=cores))
    return cluster_of_probe(probe, like, "probed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="50mbit")
    parser.add_argument("--burst", default="32k", help="what the link lets through at once: small against messages")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--keep", type=Path, help="write what was measured, and the probed cluster, here")
    parser.add_argument("--on-rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--host", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank is not None:
        rank_main(options.on_rank, options.host, options.repeats)
        return
    ranks = HOSTS * options.ranks_per_host
    like = measure_laptop(ranks)
    found = programs(ranks)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(state(), folder / "state.pt")
        for number, program in enumerate(found.values()):
            (folder / f"{number}.program").write_text(str(program), encoding="utf-8")
        answer = on_hosts(folder, options.rate, options.burst, options.ranks_per_host, options.repeats)
    cluster = cluster_of(answer, like)
    if options.keep is not None:
        options.keep.write_text(json.dumps({**answer, "cluster": str(cluster)}, indent=1), encoding="utf-8")
    assert cluster.nic is not None
    print(f"{HOSTS} hosts of {options.ranks_per_host} on {os.cpu_count()} cores, link of {options.rate}", end=": ")
    print(f"probed {cluster.nic.bandwidth.value / 1e6:.1f} MB/s, {2e6 * cluster.nic.latency.value:.0f} us\n")
    serial = lower(propagate(data_parallel(graph_of(), Mesh.parse("dp=1"))))
    whole = simulate(serial, cluster).span
    steps = answer["steps"]
    assert isinstance(steps, dict)
    alone = min(steps["alone"])
    factor = alone / whole
    print(
        f"a step of the whole model on every rank: {alone * 1e3:.0f} ms measured, {whole * 1e3:.0f} ms simulated; compute x{factor:.2f}\n"
    )
    print("| plan | measured, ms | simulated, ms | off by | waits for |\n|---|---|---|---|---|")
    errors = []
    for number, (name, program) in enumerate(found.items()):
        timeline = simulate_fully(program, cluster, what_if=[Straggler(factor)]).timeline
        real = min(steps[str(number)])
        errors.append(timeline.span / real - 1)
        parts = exposed_parts(timeline, 0)
        why = f"{parts[0].stream}, {parts[0].seconds * 1e3:.0f} ms" if parts else "compute"
        print(f"| {name} | {real * 1e3:.0f} | {timeline.span * 1e3:.0f} | {errors[-1]:+.1%} | {why} |")
    print(f"\nmedian {median(map(abs, errors)):.1%} (target 10%), worst {max(errors, key=abs):+.1%}")


if __name__ == "__main__":
    main()
