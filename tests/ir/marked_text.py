"""Text with one `^` in it, which marks where a fault is expected."""

from __future__ import annotations


def without_mark(text: str) -> tuple[str, int, int]:
    """The text without the mark, and the line and column, counted from 1, at which it stood."""
    before, after = text.split("^")
    lines = before.split("\n")
    return before + after, len(lines), len(lines[-1]) + 1
