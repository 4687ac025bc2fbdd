"""The text form of a cluster: TOML, read strictly and printed so that it reads back to the same value.

msgspec checks the types and refuses unknown fields; its message is put into our words, with the file and the remedy.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from enum import Enum
from typing import Any

import msgspec

from sennit.cluster.description import Cluster, Device, Fabric, Figure, Host, Link, Matmul, Nic, Peak, Protocol, Variant
from sennit.errors import ClusterError

__all__ = ["parse_cluster", "print_cluster"]


def parse_cluster(text: str, where: str) -> Cluster:
    """Read a description; `where` names the file in messages."""
    try:
        return msgspec.toml.decode(text, type=Cluster)
    except ClusterError as error:
        place = f"{where}, {error.where}" if error.where else where
        raise ClusterError(error.what, where=place, fix=error.fix) from None
    except msgspec.ValidationError as error:
        raise _explain(str(error), where) from None
    except (msgspec.DecodeError, tomllib.TOMLDecodeError) as error:
        raise ClusterError(f"the text is not TOML: {error}", where=where, fix="see docs/cluster.md") from None


def _explain(message: str, where: str) -> ClusterError:
    place = match.group(1) if (match := re.search(r"at `\$\.?([^`]*)`", message)) else ""
    table = place or "the top level"
    if unknown := re.search(r"unknown field `([^`]*)`", message):
        name = unknown.group(1)
        fields = _fields(place)
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return ClusterError(
            f"unknown field {name!r} in {table}", where=where, fix=f"{hint}the fields here are {', '.join(fields)}"
        )
    if missing := re.search(r"missing required field `([^`]*)`", message):
        name = missing.group(1)
        if (place, name) == ("device", "memory"):
            return ClusterError(
                "the device has no memory", where=f"{where}, [device]", fix="give memory, the bytes it holds: 80e9"
            )
        return ClusterError(f"field {name!r} is missing in {table}", where=where, fix=f"add {name} to {table}")
    return ClusterError(f"{message.split(' - at')[0]} in {table}", where=where, fix="see docs/cluster.md")


def _fields(place: str) -> list[str]:
    """The fields of the table at a msgspec path such as `link[...].protocols[...]`."""
    tables: dict[str, type[msgspec.Struct]] = {
        "": Cluster,
        "device": Device,
        "peak": Peak,
        "matmul": Matmul,
        "link": Link,
        "nic": Nic,
        "fabric": Fabric,
        "host": Host,
        "protocols": Protocol,
        "variant": Variant,
    }
    last = re.sub(r"\[[^]]*\]", "", place).split(".")[-1]
    return list(tables.get(last, Figure).__struct_fields__)


def print_cluster(cluster: Cluster) -> str:
    lines: list[str] = []
    _print_table(lines, "", cluster)
    return "\n".join(lines).strip() + "\n"


def _print_table(lines: list[str], path: str, table: msgspec.Struct) -> None:
    """Plain fields first, then sub-tables, as TOML wants them."""
    later: list[tuple[str, Any]] = []
    for name in table.__struct_fields__:
        value = getattr(table, name)
        if value is None or value == ():
            continue
        is_table = isinstance(value, msgspec.Struct) and not isinstance(value, Figure)
        is_array = isinstance(value, tuple) and isinstance(value[0], msgspec.Struct)
        if is_table or is_array:
            later.append((name, value))
        else:
            lines.append(f"{name} = {_print_value(value)}")
    for name, value in later:
        full = f"{path}.{name}" if path else name
        if isinstance(value, tuple):
            for item in value:
                lines += ["", f"[[{full}]]"]
                _print_table(lines, full, item)
        else:
            lines += ["", f"[{full}]"]
            _print_table(lines, full, value)


def _print_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # a JSON string without escapes of non-ASCII text is a TOML basic string
            return msgspec.json.encode(value).decode()
        case Enum():
            return _print_value(value.value)
        case Figure():
            parts = ", ".join(f"{name} = {_print_value(getattr(value, name))}" for name in value.__struct_fields__)
            return f"{{ {parts} }}"
        case tuple():
            return "[" + ", ".join(map(_print_value, value)) + "]"
        case _:
            raise AssertionError(f"no TOML for {value!r}")
