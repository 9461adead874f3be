"""Student's t distribution, without scipy, on which dtt does not depend."""

from __future__ import annotations

import math


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
