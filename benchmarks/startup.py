"""How long `--help` takes: of sennit, and of the same two commands written with tyro and with typer.

Each program is started afresh; the least and the greatest of several runs are printed. A library that is not installed
is left out (typer is no dependency of sennit: `pip install typer` to compare).
"""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.util import find_spec
from time import perf_counter

RUNS = 5

TYRO = """
from dataclasses import dataclass
import tyro
@dataclass(frozen=True)
class Demo:
    layers: int = 2
@dataclass(frozen=True)
class Simulate:
    program: tyro.conf.Positional[str]
    json: bool = False
tyro.cli(Demo | Simulate)
"""

TYPER = """
import typer
app = typer.Typer()
@app.command()
def demo(layers: int = 2): ...
@app.command()
def simulate(program: str, json: bool = False): ...
app()
"""

PROGRAMS = {
    "bare interpreter": ("", None),
    "sennit": ("from sennit.cli import main; main()", "sennit"),
    "tyro": (TYRO, "tyro"),
    "typer": (TYPER, "typer"),
}


def start(script: str) -> float:
    begin = perf_counter()
    subprocess.run([sys.executable, "-c", script, "--help"], stdout=subprocess.DEVNULL, check=True)
    return perf_counter() - begin


def main() -> None:
    print(f"seconds to answer --help, {RUNS} runs; Python {platform.python_version()}, {platform.machine()}")
    for name, (script, library) in PROGRAMS.items():
        if library is not None and find_spec(library) is None:
            print(f"  {name:<18} not installed")
            continue
        start(script)  # writes the byte code
        times = [start(script) for _ in range(RUNS)]
        print(f"  {name:<18} {min(times):.2f} to {max(times):.2f}")


if __name__ == "__main__":
    main()
