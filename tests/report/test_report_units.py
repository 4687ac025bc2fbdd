from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sennit.report import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 s"),
        (4e-19, "0 s"),
        (1.234e-6, "1.23 us"),
        (12.34e-6, "12.3 us"),
        (123.4e-6, "123 us"),
        (999.4e-6, "999 us"),
        (999.6e-6, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (75.0, "75.0 s"),
        (-0.002, "-2.00 ms"),
        (float("nan"), "nan s"),
        (float("inf"), "inf s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1000 * 1024, "0.98 MiB"),
        (80 << 30, "80.0 GiB"),
        (3 << 40, "3.00 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_size(value: int, text: str) -> None:
    assert units.size(value) == text


def test_percent_and_difference() -> None:
    assert units.percent(0.256) == "26%"
    assert units.percent(0.0123) == "1.2%"
    assert units.percent(0) == "0%"
    assert units.signed_percent(0.5) == "+50%"
    assert units.signed_percent(-0.5) == "-50%"
    assert units.signed_percent(0) == "0%"
    assert units.difference(0) == "0"
    assert units.difference(3.14e-7) == "3.1e-07"
    assert units.difference(float("nan")) == "nan"


@given(st.floats(1e-8, 1e3))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_a_duration_reads_back_within_its_digits(value: float) -> None:
    number, unit = units.seconds(value).split()
    back = float(number) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit]
    assert back == pytest.approx(value, rel=0.0051, abs=0.0051e-6)
    assert len(number.replace(".", "")) <= 4


def test_sizes_as_memory_is_sold() -> None:
    assert [units.decimal_size(value) for value in (12, 20_000, 4.1e6, 2.6e9, 9.996e11)] == [
        "12 B",
        "20.0 kB",
        "4.10 MB",
        "2.60 GB",
        "1.00 TB",
    ]
