"""Writing a report's files whole or not at all: a reader never sees half a file, an interrupted run leaves the old one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

__all__ = ["write_text", "write_whole"]


def write_whole(path: Path, data: bytes) -> None:
    """Write to a temporary file beside `path`, then rename it. Folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        # mkstemp makes files that only their owner can read; a report is to be shared
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """The same, for text."""
    write_whole(path, text.encode())
