"""The value types that every layer shares, their text forms, their checkers and their reference interpreters.

Import from the module that defines a type (`from sennit.ir.mesh import Mesh`): this file imports nothing, so that a
reader of one type does not load the others. It must exist: import-linter does not look into a folder without it.
"""

from __future__ import annotations

__all__: list[str] = []
