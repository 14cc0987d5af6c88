"""Confidence intervals: 95 % intervals over runs (class orders and seeds) and test pictures.

All runs on one stream are measured on the same test pictures. Pictures are many and are resampled (bootstrap): in each
draw a picture weighs the same in every run. Class orders are few, and three values resampled are too narrow by half;
what the mean of n orders may be off by is drawn from s/√n times Student's t with n − 1 degrees of freedom instead. s,
the standard deviation over orders, has in it what single pictures do to single orders, so that only what they do to all
of them is added; but no interval is narrower than that of the pictures alone, because orders can agree by chance. Runs
of one class order with several seeds count as one: they share what is particular to the order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache, cached_property
from math import sqrt
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from clipcil.errors import UserError
from clipcil.report.answers import read_predictions
from clipcil.report.runs import RunResult

DRAWS = 2000
CHUNK = 100
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantile of Student's t with 1…9 degrees of freedom."""
Z_975 = 1.959964
"""That of the normal distribution."""


class Interval(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def apart(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"

    @property
    def signed(self) -> str:
        """The same with signs, for a difference.

        Example:
            >>> Interval(1.5, -0.25, 3).signed
            '+1.50 [−0.25, +3.00]'
        """
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}]".replace("-", "−")


def t_interval(values: Sequence[float]) -> Interval | None:
    """Mean ± t·s/√n of a few runs; None for one.

    Example:
        >>> print(t_interval([70.0, 72.0, 74.0]))
        72.00 [67.03, 76.97]
    """
    count = len(values)
    if count < 2:
        return None
    mean, half = fmean(values), t_quantile(count - 1) * stdev(values) / sqrt(count)
    return Interval(mean, mean - half, mean + half)


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t; from ten degrees of freedom on by its expansion around the normal distribution's.

    Example:
        >>> [round(t_quantile(freedom), 3) for freedom in (2, 10, 30)]
        [4.303, 2.228, 2.042]
    """
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = Z_975
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


class Resampled:
    """A_B of runs over the same test pictures, with its resampled values.

    Args:
        runs: Finished runs on one dataset. Those whose predictions are missing, or of other test pictures than most
            runs have, are left out; `knows` tells.
        draws: How often to resample.
    """

    def __init__(self, runs: Sequence[RunResult], draws: int = DRAWS) -> None:
        self.draws = draws
        self._columns: dict[int, int] = {}
        self._weights: list[NDArray[np.float64]] = []
        self._right: list[NDArray[np.bool_]] = []
        found = []
        for run in runs:
            try:
                rows, weight, right = _measured(run)
            except UserError:
                continue
            found.append((run, rows.tobytes(), weight, right))
        most = Counter(pictures for _, pictures, _, _ in found).most_common(1)
        for run, pictures, weight, right in found:
            if pictures == most[0][0]:
                self._columns[id(run)] = len(self._weights)
                self._weights.append(weight)
                self._right.append(right)
        self._runs = list(runs)  # keeps the ids above alive

    def knows(self, run: RunResult) -> bool:
        return id(run) in self._columns

    @cached_property
    def _accuracy(self) -> NDArray[np.float64]:
        """(draws + 1, runs) A_B in percent; the first line is measured, the others resampled."""
        weights = np.stack(self._weights, axis=1)
        hits = weights * np.stack(self._right, axis=1)
        random = np.random.default_rng(1993)
        parts = [hits.sum(0, keepdims=True) / weights.sum(0, keepdims=True)]
        for start in range(0, self.draws, CHUNK):
            # Poisson(1) counts: resampling with replacement where the number of pictures is large.
            counts = random.poisson(1.0, (min(CHUNK, self.draws - start), len(weights))).astype(np.float64)
            counts[~counts.any(1)] = 1  # of one to three pictures a draw may hold none: it is no accuracy of 0
            parts.append(counts @ hits / (counts @ weights))
        return 100 * np.concatenate(parts)

    def mean(self, runs: Sequence[RunResult]) -> Interval | None:
        """The mean of A_B over these runs; None where predictions are missing."""
        if not runs or not all(self.knows(run) for run in runs):
            return None
        columns = [self._columns[id(run)] for run in runs]
        found = self._interval(self._accuracy[:, columns], [run.order for run in runs])
        return Interval(found.mean, max(0.0, found.low), min(100.0, found.high))

    def difference(self, pairs: Sequence[tuple[RunResult, RunResult]]) -> Interval | None:
        """The mean over class orders of A_B of the first − A_B of the second of each pair (same order, same seed)."""
        if not pairs or not all(self.knows(run) for pair in pairs for run in pair):
            return None
        first, second = ([self._columns[id(run)] for run in side] for side in zip(*pairs, strict=True))
        apart = self._accuracy[:, first] - self._accuracy[:, second]
        return self._interval(apart, [run.order for run, _ in pairs], alike=True)

    def _interval(self, values: NDArray[np.float64], orders: Sequence[str] = (), alike: bool = False) -> Interval:
        """`values`: (draws + 1, n), the measured line first; `orders`: the class order of each of the n; `alike`: each
        order weighs the same in the mean, instead of each of the n."""
        own = np.eye(values.shape[1])
        if len(set(orders)) > 1:
            own = np.array([[each == order for order in dict.fromkeys(orders)] for each in orders], dtype=np.float64)
        sizes, count = own.sum(0), own.shape[1]
        by_order = values @ (own / sizes)
        means = (by_order if alike else values).mean(1)
        mean, moved = float(means[0]), means[1:] - means[0]
        low, high = np.quantile(moved, (0.025, 0.975))
        if count > 1:
            squares = 1 / count if alike else float((sizes**2).sum() / sizes.sum() ** 2)  # of the orders' weights
            apart = by_order - by_order.mean(1, keepdims=True)
            between = sqrt(float((apart[0] ** 2).sum()) / (count - 1))
            single = float(((apart[1:] - apart[0]) ** 2).mean(0).sum()) / (count - 1)
            whole = float((moved**2).mean())
            moved *= sqrt(max(0.0, whole - single * squares) / whole) if whole else 1.0
            moved += between * sqrt(squares) * students(count - 1, len(moved))
            ends = np.quantile(moved, (0.025, 0.975))
            low, high = min(low, ends[0]), max(high, ends[1])
        return Interval(mean, mean + float(low), mean + float(high))


@cache
def students(freedom: int, draws: int) -> NDArray[np.float64]:
    """(draws,) values of Student's t, evenly spaced in probability and shuffled."""
    random = np.random.default_rng(freedom)
    found = np.quantile(random.standard_t(freedom, 1_000_000), (np.arange(draws) + 0.5) / draws)
    return random.permutation((found - found[::-1]) / 2)


def _measured(run: RunResult) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Rows of the test pictures in rising order, the weight of each in A_B (1/(tasks · pictures of its task)), and
    whether it was right."""
    found = sorted(read_predictions(run.folder), key=lambda each: each.row)
    if not found:
        raise UserError(f"{run.folder}: no predictions")
    _, task, sizes = np.unique([each.task for each in found], return_inverse=True, return_counts=True)
    weight = 1.0 / (len(sizes) * sizes[task])
    return np.array([each.row for each in found]), weight, np.array([each.right for each in found])


def order_means(values: Sequence[tuple[str, float]]) -> list[float]:
    """The mean of each class order, over its seeds.

    Example:
        >>> order_means([("seed:1", 1.0), ("seed:1", 3.0), ("seed:2", 5.0)])
        [2.0, 5.0]
    """
    return [fmean(value for own, value in values if own == order) for order in dict.fromkeys(own for own, _ in values)]


def paired(better: Sequence[RunResult], worse: Sequence[RunResult]) -> list[tuple[RunResult, RunResult]]:
    """Runs of the two with the same class order and seed."""
    others = {(run.order, run.seed): run for run in worse}
    return [(run, others[run.order, run.seed]) for run in better if (run.order, run.seed) in others]
