"""Where clusters come from: a preset by name, a preset scaled (`dgx-h100:4`), or a file."""

from __future__ import annotations

import difflib
from importlib import resources
from pathlib import Path

from sennit.cluster.description import Cluster
from sennit.cluster.topology import Topology
from sennit.errors import ClusterError

__all__ = ["load", "presets"]


def presets() -> tuple[str, ...]:
    """The names of the presets, sorted."""
    folder = resources.files("sennit.cluster") / "presets"
    return tuple(sorted(item.name[: -len(".toml")] for item in folder.iterdir() if item.name.endswith(".toml")))


def load(spec: str) -> Cluster:
    """A preset (`laptop`), a scaled one (`dgx-h100:4` is four nodes, `laptop:4` four ranks), or a path to a `.toml`."""
    name, colon, count = spec.rpartition(":")
    if not colon:
        name, count = spec, ""
    elif not count.isdigit() or int(count) < 1:
        raise ClusterError(
            f"{count!r} is no count",
            where=f"cluster {spec!r}",
            fix=f"write {name}:N with N at least 1, or {name} alone",
        )
    cluster = _read(name, spec)
    scaled = cluster.scaled(int(count)) if count else cluster
    try:
        Topology.of(scaled)  # raises where a device cannot reach another
    except ClusterError as error:
        raise ClusterError(error.what, where=f"cluster {spec!r}, {error.where}", fix=error.fix) from None
    return scaled


def _read(name: str, spec: str) -> Cluster:
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ClusterError(
                f"there is no file {name!r}", where=f"cluster {spec!r}", fix="give the path of a cluster's .toml"
            )
        return Cluster.parse(path.read_text(encoding="utf-8"), where=name)
    known = presets()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ClusterError(
            f"unknown cluster {name!r}",
            where=f"cluster {spec!r}",
            fix=f"{hint}use one of {', '.join(known)}, each also as NAME:N, or the path of a .toml file",
        )
    text = (resources.files("sennit.cluster") / "presets" / f"{name}.toml").read_text(encoding="utf-8")
    return Cluster.parse(text, where=f"preset {name}.toml")
