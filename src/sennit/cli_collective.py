"""The commands of `sennit collective ...`: their options. `cli_collective_run.py` runs them.

They follow the rules of `cli.py`: a frozen dataclass each, read by tyro.

A SCHEDULE argument is a name of the library, or a file: the text of a schedule, or MSCCL XML. Both are verified on
reading.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from sennit.cli_collective_runtime import Run, Tune

__all__ = ["Action", "Collective", "Compile", "Export", "List", "Run", "Simulate", "Synthesize", "Tune", "Verify"]

Json = Annotated[bool, tyro.conf.arg(help="Print the result as one JSON document; docs/commands.md gives its schema.")]
Debug = Annotated[bool, tyro.conf.arg(help="Show the traceback of an error. SENNIT_DEBUG=1 does the same.")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Number = Annotated[int, tyro.conf.arg(metavar="N")]
Count = Annotated[int | None, tyro.conf.arg(metavar="N")]
ProtocolName = Literal["Simple", "LL", "LL128"]


@dataclass(frozen=True, slots=True)
class Compile:
    """Build an algorithm of the library, compile it to a schedule and verify it.

    Example: sennit collective compile ring_all_reduce --ranks 8 --out ring.txt --svg ring.svg
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """An algorithm that `sennit collective list` names."""
    ranks: Number
    """How many ranks."""
    per_node: Count = None
    """Ranks of a node, for algorithms that know nodes."""
    channels: Number = 1
    """Rings or trees side by side, each with its part of the data."""
    instances: Number = 1
    """Copies of the algorithm side by side, each with its part of every chunk."""
    pieces: Number = 1
    """Chunks that a pipelined algorithm cuts its data into."""
    one_sided: bool = False
    """Compile to a one-sided program of puts, reads and signals instead of a schedule of messages."""
    out: File = None
    """Write the schedule's text here and print a summary; without it the text is printed."""
    svg: File = None
    """Also draw the chunk flow."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Verify:
    """Prove a schedule right: its result, no race, no deadlock, for any timing and any number of tiles.

    Example: sennit collective verify ring.xml
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The text of a schedule, or MSCCL XML; - reads stdin."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Synthesize:
    """Make an algorithm for a cluster's links, with a certificate: its rate beside what no algorithm exceeds.

    Example: sennit collective synthesize --cluster dgx-a100:2 --collective all_gather --out gather.txt
    """

    cluster: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """A preset, as dgx-a100 or dgx-a100:2 for two nodes, or a TOML file."""
    collective: Literal["all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all"]
    """What to do."""
    trees: Count = None
    """At most this many trees a root: fewer chunks, where the optimum needs many."""
    out: File = None
    """Write the compiled schedule's text here."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Simulate:
    """Time a schedule on a cluster, chunk by chunk, beside what NCCL would take.

    Example: sennit collective simulate hierarchical_all_reduce --cluster ndv4:2 --bytes 1M --instances 4
    """

    schedule: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SCHEDULE")]
    """A name of the library, built for the cluster's devices, or a file with a schedule's text or MSCCL XML."""
    cluster: Annotated[str, tyro.conf.arg(metavar="NAME")]
    """A preset, as ndv4 or ndv4:2 for two nodes, or a TOML file."""
    bytes: Annotated[str, tyro.conf.arg(metavar="SIZE")]
    """Of the larger of a rank's input and output, as nccl-tests counts: 64K, 1M, 1G, or a number."""
    protocol: ProtocolName | None = None
    """NCCL's protocol; without it the fastest is taken."""
    instances: Number = 1
    """Copies of the schedule side by side, each with its part of every chunk."""
    trace: File = None
    """Also write the timeline as a trace for ui.perfetto.dev (gzipped JSON)."""
    svg: File = None
    """Also draw the chunk flow."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class Export:
    """Write a schedule in the form of an executor, checked against the executor's limits.

    Example: sennit collective export ring.txt --to msccl-xml --protocol LL128 --max-bytes 1M --out ring.xml
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """The text of a schedule, or MSCCL XML; - reads stdin."""
    to: Literal["msccl-xml", "mscclpp-json"]
    """MSCCL XML (microsoft/msccl, msccl-executor-nccl) or an execution plan of mscclpp."""
    protocol: ProtocolName = "Simple"
    """Of the XML."""
    min_bytes: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "0"
    """The executor uses it from this size on."""
    max_bytes: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "0"
    """The executor uses it up to this size; 0 is no limit."""
    ranks_per_node: Count = None
    """Of the plan: ranks of different nodes talk over port channels."""
    out: File = None
    """Write it here; without it it is printed."""
    json: Json = False
    debug: Debug = False


@dataclass(frozen=True, slots=True)
class List:
    """The algorithms of the library.

    Example: sennit collective list
    """

    json: Json = False
    debug: Debug = False


Action = Compile | Verify | Synthesize | Simulate | Run | Tune | Export | List


@dataclass(frozen=True, slots=True)
class Collective:
    """Build, verify, synthesise, simulate, run, tune, draw and export collective algorithms.

    Example: sennit collective compile ring_all_reduce --ranks 8
    """

    action: Action
