from __future__ import annotations

import ast
import logging
import re
from pathlib import Path

import pytest

from sennit.environment import Environment, read_environment
from sennit.errors import EnvironmentVariableError

SOURCE = Path(__file__).resolve().parent.parent / "src" / "sennit"


def test_nothing_set_gives_the_defaults() -> None:
    assert read_environment({"XDG_CACHE_HOME": "/caches"}) == Environment(
        debug=False, log_level=logging.WARNING, cache_dir=Path("/caches/sennit")
    )
    assert read_environment({}).cache_dir == Path.home() / ".cache" / "sennit"


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("1", True),
        ("true", True),
        ("YES", True),
        ("on", True),
        ("0", False),
        ("Off", False),
        ("no", False),
        ("", False),
    ],
)
def test_debug_is_a_truth_value(text: str, meaning: bool) -> None:
    assert read_environment({"SENNIT_DEBUG": text}).debug is meaning


def test_threads_are_a_count() -> None:
    assert read_environment({}).threads is None
    assert read_environment({"SENNIT_THREADS": " 2 "}).threads == 2
    for text in ("0", "-1", "two", "1.5"):
        with pytest.raises(EnvironmentVariableError, match="SENNIT_THREADS cannot be"):
            read_environment({"SENNIT_THREADS": text})


def test_what_a_launcher_says_is_read_and_not_judged() -> None:
    assert read_environment({"LOCAL_WORLD_SIZE": "8"}).local_ranks == 8
    for text in ("", "0", "many"):
        assert read_environment({"LOCAL_WORLD_SIZE": text}).local_ranks is None


def test_log_is_a_level_by_name() -> None:
    assert read_environment({"SENNIT_LOG": "Debug"}).log_level == logging.DEBUG
    assert read_environment({"SENNIT_LOG": "error"}).log_level == logging.ERROR


def test_cache_dir_is_an_absolute_path_and_knows_home() -> None:
    assert read_environment({"SENNIT_CACHE_DIR": "/var/profiles"}).cache_dir == Path("/var/profiles")
    assert read_environment({"SENNIT_CACHE_DIR": "~/profiles"}).cache_dir == Path.home() / "profiles"


@pytest.mark.parametrize(
    ("variables", "what", "fix"),
    [
        ({"SENNIT_DEBGU": "1"}, "unknown variable SENNIT_DEBGU", "did you mean SENNIT_DEBUG?"),
        ({"SENNIT_cache_dir": "/x"}, "unknown variable SENNIT_cache_dir", "did you mean SENNIT_CACHE_DIR?"),
        ({"SENNIT_TURBO_MODE": "1"}, "unknown variable SENNIT_TURBO_MODE", "the known ones are SENNIT_DEBUG, "),
        ({"SENNIT_DEBUG": "maybe"}, "SENNIT_DEBUG cannot be 'maybe'", "use one of 1, true"),
        ({"SENNIT_DEBUG": "ture"}, "SENNIT_DEBUG cannot be 'ture'", "did you mean true?"),
        ({"SENNIT_LOG": "warn"}, "SENNIT_LOG cannot be 'warn'", "did you mean warning?"),
        ({"SENNIT_CACHE_DIR": "profiles"}, "SENNIT_CACHE_DIR cannot be 'profiles'", "give an absolute path"),
    ],
)
def test_a_wrong_variable_is_named_with_its_remedy(variables: dict[str, str], what: str, fix: str) -> None:
    with pytest.raises(EnvironmentVariableError) as caught:
        read_environment(variables)
    assert caught.value.what == what
    assert fix in str(caught.value.fix)


def test_other_variables_are_left_alone() -> None:
    read_environment({"SENNITY": "1", "PATH": "/bin", "sennit_debug": "x"})


def test_no_other_file_names_a_variable_of_sennit() -> None:
    """A lookup needs the whole name as a string: prose that mentions a variable is not one."""
    for file in SOURCE.rglob("*.py"):
        if file == SOURCE / "environment.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"SENNIT_[A-Z_]*", node.value), f"{file}:{node.lineno} names {node.value}"
