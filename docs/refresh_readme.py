"""Run the demo and put its output and its picture into the README: `make readme`. Nothing there is typed by hand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
BEGIN, END = "<!-- demo output -->", "<!-- end of demo output -->"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "sennit"), "demo"]
        environment = {"COLUMNS": "118", "PATH": "/usr/bin:/bin"}
        printed = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=True
        ).stdout
        shutil.copyfile(Path(folder) / "sennit-demo" / "timelines.svg", ROOT / "docs" / "images" / "demo.svg")
    readme = ROOT / "README.md"
    text = "\n".join(line.rstrip() for line in printed.strip().splitlines())
    block = f"{BEGIN}\n```text\n{text}\n```\n{END}"
    readme.write_text(re.sub(f"{BEGIN}.*{END}", lambda _: block, readme.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
