"""What this machine has of what sennit can use, and what each missing part costs.

    examine() = judge(gather())

`gather` looks at the machine and returns frozen facts; `judge` is a pure function from facts to findings, so that every
combination can be tested on any machine. Torch and JAX are probed in child processes: a broken installation (a missing
shared library, a crash at import) is then a finding and not the end of the doctor, and this module imports neither.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

__all__ = ["Diagnosis", "Finding", "MachineFacts", "Probe", "Status", "TorchFacts", "examine", "gather", "judge"]

PYTHON_LEAST = (3, 11)
TORCH_LEAST, TORCH_MOST, TORCH_IN_CI = (2, 11), (2, 13), "2.13"

_TORCH_PROBE = """
import json, torch, torch.distributed as dist
there = dist.is_available()
gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "gloo": there and dist.is_gloo_available(),
                  "nccl": there and dist.is_nccl_available(), "gpus": gpus}))
"""
_JAX_PROBE = "import json, jax; print(json.dumps(jax.__version__))"
# capability numbers of linux/capability.h: making a network namespace needs the second, shaping its links the first
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21


class Status(Enum):
    PRESENT = "present"
    CAUTION = "caution"
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class TorchFacts:
    version: str
    gloo: bool
    nccl: bool
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """What a child process printed, or why it printed nothing."""

    output: str | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What was found, unjudged. A path is None where nothing was found; `torch_error` and `jax_error` say why."""

    python: tuple[int, int, int]
    system: str
    torch: TorchFacts | None
    torch_error: str
    jax: str | None
    jax_error: str
    compiler: str | None
    ip: str | None
    tc: str | None
    may_make_networks: bool
    chromium: str | None
    cores: int
    memory: int


@dataclass(frozen=True, slots=True)
class Finding:
    """One part. `cost` says what is lost where the part is not present, else it is empty."""

    part: str
    status: Status
    detail: str
    cost: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]

    @property
    def ready(self) -> bool:
        """Whether everything that sennit cannot do without is there."""
        return not any(finding.required and finding.status is Status.MISSING for finding in self.findings)


def examine() -> Diagnosis:
    return judge(gather())


# ---- facts -----------------------------------------------------------------------------------------------------------


def gather() -> MachineFacts:
    """Look at this machine. Starts both probes at once: each takes about as long as importing its library."""
    children = [_start(_TORCH_PROBE), _start(_JAX_PROBE)]
    torch, jax = (_finish(child) for child in children)
    return MachineFacts(
        python=sys.version_info[:3],
        system=f"{platform.system()} {platform.machine()}",
        torch=None if torch.output is None else msgspec.json.decode(torch.output, type=TorchFacts),
        torch_error=torch.error,
        jax=None if jax.output is None else msgspec.json.decode(jax.output, type=str),
        jax_error=jax.error,
        compiler=_first_program("cc", "gcc", "clang"),
        ip=_first_program("ip"),
        tc=_first_program("tc"),
        may_make_networks=_may_make_networks(),
        chromium=_first_program("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"),
        cores=_cores(),
        memory=_memory(),
    )


def _start(script: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def _finish(child: subprocess.Popen[str], patience: float = 60.0) -> Probe:
    try:
        output, errors = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return Probe(None, f"importing it took longer than {patience:.0f} s")
    if child.returncode == 0:
        return Probe(output)
    lines = errors.strip().splitlines()
    return Probe(None, lines[-1] if lines else f"importing it ended with status {child.returncode}")


def _first_program(*names: str) -> str | None:
    """The first of these programs that is found; the folders of the administrator's tools are often not on the path."""
    found = (shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin") for name in names)
    return next((path for path in found if path is not None), None)


def _may_make_networks() -> bool:
    """Root in a container often lacks these capabilities, so the user id alone does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return False
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            effective = int(line.split()[1], 16)
            return all(effective >> bit & 1 for bit in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN))
    return False


def _cores() -> int:
    """The cores that this process may use, which may be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> int:
    """Bytes that this process may use: the machine's, or the limit of its control group where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


# ---- judgement -------------------------------------------------------------------------------------------------------


def judge(facts: MachineFacts) -> Diagnosis:
    return Diagnosis(
        (
            _python(facts),
            *_torch(facts),
            _optional(
                "JAX",
                facts.jax,
                f"not importable: {facts.jax_error}",
                "layouts of JAX arrays cannot be converted; nothing else is lost",
            ),
            _optional(
                "C compiler",
                facts.compiler,
                "no cc, gcc or clang on the path",
                "optional C extensions are left out at install; Python versions serve",
            ),
            _networks(facts),
            _optional(
                "Chromium",
                facts.chromium,
                "not on the path",
                "tests that open the HTML report in a browser are skipped; the report is written all the same",
            ),
            _machine(facts),
        )
    )


def _python(facts: MachineFacts) -> Finding:
    version = f"{'.'.join(map(str, facts.python))} on {facts.system}"
    if facts.python[:2] >= PYTHON_LEAST:
        return Finding("Python", Status.PRESENT, version, required=True)
    least = ".".join(map(str, PYTHON_LEAST))
    return Finding("Python", Status.MISSING, version, f"sennit needs Python {least} or newer", required=True)


def _torch(facts: MachineFacts) -> Iterator[Finding]:
    """Torch, and what it was built with. Without it the parts that live in it are not listed as faults of their own."""
    if facts.torch is None:
        cost = "models cannot be captured and programs cannot be run; parsing, checking and simulating still work"
        yield Finding("PyTorch", Status.MISSING, f"not importable: {facts.torch_error}", cost, required=True)
        return
    least, most = (".".join(map(str, version)) for version in (TORCH_LEAST, TORCH_MOST))
    span = f"supported: {least} to {most}; CI runs {TORCH_IN_CI}"
    detail = f"{facts.torch.version} ({span})"
    if TORCH_LEAST <= _release(facts.torch.version) <= TORCH_MOST:
        yield Finding("PyTorch", Status.PRESENT, detail, required=True)
    else:
        yield Finding("PyTorch", Status.CAUTION, detail, "outside this range capture may fail", required=True)
    if facts.torch.gloo:
        yield Finding("gloo", Status.PRESENT, "built into this PyTorch", required=True)
    else:
        cost = "CPU ranks cannot communicate: `sennit demo` cannot run"
        yield Finding("gloo", Status.MISSING, "not built into this PyTorch", cost, required=True)
    yield _optional(
        "NCCL",
        "built into this PyTorch" if facts.torch.nccl else None,
        "not built into this PyTorch",
        "GPU ranks cannot communicate; CPU ranks use gloo",
    )
    yield _optional(
        "GPU",
        ", ".join(facts.torch.gpus) or None,
        "PyTorch sees none",
        "programs run on CPU ranks; times on GPUs are simulated, never measured",
    )


def _networks(facts: MachineFacts) -> Finding:
    lacking = [name for name, path in (("ip", facts.ip), ("tc", facts.tc)) if path is None]
    if not facts.may_make_networks:
        lacking.append("the right to make network namespaces (root)")
    return _optional(
        "Test networks",
        None if lacking else "ip, tc and the right to make network namespaces",
        "no " + ", no ".join(lacking),
        "tests on rate-limited links are skipped; iproute2 and root provide them",
    )


def _machine(facts: MachineFacts) -> Finding:
    detail = f"{facts.cores} cores, {facts.memory / 2**30:.1f} GiB of memory"
    if facts.cores >= 2:
        return Finding("Machine", Status.PRESENT, detail)
    return Finding("Machine", Status.CAUTION, detail, "ranks share one core: measured times say little")


def _optional(part: str, found: str | None, otherwise: str, cost: str) -> Finding:
    return Finding(part, Status.MISSING, otherwise, cost) if found is None else Finding(part, Status.PRESENT, found)


def _release(version: str) -> tuple[int, int]:
    """The first two numbers: `2.13.0+cpu` and `2.14.0a0` are releases (2, 13) and (2, 14)."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
