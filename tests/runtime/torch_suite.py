"""Torch's own tests of c10d backends, on sennit or on gloo: `DistributedTest` of torch's `distributed_test.py`.

    python tests/runtime/torch_suite.py --backend sennit [--ranks 3] [--jobs 2] [--moved] [NAME ...]

prints a line of JSON for each test: its name, its outcome, and why. `test_torch_suite.py` runs what is quick of it,
`benchmarks/collective/torch_suite.py` all of it, on both backends.

What is as in torch: each test has new processes and a new group, and its own folder. What is not:

| here | why |
|---|---|
| processes are forked from one that has loaded torch | torch starts each of them anew, which takes longer than most tests |
| tests that torch allows to gloo alone, or to MPI alone, run | their decorators ask for a name, and are told gloo's; those for MPI (`_MPI_ONLY`) are left out |
| the limits on the number of ranks that torch sets for all but MPI are off | they are about GPUs |
| a test fails if its processes end in different ways | torch looks at the first alone |
| barriers of the tests wait for a minute | on a busy machine 10 seconds are few |
| with `--moved`, the tests of GPUs run in place of the others, on the CPU: `torch_suite_moved.py` | most of DDP is tested on GPUs alone |
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch_suite_moved import Moved, asks_for_gpu, move, only_on_gpus

__all__ = ["DIFFERENCES", "FOR_FOUR_RANKS"]

# What passes on gloo and not on sennit.
_REFUSED = "torch refuses dist.monitored_barrier, by name, on every backend but gloo"
_WORDS = "asks for the words of gloo's error; here it is `ranks 1, 2 did not come within 0 s in barrier`"
_PROFILED = "asks that each all-reduce ends on another thread than it began on; here who waits for one may run it"
DIFFERENCES = {
    "test_monitored_barrier_failure_order": _REFUSED,
    "test_monitored_barrier_gloo": _REFUSED,
    "test_monitored_barrier_gloo_rank_0_timeout": _WORDS,
    "test_monitored_barrier_gloo_subgroup": _REFUSED,
    "test_monitored_barrier_wait_all_ranks": _REFUSED,
    "test_ddp_profiling_torch_profiler": _PROFILED,  # it passes now and then
}
FOR_FOUR_RANKS = (
    "test_3_level_hierarchical_model_averager",
    "test_gather_object",
    "test_gather_object_subgroup",
    "test_new_subgroups_by_enumeration_input_rank_exceeds_world_size",
    "test_new_subgroups_overlap_not_allowed",
    "test_new_subgroups_with_group_param",
    "test_new_subgroups_world_size_not_divisible_by_group_size",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd",
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd_grad_is_view",
)
_TOO_LARGE = ("test_ddp_uneven_inputs",)  # of a large model: on two cores it takes more than six minutes

_MPI_ONLY = ("Only MPI supports all_to_all", "Only MPI supports CPU all_to_all_single")
_ASKS_FOR_GLOO = "test_accumulate_gradients_no_sync"  # these ask in their bodies whether the backend is gloo
_END_OF_OUTPUT = 2000
_LIMIT = "100"  # seconds for a test


def load_suite(backend: str, ranks: int, moved: bool) -> type[unittest.TestCase]:
    """Torch's tests, whose decorators read the environment when they are loaded, and see gloo there."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(ranks),
        TEMP_DIR=tempfile.gettempdir(),  # each test has its own
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=_LIMIT,
    )
    torch.set_num_threads(1)
    from torch.testing._internal import common_distributed, common_utils

    common: Any = common_utils
    skip_if = common.skip_but_pass_in_sandcastle_if
    common.skip_but_pass_in_sandcastle_if = lambda skip, reason: skip_if(skip and reason not in _MPI_ONLY, reason)

    context: Callable[[], Any] = nullcontext
    if moved:
        move(common_distributed, ranks)
        context = Moved
    from torch.testing._internal.distributed import distributed_test as torchs

    import sennit.backend
    from sennit.collective.runtime import group_torch  # noqa: F401  # once, and not in each process

    sennit.backend.register()
    os.environ["BACKEND"] = "mpi"  # asked by the limits on ranks, in the tests themselves
    return _suite(torchs, backend, context)


def _suite(torchs: Any, backend: str, context: Callable[[], Any]) -> type[unittest.TestCase]:
    start = multiprocessing.get_context("fork").Process

    class Suite(torchs.TestDistBackend, torchs.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            torchs.INIT_METHOD = os.environ["INIT_METHOD"]  # a process that was not forked would read it
            torchs.BACKEND = backend
            self._start_processes(start)

        def run_test(self, name: str, pipe: Any) -> None:
            """In the process of a rank, which has its group."""
            if name.startswith(_ASKS_FOR_GLOO):
                torchs.BACKEND = "gloo"
            with context():
                super().run_test(name, pipe)

        def _barrier(self, *given: Any, **named: Any) -> None:
            super()._barrier(*given, **{"timeout": 60, **named})

        def _check_return_codes(self, test: Any, seconds: float) -> None:
            codes = [process.exitcode for process in self.processes]
            super()._check_return_codes(test, seconds)
            if test not in self.skip_return_code_checks:
                assert len(set(codes)) == 1, f"the processes ended with {codes}"

    return Suite


def run_one(suite: type[unittest.TestCase], name: str) -> dict[str, str]:
    """In a process of the pool."""
    result = unittest.TestResult()
    with _output() as read:
        suite(name).run(result)
        said = read()
    if result.skipped:
        return {"test": name, "outcome": "skipped", "why": result.skipped[0][1]}
    wrong = result.errors + result.failures
    if wrong:
        if on_gpus := only_on_gpus(wrong[0][1]):
            return {"test": name, "outcome": "skipped", "why": on_gpus}
        return {"test": name, "outcome": "failed", "why": f"{wrong[0][1]}\n{said[-_END_OF_OUTPUT:]}"}
    return {"test": name, "outcome": "passed", "why": ""}


@contextmanager
def _output() -> Iterator[Callable[[], str]]:
    """What the processes of a test print, C++ included."""
    kept = [os.dup(stream) for stream in (1, 2)]
    with tempfile.TemporaryFile() as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)

        def read() -> str:
            sys.stdout.flush()
            sys.stderr.flush()
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield read
        finally:
            for stream, copy in zip((1, 2), kept, strict=True):
                os.dup2(copy, stream)
                os.close(copy)


def run_all(suite: type[unittest.TestCase], names: Sequence[str], jobs: int) -> Iterator[dict[str, str]]:
    """Each in the first of so many processes that is free; they are forked, since a suite cannot be sent."""
    context = multiprocessing.get_context("fork")
    following, found = context.Value("i", 0), context.SimpleQueue()

    def work() -> None:
        while True:
            with following:
                number = following.value
                following.value += 1
            if number >= len(names):
                return
            found.put(run_one(suite, names[number]))

    workers = [context.Process(target=work) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    for _ in names:
        yield found.get()
    for worker in workers:
        worker.join()


def main() -> None:
    parser = argparse.ArgumentParser(description="Run torch's tests of c10d backends.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="tests; all if none is given")
    parser.add_argument("--backend", choices=("sennit", "gloo"), default="sennit")
    parser.add_argument("--ranks", type=int, default=3, help="processes of each test")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--moved", action="store_true", help="the tests of GPUs alone, on the CPU")
    arguments = parser.parse_args()
    suite = load_suite(arguments.backend, arguments.ranks, arguments.moved)
    names = arguments.names or unittest.TestLoader().getTestCaseNames(suite)
    if arguments.moved and not arguments.names:
        names = [name for name in names if name not in _TOO_LARGE and asks_for_gpu(getattr(suite, name))]
    for found in run_all(suite, names, arguments.jobs):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
