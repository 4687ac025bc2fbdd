from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import sennit
from sennit import cli, cli_cluster, cli_simulate, doctor
from sennit.cli import main
from sennit.cli_simulate import SimulateResult

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("demo", "simulate", "reshard", "cluster", "probe", "doctor")

PROGRAM = """
program "two halves" {
  mesh m0 = dp=2
  lane all on 0-1 {
    input %x : f32[8{dp},4] of %x on m0 "x"
    param %w : f32[4,4] of %w on m0 "w"
    forward %y : f32[8{dp},4] of %y on m0 = aten.mm.default(%x, %w)
    all_gather %z : f32[8,4] of %y on m0 = %y over dp
    result "y" %z
  }
}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.txt"
    file.write_text(PROGRAM, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("SENNIT_"):
            monkeypatch.delenv(name)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A diagnosis without the two seconds that probing takes; `test_doctor.py` probes."""
    finding = doctor.Finding("PyTorch", doctor.Status.PRESENT, "2.13.0 [cpu]", required=True)
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Diagnosis((finding,)))


# ---- help and version ------------------------------------------------------------------------------------------------


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "sennit", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["sennit", sennit.__version__]


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example_and_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert f"Example: sennit {command}" in text
    assert "--json" in text
    assert "--debug" in text


def test_help_loads_no_framework() -> None:
    script = (
        "import sys\nfrom sennit.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'jax', 'numpy', 'rich', 'msgspec'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sennit {sennit.__version__}\n"


# ---- wrong arguments and errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [[], ["simulat"], ["simulate"], ["simulate", "p.txt"], ["demo", "--layers", "two"], ["doctor", "--jsn"]],
)
def test_wrong_arguments_end_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err != ""


def test_an_error_is_a_message_without_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(tmp_path / "absent.txt"), "--cluster", "laptop"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("sennit: cannot read ")
    assert "fix: name a file" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("way", ["option", "variable"])
def test_debug_shows_the_traceback(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["simulate", str(tmp_path / "absent.txt"), "--cluster", "laptop"]
    if way == "option":
        arguments.append("--debug")
    else:
        monkeypatch.setenv("SENNIT_DEBUG", "1")
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert "cannot read" in captured.err


def test_a_program_that_does_not_parse_says_where(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program.write_text('program "p" {\n  lane all {\n', encoding="utf-8")
    assert main(["simulate", str(program), "--cluster", "laptop"]) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_wrong_variable_is_an_error_of_every_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENNIT_DEBGU", "1")
    assert main(["doctor"]) == 2
    assert "did you mean SENNIT_DEBUG?" in capsys.readouterr().err


# ---- doctor ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("healthy")
def test_doctor_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "2.13.0 [cpu]" in text  # brackets are text here, not markup
    assert "sennit can run here." in text


@pytest.mark.usefixtures("healthy")
def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "sennit.doctor/1"
    assert document["ready"] is True
    assert document["findings"][0] == {
        "part": "PyTorch",
        "status": "present",
        "detail": "2.13.0 [cpu]",
        "cost": "",
        "required": True,
    }
    assert captured.err == ""


def test_doctor_says_no_by_its_status(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor.Finding("gloo", doctor.Status.MISSING, "not built", "no ranks", required=True)
    monkeypatch.setattr(doctor, "examine", lambda: doctor.Diagnosis((finding,)))
    assert main(["doctor"]) == 1
    assert "cannot run here" in capsys.readouterr().out


# ---- simulate --------------------------------------------------------------------------------------------------------


def test_simulate_prints_simulated_figures(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(program), "--cluster", "dgx-h100"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("simulated: one step of 'two halves' on dgx-h100, 2 devices")
    assert all(
        word in captured.out for word in ("step time", "exposed communication", "bytes on the wire", "peak memory")
    )
    assert captured.err == ""


def test_simulate_as_json_with_a_trace(program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "step.json.gz"
    assert main(["simulate", str(program), "--cluster", "dgx-h100", "--trace", str(trace), "--json"]) == 0
    result = msgspec.json.decode(capsys.readouterr().out, type=SimulateResult)
    assert result.schema == "sennit.simulate/1"
    assert result.origin == "simulated"
    assert result.step_seconds > 0
    assert 0 <= result.exposed_seconds <= result.step_seconds
    assert result.wire_bytes > 0
    (lane,) = result.lanes
    assert lane.devices == (0, 1)
    # at the end the lane holds at least w, its half of x and of y, and all of z
    assert lane.peak_memory_bytes >= 4 * (16 + 16 + 16 + 32)
    assert trace.stat().st_size > 0


def test_simulate_reads_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("program 7"))
    assert main(["simulate", "-", "--cluster", "dgx-h100"]) == 2
    assert "expected a quoted string" in capsys.readouterr().err


def test_an_unknown_cluster_is_an_error(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(program), "--cluster", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_an_error(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    trace = tmp_path / "file" / "step.json.gz"
    assert main(["simulate", str(program), "--cluster", "dgx-h100", "--trace", str(trace)]) == 2
    assert "cannot write" in capsys.readouterr().err


# ---- demo ------------------------------------------------------------------------------------------------------------


def test_the_document_of_a_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """Made from a comparison by hand: running the demo itself is the work of its own tests."""
    from sennit.ir.program import Program
    from sennit.ir.timeline import Category, Event, Memory, MemoryKind, Origin, Timeline
    from sennit.report import Comparison, MeasuredRun, PlanResult, SimulatedRun

    events = (Event(0, "compute", Category.COMPUTE, "mm", 0.0, 2.0), Event(0, "x", Category.SEND, "s", 2.0, 3.0, 64))
    timeline = Timeline("step", Origin.SIMULATED, events, (Memory(0, 0.0, ((MemoryKind.PARAMETERS, 128),)),))
    simulated = SimulatedRun("laptop", "dp=1", timeline, Program.parse(PROGRAM))
    measured = MeasuredRun(1, "gloo", (2.0, 2.0), 0.0, "loss", 1e-6, 3, 3)
    plans = (
        PlanResult("one", "all on one device", (simulated,), measured, predicted=simulated),
        PlanResult("unmeasured", "never run", (simulated,)),
    )
    cli._print_json(cli._demo_result(cli.Demo(out=Path("r")), Comparison("gpt", "two layers", 2.5, plans)))
    result = msgspec.json.decode(capsys.readouterr().out, type=cli.DemoResult)
    assert (result.schema, result.out, result.model, result.reference_seconds) == ("sennit.demo/1", "r", "gpt", 2.5)
    assert result.best == "one"
    one, unmeasured = result.plans
    assert one.simulated == (cli.SimulatedPlan("laptop", "dp=1", 3.0, 128, 64),)
    assert one.measured == cli.MeasuredPlan(1, "gloo", 2.0, 0.0, "loss", "equal, bitwise")
    assert one.prediction_error == 0.5
    assert unmeasured.measured is None
    assert unmeasured.prediction_error is None


# ---- the documents and their description -----------------------------------------------------------------------------


def test_every_field_of_every_document_is_described() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    documents = [cli.DemoResult, cli.PlanSummary, cli.SimulatedPlan, cli.MeasuredPlan]
    documents += [cli_simulate.SimulateResult, cli_simulate.LaneSummary, cli_simulate.Share, cli_simulate.CostSource]
    documents += [
        cli_cluster.ClusterResult,
        cli_cluster.FigureSummary,
        cli_cluster.ProbeResult,
        cli_cluster.PairSummary,
    ]
    documents += [cli_cluster.Measured, cli.DoctorResult, doctor.Finding]
    for document in documents:
        for field in dataclasses.fields(document):
            assert f"`{field.name}`" in text, f"docs/commands.md does not describe {document.__name__}.{field.name}"
