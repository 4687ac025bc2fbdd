"""Measured operator times of one device, interpolated; and carried over to others.

A profile has for each family of `cost/work.py` the points that were measured. At a point, the *ratio* is the measured
time over the bound of the roofline on the measured device, max(flops / peak, bytes / bandwidth) + launch. Ratios vary
slowly where times vary over six orders of magnitude, so they are what is interpolated: the logarithm of the ratio is a
Gaussian process over the features, with a covariance s² exp(-d²/2l²) and noise r²,

    log ratio(x) = mean + k(x)ᵀ (K + r² I)⁻¹ (log ratios - mean)

and the weights (K + r² I)⁻¹ (...) are what a profile file holds beside the points. Far from every point the ratio falls
back to the family's mean, and the cost says so. The error that a family states is that of leaving each point out in
turn, in closed form: w_i / ((K + r² I)⁻¹)_ii.

**Another device** (`carried_profile`) takes the ratios with its own peak, bandwidth and launch: its products are taken
to fill it as well as they did the measured one. That is an estimate and says so. A profile under `profile` must be of
the device's kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from math import exp
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from sennit.cluster import Basis, Device
from sennit.cost.value import Cost
from sennit.cost.work import Work
from sennit.errors import ClusterError
from sennit.ir.dtype import DType

__all__ = ["Family", "Profile", "Reference", "fit_family", "load_profile", "lower_bound"]


MARGIN = 0.2  # how far an interpolated log ratio may leave the measured ones


class Reference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures of the measured device that its ratios are relative to."""

    peak: dict[str, float]
    bandwidth: float
    launch: float

    @classmethod
    def of(cls, device: Device) -> Reference:
        names = device.peak.__struct_fields__
        peaks = {name: figure.value for name in names if (figure := device.peak.of(DType(name))) is not None}
        return cls(peaks, device.bandwidth.value, device.launch.value)


def lower_bound(work: Work, reference: Reference) -> float:
    """Seconds of the roofline. An element type that the device has no rate for counts as the slowest that it has."""
    peak = reference.peak.get(work.dtype.value) or min(reference.peak.values())
    return max(work.flops / peak, work.bytes / reference.bandwidth) + reference.launch


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`points` are features, point by point; `weights` as in the module's text; `least` and `most` bound the logarithms
    of the measured ratios, beyond which no interpolation goes far; errors are relative, of leaving one out: half of the
    points and nine tenths of them are within.
    """

    name: str
    points: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...]
    mean: float
    length: float
    noise: float
    scale: float
    least: float
    most: float
    median_error: float
    most_error: float

    def ratio(self, features: Sequence[float], table: NDArray[np.float64]) -> tuple[float, float]:
        """The ratio at some features, and how far the nearest point is, in lengths. `table` is `points` as an array."""
        apart = ((table - np.asarray(features)) ** 2).sum(axis=1) / self.length**2
        log_ratio = self.mean + self.scale**2 * float(np.exp(-0.5 * apart) @ np.asarray(self.weights))
        return exp(min(self.most + MARGIN, max(self.least - MARGIN, log_ratio))), float(np.sqrt(apart.min()))


@dataclass(frozen=True)
class Profile:
    """`device` is the kind it was measured on; `where` says with what, for reports.

    Arrays are made when first asked for.
    """

    device: str
    where: str
    reference: Reference
    families: tuple[Family, ...]

    @cached_property
    def _by_name(self) -> dict[str, tuple[Family, NDArray[np.float64]]]:
        return {item.name: (item, np.array(item.points)) for item in self.families}

    def ratio(self, work: Work) -> tuple[float, Family, float] | None:
        """The ratio for a work, the family it came from and the distance to its nearest point."""
        for name in (work.family, work.general):
            if name is not None and name in self._by_name:
                family, table = self._by_name[name]
                ratio, apart = family.ratio(work.features[: table.shape[1]], table)
                return ratio, family, apart
        return None

    def cost(self, work: Work, device: Device | None) -> Cost | None:
        """The cost on the measured device, or with `device` on another; None for families that were not measured."""
        found = self.ratio(work)
        if found is None:
            return None
        ratio, family, apart = found
        seconds = ratio * lower_bound(work, self.reference if device is None else Reference.of(device))
        inside = apart <= 2.0
        what = f"{family.name}: half of the measured points within {family.median_error:.0%}"
        if device is not None:
            return Cost(seconds, Basis.ESTIMATED, what, f"efficiencies carried over from {self.device}")
        if not inside:
            return Cost(
                seconds, Basis.ESTIMATED, f"{what}; far from all of them", f"profile of {self.device}, beyond it"
            )
        return Cost(seconds, Basis.MEASURED, what, f"profile of {self.device}")


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    device: str
    where: str
    reference: Reference
    families: tuple[Family, ...]


def load_profile(name: str) -> Profile:
    """A profile that ships with sennit, by name, or a `.json` file by its path."""
    if name.endswith(".json"):
        path = Path(name)
        if not path.is_file():
            raise ClusterError(f"there is no profile {name!r}", fix="give the path of a profile's .json")
        data = path.read_bytes()
    else:
        folder = resources.files("sennit.cost") / "profiles"
        file = folder / f"{name}.json"
        if not file.is_file():
            known = sorted(item.name.removesuffix(".json") for item in folder.iterdir() if item.name.endswith(".json"))
            raise ClusterError(f"there is no profile {name!r}", fix=f"use one of {', '.join(known)}, or a path")
        data = file.read_bytes()
    try:
        file_ = msgspec.json.decode(data, type=_File)
    except msgspec.DecodeError as error:
        raise ClusterError(
            f"{name!r} is no profile: {error}", fix="make it with benchmarks/sim/fit_profile.py"
        ) from None
    return Profile(file_.device, file_.where, file_.reference, file_.families)


def fit_family(
    name: str, points: Sequence[tuple[float, ...]], ratios: Sequence[float], like: Family | None = None
) -> Family:
    """Weights, with the length and the noise that leave-one-out finds best, or those of a family fitted before."""
    table, logs = np.array(points, dtype=np.float64).round(4), np.log(np.array(ratios, dtype=np.float64))
    mean = float(np.median(logs))
    scale = round(max(0.05, float(np.std(logs - mean))), 6)
    apart = ((table[:, None, :] - table[None, :, :]) ** 2).sum(axis=2)
    best: tuple[float, float, float, NDArray[np.float64], NDArray[np.float64]] | None = None
    for length in LENGTHS if like is None else (like.length,):
        kernel = scale**2 * np.exp(-0.5 * apart / length**2)
        for noise in NOISES if like is None else (like.noise,):
            inverse = np.linalg.inv(kernel + noise**2 * np.eye(len(table)))
            weights = inverse @ (logs - mean)
            left_out = np.abs(weights / np.diag(inverse))
            score = float(np.mean(np.minimum(left_out, 1.0)))
            if best is None or score < best[0]:
                best = (score, length, noise, weights, left_out)
    assert best is not None
    _, length, noise, weights, left_out = best
    errors = np.expm1(np.minimum(left_out, 5.0))
    return Family(
        name,
        tuple(tuple(point) for point in table.tolist()),
        tuple(float(f"{weight:.7g}") for weight in weights.tolist()),
        mean,
        length,
        noise,
        scale,
        round(float(logs.min()), 4),
        round(float(logs.max()), 4),
        round(float(np.median(errors)), 4),
        round(float(np.quantile(errors, 0.9)), 4),
    )


LENGTHS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)  # in binary logarithms of sizes
NOISES = (0.01, 0.02, 0.05, 0.1, 0.2)
