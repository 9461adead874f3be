"""Statistics of repeated runs: confidence intervals of Student's t.

Only the standard library is used: dtt does not depend on scipy.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean with its two-sided 95 % confidence interval."""

    value: float
    low: float
    high: float


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of at least two values with its interval; None for fewer.

    Student, The probable error of a mean, Biometrika 6 (1908).
    """
    if len(values) < 2:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * error
    mean = statistics.fmean(values)
    return Interval(mean, mean - half, mean + half)


def t_cdf(t: float, freedom: int) -> float:
    """Return P(T <= t) of Student's t with an integer number of degrees of freedom.

    The finite sums of Abramowitz & Stegun, Handbook of Mathematical Functions (1964), 26.7.3
    (odd `freedom`) and 26.7.4 (even), which are exact.
    """
    theta = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(theta), math.cos(theta)
    total, term = 0.0, cosine if freedom % 2 else 1.0
    for k in range(2 + freedom % 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    if freedom % 2:
        return 0.5 + (theta + sine * total) / math.pi
    return 0.5 + sine * total / 2


def t_quantile(probability: float, freedom: int) -> float:
    """Return the t with P(T <= t) = `probability`, from 0.5 to below 1, by bisection."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2
