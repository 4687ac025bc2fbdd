"""Numbers as people read them: three significant digits and a unit.

| function         | 0.00123 s, 1536 bytes, ... | reads        |
|------------------|----------------------------|--------------|
| `seconds`        | 0.00123                    | `1.23 ms`    |
| `size`           | 1536                       | `1.50 KiB`   |
| `decimal_size`   | 2600000000                 | `2.60 GB`    |
| `percent`        | 0.256                      | `26%`        |
| `signed_percent` | -0.256                     | `-26%`       |
| `difference`     | 3.1e-07                    | `3.1e-07`    |

A number that is not finite reads as `nan` or `inf`: a report never hides one.
"""

from __future__ import annotations

from math import isfinite, isnan

__all__ = ["decimal_size", "difference", "percent", "seconds", "signed_percent", "size"]


def seconds(value: float) -> str:
    """A duration in us, ms or s."""
    if not isfinite(value):
        return f"{value} s"
    # sums of times leave a remainder of 1e-19 s where the truth is 0
    if abs(value) < 5e-9:
        return "0 s"
    # the limits lie half a last digit under the unit, so that 999.9 us reads as 1.00 ms and never as 1000 us
    if abs(value) < 999.5e-6:
        return f"{_three_digits(value * 1e6)} us"
    if abs(value) < 999.5e-3:
        return f"{_three_digits(value * 1e3)} ms"
    return f"{_three_digits(value)} s"


def size(value: float) -> str:
    """Bytes in KiB, MiB, GiB or TiB; fewer than 1024 are counted out."""
    return _bytes(value, 1024, ("KiB", "MiB", "GiB", "TiB"))


def decimal_size(value: float) -> str:
    """Bytes in kB, MB, GB or TB, as memory of devices is sold."""
    return _bytes(value, 1000, ("kB", "MB", "GB", "TB"))


def _bytes(value: float, base: int, units: tuple[str, ...]) -> str:
    if not isfinite(value):
        return f"{value} B"
    if abs(value) < base:
        return f"{value:.0f} B"
    scaled, unit = value / base, units[0]
    for larger in units[1:]:
        if abs(scaled) < 999.5:
            break
        scaled, unit = scaled / base, larger
    return f"{_three_digits(scaled)} {unit}"


def percent(share: float) -> str:
    """A share of one as a percentage; small ones keep a decimal."""
    if not isfinite(share):
        return f"{share}"
    scaled = share * 100
    return f"{scaled:.0f}%" if scaled == 0 or abs(scaled) >= 9.95 else f"{scaled:.1f}%"


def signed_percent(share: float) -> str:
    """A relative error with its sign."""
    return ("+" if share > 0 else "") + percent(share)


def difference(value: float) -> str:
    """The greatest difference between two runs: 0 only where it is exactly 0."""
    return "nan" if isnan(value) else "0" if value == 0 else f"{value:.1e}"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    digits = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:.{digits}f}"
