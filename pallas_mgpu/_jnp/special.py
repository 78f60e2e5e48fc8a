"""Special functions of `lax` that no single op computes.

They are the textbook formulas: digamma by its recurrence and asymptotic series, scaled Bessel
functions by their power and asymptotic series. All are computed in float32.
"""

import math

from .elementwise import abs, exp, floor, log, maximum, minimum, nan, sqrt, tan, where


def _series(x, coefficients):
    out = coefficients[0]
    for c in coefficients[1:]:
        out = out * x + c
    return out


def digamma(x):
    """Derivative of lgamma, of float32."""
    mirrored = x < 0.5  # digamma(x) is digamma(1 - x) - pi / tan(pi x)
    y, below = where(mirrored, 1 - x, x), 0.0
    for _ in range(7):
        small = y < 7
        below = below + where(small, 1 / y, 0.0)
        y = where(small, y + 1, y)
    z = 1 / (y * y)
    tail = z * _series(z, (-1 / 252, 1 / 120, -1 / 12))
    out = log(y) - 0.5 / y + tail - below
    fraction = x - floor(x + 0.5)
    out = where(mirrored, out - math.pi / tan(math.pi * fraction), out)
    return where((x <= 0) & (fraction == 0), nan, out)


def bessel(x, order):
    """exp(-|x|) I_n(x) of float32: the power series below 12, where its terms are all positive, and
    the asymptotic one above. Terms are computed as ratios of neighbours."""
    a = abs(x)
    near = minimum(a, 12.0)
    quarter, out = near * near * 0.25, 1.0
    for k in range(32, 0, -1):
        out = 1.0 + out * quarter * (1 / (k * (k + order)))
    out = out * exp(-near) * (near * 0.5 if order else 1.0)
    far = maximum(a, 12.0)
    tail, mu = 1.0, 4.0 * order * order
    for k in range(8, 0, -1):
        tail = 1.0 - tail * ((mu - (2 * k - 1) ** 2) / (8 * k)) / far
    tail = tail * sqrt((1 / (2 * math.pi)) / far)
    out = where(a < 12, out, tail)
    return where(x != x, x, where(x < 0, -out, out) if order else out)
