from __future__ import annotations

import dataclasses
import sys

import pytest

from sennit import doctor
from sennit.doctor import MachineFacts, Status, TorchFacts, examine, gather, judge

EVERYTHING = MachineFacts(
    python=(3, 12, 1),
    system="Linux x86_64",
    torch=TorchFacts("2.13.0+cu130", gloo=True, nccl=True, gpus=("NVIDIA H200",)),
    torch_error="",
    jax="0.10.2",
    jax_error="",
    compiler="/usr/bin/cc",
    ip="/usr/sbin/ip",
    tc="/usr/sbin/tc",
    may_make_networks=True,
    chromium="/usr/bin/chromium",
    cores=8,
    memory=32 * 2**30,
)
TORCH = EVERYTHING.torch
assert TORCH is not None


def test_a_machine_with_everything_is_ready_and_costs_nothing() -> None:
    diagnosis = judge(EVERYTHING)
    assert diagnosis.ready
    assert {finding.status for finding in diagnosis.findings} == {Status.PRESENT}
    assert not any(finding.cost for finding in diagnosis.findings)


@pytest.mark.parametrize(
    ("part", "change", "status", "ready"),
    [
        ("Python", {"python": (3, 10, 4)}, Status.MISSING, False),
        ("PyTorch", {"torch": None, "torch_error": "No module named 'torch'"}, Status.MISSING, False),
        ("PyTorch", {"torch": dataclasses.replace(TORCH, version="2.10.1")}, Status.CAUTION, True),
        ("PyTorch", {"torch": dataclasses.replace(TORCH, version="2.16.0a0+git")}, Status.CAUTION, True),
        ("PyTorch", {"torch": dataclasses.replace(TORCH, version="3.0.0")}, Status.CAUTION, True),
        ("gloo", {"torch": dataclasses.replace(TORCH, gloo=False)}, Status.MISSING, False),
        ("NCCL", {"torch": dataclasses.replace(TORCH, nccl=False)}, Status.MISSING, True),
        ("GPU", {"torch": dataclasses.replace(TORCH, gpus=())}, Status.MISSING, True),
        ("JAX", {"jax": None, "jax_error": "No module named 'jax'"}, Status.MISSING, True),
        ("C compiler", {"compiler": None}, Status.MISSING, True),
        ("Test networks", {"tc": None}, Status.MISSING, True),
        ("Test networks", {"may_make_networks": False}, Status.MISSING, True),
        ("Chromium", {"chromium": None}, Status.MISSING, True),
        ("Machine", {"cores": 1}, Status.CAUTION, True),
    ],
)
def test_each_lack_is_found_alone_with_what_it_costs(
    part: str, change: dict[str, object], status: Status, ready: bool
) -> None:
    diagnosis = judge(dataclasses.replace(EVERYTHING, **change))  # type: ignore[arg-type]
    found = {finding.part: finding for finding in diagnosis.findings}
    assert found[part].status is status
    assert found[part].cost
    assert diagnosis.ready is ready
    assert all(finding.status is Status.PRESENT for name, finding in found.items() if name != part)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1", "2.13.0+cpu"])
def test_the_ends_of_the_torch_range_belong_to_it(version: str) -> None:
    facts = dataclasses.replace(EVERYTHING, torch=dataclasses.replace(TORCH, version=version))
    assert {finding.status for finding in judge(facts).findings} == {Status.PRESENT}


def test_a_library_that_fails_at_import_is_a_finding_with_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TORCH_PROBE", "raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setattr(doctor, "_JAX_PROBE", "import os; os.abort()")
    diagnosis = examine()
    found = {finding.part: finding for finding in diagnosis.findings}
    assert "libcudart.so.13" in found["PyTorch"].detail
    assert found["JAX"].status is Status.MISSING
    assert not diagnosis.ready


def test_the_facts_of_this_machine() -> None:
    facts = gather()
    assert facts.python == sys.version_info[:3]
    assert facts.torch is not None, facts.torch_error
    assert facts.torch.gloo
    assert facts.cores >= 1
    assert facts.memory > 2**20
