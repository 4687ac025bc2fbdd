"""The command `sennit profile`: what a model's kernels and the process group's collectives take on the device at hand,
into a database on disk.

It follows the rules of `cli.py`. Under torchrun every rank measures collectives together, and the first one kernels
too, prints and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sennit.cli_model import load_model
from sennit.errors import RunError

if TYPE_CHECKING:
    from sennit.cost.database import Database, MeasuredChannel, Place

__all__ = ["Profile", "ProfileResult", "run_profile"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Profile:
    """Measure a model's operators, fused groups and collectives on this machine, into a database that `sennit fuse`
    reads.

    Example: sennit profile gpt:layers=2 --out profile.json; torchrun --nproc-per-node 2 --no-python sennit profile gpt
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A name (gpt, gpt2, bert-base, vgg19, ...), with sizes as gpt2:layers=2,batch=8; module:function or
    file.py:function.
    """
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("sennit-profile.json")
    """The database. What it holds already stays; what is measured again is replaced."""
    device: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """cpu, cuda or cuda:N; the first GPU where there is one."""
    rounds: Annotated[int, tyro.conf.arg(metavar="N")] = 7
    """How often each kernel is timed."""
    compiled: bool = False
    """Also compile groups of fused operators with Inductor, and measure them; takes about a second each."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class KernelTime:
    operators: tuple[str, ...]
    seconds: float
    compiled: bool


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """`channel` is null where one process runs alone; `slowest` are the kernels that take the longest, once each."""

    schema: str
    origin: str
    model: str
    device: str
    torch: str
    threads: int
    operators: int
    structures: int
    new_structures: int
    channel: MeasuredChannel | None
    slowest: tuple[KernelTime, ...]
    database: str


def run_profile(
    command: Profile,
    print_json: Callable[[object], None],
    progress: Callable[[bool], AbstractContextManager[Progress]],
) -> int:
    from sennit.cost.database import load_database
    from sennit.fuse.profile_command_torch import measured_here

    if command.rounds < 2:
        raise RunError(f"{command.rounds} rounds have no quantiles", where="--rounds", fix="time at least twice")
    before = load_database(command.out, missing_is_empty=True)
    with progress(not command.json) as say:
        say(f"making {command.model}")
        model, sample = load_model(command.model)
        found = measured_here(
            model, sample.args, dict(sample.kwargs), command.device, command.rounds, compiled=command.compiled, say=say
        )
        if found is None:  # another rank than the first
            return 0
        database = before.with_kernels(found.place, found.kernels)
        if found.channel is not None:
            database = database.with_channel(found.place, found.channel)
        try:
            database.save(command.out)
        except OSError as error:
            raise RunError(
                f"cannot write {command.out}: {error.strerror}", fix="name a file that you may write"
            ) from error
    result = _result(command, before, database, found.place, found.operators, found.channel)
    if command.json:
        print_json(result)
    else:
        _print(result)
    return 0


def _result(
    command: Profile,
    before: Database,
    database: Database,
    place: Place,
    operators: int,
    channel: MeasuredChannel | None,
) -> ProfileResult:
    kernels = database.records(place).kernels
    known = {(item.signature, item.strides, item.compiled) for item in before.records(place).kernels}
    slowest = sorted(kernels, key=lambda item: -item.seconds)[:8]
    return ProfileResult(
        schema="sennit.profiled/1",
        origin="measured",
        model=command.model,
        device=place.device,
        torch=place.torch,
        threads=place.threads,
        operators=operators,
        structures=len(kernels),
        new_structures=sum((item.signature, item.strides, item.compiled) not in known for item in kernels),
        channel=channel,
        slowest=tuple(KernelTime(_operators(item.signature), item.seconds, item.compiled) for item in slowest),
        database=str(command.out),
    )


def _operators(signature: str) -> tuple[str, ...]:
    """The kinds in a signature: what stands between the results and the arguments."""
    calls = [line.split("=", 1)[1] for line in signature.splitlines() if "=" in line.split(":", 1)[0]]
    return tuple(call.split("(", 1)[0] for call in calls)


def _print(result: ProfileResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from sennit.report import units

    print(f"measured: {result.model}, {result.operators} operators, on {result.device}, torch {result.torch}")
    print(
        f"  {result.structures} kernels of different structure in {result.database}, {result.new_structures} of them new"
    )
    table = Table("kernel", "seconds", title="the longest, measured")
    for item in result.slowest:
        names = ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in item.operators[:4])
        more = f" and {len(item.operators) - 4} more" if len(item.operators) > 4 else ""
        table.add_row(f"{names}{more}{' (compiled)' if item.compiled else ''}", units.seconds(item.seconds))
    Console().print(table)
    if result.channel is None:
        print("  collectives: not measured, one process runs alone; start it with torchrun to measure them")
    else:
        channel = result.channel
        print(
            f"  all-reduce over {channel.group}: {units.seconds(channel.latency)} + {channel.per_byte * 1e9:.3f} ns a byte, "
            f"{units.seconds(channel.queued)} more behind another, {units.seconds(channel.issued)} of computing to send one off"
        )
