"""How long the search takes, and what it finds: models of 400 to 2,300 operators, simulated on described clusters,
beside DDP and the bounds.

    python benchmarks/fuse/search_time.py --models gpt2 bert-base rnnlm resnet50 --clusters h200x8 dgx-a100:4 --seconds 60

For each: operators, candidates looked at, seconds of the search alone, when it came within one percent of what it found
in the end, the step (simulated) under the best DDP of the sweep, compiled DDP, and the parts of the search, and the
step over the bound that no buckets can beat.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from sennit.capture import capture
from sennit.cli_model import load_model
from sennit.cluster import load
from sennit.fuse.channel import of_cluster
from sennit.fuse.compare import study
from sennit.fuse.costs_torch import choose_cost
from sennit.fuse.model import StepModel
from sennit.fuse.search import SearchOptions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert-base", "rnnlm", "resnet50"])
    parser.add_argument("--clusters", nargs="+", default=["h200x8", "dgx-a100:4"])
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args()
    for name in arguments.models:
        start = time.monotonic()
        model, sample = load_model(name, memory=False)
        graph = capture(model, sample.args, dict(sample.kwargs))
        print(f"{name}: {len(graph.ops)} operators, captured in {time.monotonic() - start:.0f} s", flush=True)
        for cluster_name in arguments.clusters:
            cluster = load(cluster_name)
            chosen = choose_cost(graph, cluster.device)
            channel = of_cluster(cluster, range(cluster.devices), update_per_byte=3.0 / cluster.device.bandwidth.value)
            steps = StepModel(graph, chosen.cost, channel)
            start, processor = time.monotonic(), time.process_time()
            found = study(steps, SearchOptions(seconds=arguments.seconds))
            spent, used = time.monotonic() - start, time.process_time() - processor
            report = found.found
            print(
                f"  {cluster_name}, {cluster.devices} devices: {spent:.0f} s ({used:.0f} s of CPU), {report.tried} candidates in the last search; "
                f"over the bound {found.best.seconds / report.structural:.3f}, over full overlap {found.best.seconds / report.full_overlap:.3f}"
            )
            shown = [found.fastest("DDP"), found.fastest("compiled DDP")]
            shown += [item for item in found.variants if not item.name.startswith(("DDP", "compiled"))]
            for item in shown:
                print(
                    f"    {item.name:24s} {1e3 * item.seconds:9.3f} ms  {found.best.seconds / item.seconds:5.2f}  (simulated)",
                    flush=True,
                )


if __name__ == "__main__":
    main()
