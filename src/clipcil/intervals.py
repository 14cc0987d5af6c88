"""95 % confidence intervals, and that of a share of pictures (Wilson)."""

from math import sqrt
from typing import NamedTuple

Z_975 = 1.959964
"""97.5 % quantile of the normal distribution."""


class Interval(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def signed(self) -> str:
        """The text of a difference, such as `+1.50 [−0.25, +3.00]`."""
        return f"{signed(self.mean)} [{signed(self.low)}, {signed(self.high)}]"


def signed(value: float) -> str:
    """A difference with its sign, such as `−0.25`."""
    return f"{value:+.2f}".replace("-", "−")


def wilson_interval(right: float, total: float) -> tuple[float, float]:
    """The 95 % interval of the share of `total` pictures that are right, by Wilson's score; (0, 1) without any picture.

    It stays inside 0…1 and is reliable for few pictures: (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n).

    Examples:
        >>> [round(bound, 3) for bound in wilson_interval(8, 10)]
        [0.49, 0.943]
    """
    if not total:
        return 0.0, 1.0
    share, square = right / total, Z_975**2 / total
    middle = (share + square / 2) / (1 + square)
    half = Z_975 * sqrt(share * (1 - share) / total + square / (4 * total)) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
