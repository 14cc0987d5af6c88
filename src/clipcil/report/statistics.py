"""95 % intervals of A_B over runs (class orders and seeds) and test pictures.

All runs on one stream are measured on the same test pictures. Test pictures are resampled (bootstrap): in each draw a
picture has the same weight in every run. Class orders are too few for that, because an interval from three resampled
values is too narrow by half. The error of the mean over n orders is drawn from s/√n times Student's t with n − 1
degrees of freedom instead. s, the standard deviation over orders, already contains the noise of individual pictures
within an order, so only the noise that all orders share is added. No interval is narrower than that of the pictures
alone, because orders can agree by chance. Runs of one class order with several seeds count as one order. Where every
picture is right, or every one wrong, A_B has Wilson's interval.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache, cached_property
from math import sqrt
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from clipcil.errors import UserError
from clipcil.intervals import Interval, wilson_interval
from clipcil.report.answers import read_outcomes
from clipcil.report.runs import RunRecord

DRAWS = 2000
DRAWS_AT_ONCE = 100  # a divisor of DRAWS
ROUNDING = 1e-9
"""Spread in percent below which resampled values are the same but for rounding."""


class Bootstrap:
    """A_B of runs over the same test pictures, with its resampled values.

    Args:
        runs: Finished runs on one dataset. Those whose predictions are missing, or of other test pictures than most
            runs have, are left out: their intervals are None.
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        found = []
        for run in runs:
            with suppress(UserError):
                found.append((run, *_measured(run)))
        most = Counter(rows.tobytes() for _, rows, _, _ in found).most_common(1)
        self._known = [each for each in found if each[1].tobytes() == most[0][0]]
        self._columns = {id(run): column for column, (run, *_) in enumerate(self._known)}

    @cached_property
    def _accuracy(self) -> NDArray[np.float64]:
        """(draws + 1, runs) A_B in percent; the first line is measured, the others resampled."""
        weights = np.stack([weight for _, _, weight, _ in self._known], axis=1)
        hits = weights * np.stack([right for _, _, _, right in self._known], axis=1)
        random = np.random.default_rng(1993)
        parts = [hits.sum(0, keepdims=True) / weights.sum(0, keepdims=True)]
        for _ in range(DRAWS // DRAWS_AT_ONCE):
            # Poisson(1) counts: resampling with replacement where the number of pictures is large.
            counts = random.poisson(1.0, (DRAWS_AT_ONCE, len(weights))).astype(np.float64)
            counts[~counts.any(1)] = 1  # a draw from one to three pictures may be empty, which is not an accuracy of 0
            parts.append(counts @ hits / (counts @ weights))
        return 100 * np.concatenate(parts)

    def mean(self, runs: Sequence[RunRecord]) -> Interval | None:
        """The mean of A_B over these runs."""
        if (columns := self._places(runs)) is None:
            return None
        found = interval(self._accuracy[:, columns], [run.order for run in runs])
        if found.high - found.low < ROUNDING:
            # All pictures right, or all wrong: resampling shows no spread. Weights w_i count as 1/Σw_i² pictures.
            count = 1 / float((self._known[columns[0]][2] ** 2).sum())
            low, high = wilson_interval(found.mean / 100 * count, count)
            return Interval(found.mean, 100 * low, 100 * high)
        return Interval(found.mean, max(0.0, found.low), min(100.0, found.high))

    def difference(self, pairs: Sequence[tuple[RunRecord, RunRecord]]) -> Interval | None:
        """The mean over class orders of A_B of the first − A_B of the second of each pair (same order, same seed)."""
        first, second = (self._places([pair[side] for pair in pairs]) for side in (0, 1))
        if first is None or second is None:
            return None
        apart = self._accuracy[:, first] - self._accuracy[:, second]
        return interval(apart, [run.order for run, _ in pairs], alike=True)

    def _places(self, runs: Sequence[RunRecord]) -> list[int] | None:
        """Columns of these runs; None for no run, or where one was left out."""
        found = [column for run in runs if (column := self._columns.get(id(run))) is not None]
        return found if len(found) == len(runs) > 0 else None


def interval(values: NDArray[np.float64], orders: Sequence[str] = (), alike: bool = False) -> Interval:
    """The 95 % interval of a mean over runs, of `values` (draws + 1, n) with the measured ones first.

    `orders` are the class orders of the runs (default: all differ). `alike`: each order weighs the same in the mean,
    instead of each run.
    """
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


def _measured(run: RunRecord) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.bool_]]:
    """Rows of the test pictures in rising order, the weight of each in A_B (1/(tasks · pictures of its task)), and
    whether it was right."""
    tasks, rows, right = read_outcomes(run.folder)
    order = np.argsort(rows, kind="stable")
    _, task, sizes = np.unique(tasks[order], return_inverse=True, return_counts=True)
    return rows[order], 1.0 / (len(sizes) * sizes[task]), right[order]


def order_means(values: Sequence[tuple[str, float]]) -> list[float]:
    """The mean of each class order, over its seeds.

    Examples:
        >>> order_means([("seed:1", 1.0), ("seed:1", 3.0), ("seed:2", 5.0)])
        [2.0, 5.0]
    """
    return [fmean(value for own, value in values if own == order) for order in dict.fromkeys(own for own, _ in values)]


def paired(better: Sequence[RunRecord], worse: Sequence[RunRecord]) -> list[tuple[RunRecord, RunRecord]]:
    """Runs of the two with the same class order and seed."""
    others = {(run.order, run.seed): run for run in worse}
    return [(run, others[run.order, run.seed]) for run in better if (run.order, run.seed) in others]
