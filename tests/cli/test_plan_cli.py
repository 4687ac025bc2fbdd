"""`sennit plan`, `explain` and `diff`."""

from __future__ import annotations

import json

import pytest

from sennit.cli import main
from sennit.cli_plan import parse_pins
from sennit.errors import ParseError
from sennit.plan.search import Choice, Keep, Kind, Part, Way


def choice(**changes: object) -> Choice:
    fields = {
        "model": "GPT",
        "cluster": "laptop",
        "batch": 8,
        "way": Way(tp=2, vocabulary=True),
        "pp": 2,
        "dp": 2,
        "size": 1,
        "microbatches": 4,
        "kind": Kind.INTERLEAVED,
        "chunks": 2,
        "zero": 1,
        "stages": ((Part("before", 1), Part("h.0", 1)), (Part("h.1", 2, Keep.NONE), Part("behind", 1))),
        "step": 0.125,
        "memory": 1000,
        "bound": 0.1,
    }
    return Choice(**{**fields, **changes})  # type: ignore[arg-type]


def test_pins_are_read():
    assert parse_pins(("*:tp=4,sp", "*.h.*:keep=none")) == {"*": {"tp": 4, "sp": True}, "*.h.*": {"keep": "none"}}
    with pytest.raises(ParseError, match="no pin"):
        parse_pins(("tp=4",))


def test_a_title_counts_in_english():
    assert choice().title.endswith("4 micro-batches of 1, ZeRO-1")
    assert choice(microbatches=1, size=4, zero=0).title.endswith("1 micro-batch of 4")


def test_diff(tmp_path, capsys):
    old, new = tmp_path / "old.plan", tmp_path / "new.plan"
    old.write_text(str(choice()))
    new.write_text(str(choice(zero=3, step=0.25)))
    assert main(["diff", str(old), str(old)]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["diff", str(old), str(new), "--json"]) == 1
    rows = {row["name"]: (row["old"], row["new"]) for row in json.loads(capsys.readouterr().out)["differences"]}
    assert rows == {"zero": ("1", "3"), "step, simulated": ("0.125 s", "0.25 s")}


def test_diff_of_a_missing_file(tmp_path, capsys):
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_plan_explain_and_save(tmp_path, capsys):
    out = tmp_path / "gpt.plan"
    arguments = ["gpt:batch=4,layers=4", "--cluster", "laptop:2", "--optimizer", "adam"]
    assert main(["plan", *arguments, "--pin", "*:pp=1,size=2", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["origin"] == "simulated"
    assert result["bound_seconds"] <= result["step_seconds"]
    assert str(Choice.parse(out.read_text())) == result["plan"]
    assert main(["explain", "*.up", *arguments, "--pin", "*:pp=1,size=2"]) == 0
    said = capsys.readouterr().out
    assert "(chosen)" in said
    assert "…" not in said  # nothing is cut off on 80 columns


def test_a_pin_that_matches_nothing(capsys):
    assert main(["plan", "gpt:batch=4,layers=4", "--cluster", "laptop:2", "--pin", "*.mlp:tp=2"]) == 2
    assert "matches no module" in capsys.readouterr().err
