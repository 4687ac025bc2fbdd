"""The environment variables of sennit, read here and nowhere else.

    SENNIT_DEBUG      1, true, yes, on or 0, false, no, off: show the traceback of an error (default off)
    SENNIT_LOG        debug, info, warning, error or critical: what is logged to stderr (default warning)
    SENNIT_CACHE_DIR  an absolute path, `~` allowed: where measured profiles and certificates of operator rules are kept
                      (default: $XDG_CACHE_HOME/sennit, else ~/.cache/sennit)
    SENNIT_INTERFACE  the network interface by which the backend reaches other hosts, such as eth0
                      (default: the one that leads to the host of the rendezvous)
    SENNIT_THREADS    threads of a rank that move the bytes of a large collective between the ranks of a host
                      (default: its share of the cores, 4 at most)

Of other programs it reads LOCAL_WORLD_SIZE, by which torchrun says how many processes it has started on this host.

`read_environment` is a pure function of a mapping. The edges of the program (the command line, the pipeline) call
`current_environment` once and pass the values on; a pass never looks at the environment. A name with the prefix that is
not in this table is an error: a variable with a typing error would otherwise do nothing, in silence.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sennit.errors import EnvironmentVariableError

__all__ = ["Environment", "current_environment", "read_environment"]

_PREFIX = "SENNIT_"
_DEBUG, _LOG, _CACHE_DIR, _INTERFACE = "SENNIT_DEBUG", "SENNIT_LOG", "SENNIT_CACHE_DIR", "SENNIT_INTERFACE"
_THREADS, _LOCAL_RANKS = "SENNIT_THREADS", "LOCAL_WORLD_SIZE"
_KNOWN = (_DEBUG, _LOG, _CACHE_DIR, _INTERFACE, _THREADS)
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}


@dataclass(frozen=True, slots=True)
class Environment:
    """What the variables say. `log_level` is a level of the `logging` module."""

    debug: bool
    log_level: int
    cache_dir: Path
    interface: str | None = None
    threads: int | None = None
    local_ranks: int | None = None


def current_environment() -> Environment:
    """The environment of this process."""
    return read_environment(os.environ)


def read_environment(variables: Mapping[str, str]) -> Environment:
    for name in variables:
        if name.startswith(_PREFIX) and name not in _KNOWN:
            raise _unknown(name)
    return Environment(
        debug=_read_bool(variables, _DEBUG),
        log_level=_read_level(variables, _LOG),
        cache_dir=_read_cache_dir(variables),
        interface=variables.get(_INTERFACE, "").strip() or None,
        threads=_read_count(variables, _THREADS),
        local_ranks=_read_local_ranks(variables),
    )


def _unknown(name: str) -> EnvironmentVariableError:
    # compared without the prefix: it is common to all, so any name would seem near
    endings = [known.removeprefix(_PREFIX) for known in _KNOWN]
    near = difflib.get_close_matches(name.removeprefix(_PREFIX).upper(), endings, n=1)
    remedy = f"did you mean {_PREFIX}{near[0]}?" if near else f"unset it; the known ones are {', '.join(_KNOWN)}"
    return EnvironmentVariableError(f"unknown variable {name}", where="the environment", fix=remedy)


def _read_bool(variables: Mapping[str, str], name: str) -> bool:
    text = variables.get(name, "").strip().lower()
    if text in ("", *_FALSE):
        return False
    if text in _TRUE:
        return True
    raise _unreadable(name, variables[name], f"use one of {', '.join((*_TRUE, *_FALSE))}", (*_TRUE, *_FALSE))


def _read_level(variables: Mapping[str, str], name: str) -> int:
    text = variables.get(name, "").strip().lower() or "warning"
    if text not in _LEVELS:
        raise _unreadable(name, variables[name], f"use one of {', '.join(_LEVELS)}", tuple(_LEVELS))
    return _LEVELS[text]


def _read_count(variables: Mapping[str, str], name: str) -> int | None:
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise _unreadable(name, variables[name], "use a whole number, 1 or more")
    return int(text)


def _read_local_ranks(variables: Mapping[str, str]) -> int | None:
    text = variables.get(_LOCAL_RANKS, "").strip()
    return int(text) if text.isdecimal() and int(text) else None  # another program's variable: not ours to judge


def _read_cache_dir(variables: Mapping[str, str]) -> Path:
    text = variables.get(_CACHE_DIR, "").strip()
    if not text:
        caches = variables.get("XDG_CACHE_HOME", "").strip()
        return (Path(caches) if caches else Path.home() / ".cache") / "sennit"
    path = Path(text).expanduser()
    if not path.is_absolute():
        # ranks may start in other folders than the command that starts them
        raise _unreadable(_CACHE_DIR, text, "give an absolute path")
    return path


def _unreadable(name: str, text: str, remedy: str, choices: tuple[str, ...] = ()) -> EnvironmentVariableError:
    near = difflib.get_close_matches(text.strip().lower(), choices, n=1)
    hint = f"{remedy}; did you mean {near[0]}?" if near else remedy
    return EnvironmentVariableError(f"{name} cannot be {text!r}", where="the environment", fix=hint)
