"""Every way in which the rules allow the operators of each family to be split, executed on pieces and compared with the
whole.

python benchmarks/plan/ways.py bert llama
"""

from __future__ import annotations

import sys
import time
import warnings

import torch

from sennit.capture import capture_call
from sennit.testing.eager_torch import Float64
from sennit.testing.families_torch import families
from sennit.testing.rule_ways import failures


def main() -> int:
    warnings.simplefilter("ignore")  # those of the libraries that the models come from
    torch.set_num_threads(1)
    total = wrong = 0
    for name in sys.argv[1:] or list(families()):
        family = families()[name]
        sample = family.build(family.layers)
        with Float64():
            graph = capture_call(sample.model.train(), (), sample.kwargs, training=True).graph
        started = time.perf_counter()
        tried, found = failures(graph)
        total, wrong = total + tried, wrong + len(found)
        print(
            f"{name}: {len(graph.ops)} operators, {tried} ways, {len(found)} wrong, {time.perf_counter() - started:.1f} s",
            flush=True,
        )
        for line in found:
            print(f"  {line}")
    print(f"{total} ways, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
