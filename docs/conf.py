"""Sphinx settings. Everything is built offline: no page loads anything from another host."""

import tomllib
from pathlib import Path

_PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = _PROJECT["name"]
author = "The sennit authors"
copyright = author
version = release = _PROJECT["version"]

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"sennit {release}"
html_static_path: list[str] = []
