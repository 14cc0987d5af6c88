"""The metrics of class-incremental learning, from the number of correct predictions for each class after each task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Metrics:
    """Accuracies in percent. R[k, i] is that on task i after learning task k (NaN where i > k)."""

    matrix: NDArray[np.float64]
    after: list[float]
    """A_k of each task: the mean over tasks seen of R[k, i]."""
    after_weighted: list[float]
    """The same over pictures instead of tasks."""
    last: float
    """A_B = 1/K Σ_i R[K, i], as the paper defines it."""
    average: float
    """Ā: the mean of A_k over all tasks."""
    last_weighted: float
    average_weighted: float
    forgetting: float
    """Mean over tasks but the last of best R so far − R at the end."""
    backward_transfer: float
    """Mean over tasks but the last of R at the end − R when learnt."""
    per_class: list[float]
    """Accuracy of each class at the end (NaN for a class without test pictures)."""


def compute_metrics(sizes: Sequence[int], correct: Sequence[Sequence[int]], total: Sequence[Sequence[int]]) -> Metrics:
    """The metrics of a run.

    Args:
        sizes: Classes per task.
        correct: `correct[k][c]`, correct predictions of class c after task k.
        total: `total[k][c]`, test pictures of class c that were measured after task k.
    """
    count = len(correct)
    bounds = np.cumsum([0, *sizes])
    matrix = np.full((count, count), np.nan)
    weighted = []
    for k, (right, measured) in enumerate(zip(correct, total, strict=True)):
        hits, totals = np.asarray(right, dtype=np.float64), np.asarray(measured, dtype=np.float64)
        for i in range(k + 1):
            inside = slice(bounds[i], bounds[i + 1])
            matrix[k, i] = 100 * _ratio(hits[inside].sum(), totals[inside].sum())
        weighted.append(100 * _ratio(hits[: bounds[k + 1]].sum(), totals[: bounds[k + 1]].sum()))
    after = [_mean(matrix[k, : k + 1]) for k in range(count)]
    final = matrix[-1]
    old = range(count - 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        per_class = 100 * np.asarray(correct[-1], dtype=np.float64) / totals[: len(correct[-1])]
    return Metrics(
        matrix=matrix,
        after=after,
        after_weighted=weighted,
        last=after[-1],
        average=_mean(after),
        last_weighted=weighted[-1],
        average_weighted=_mean(weighted),
        forgetting=_mean([float(np.nanmax(matrix[i:-1, i])) - final[i] for i in old if not np.isnan(final[i])]),
        backward_transfer=_mean([final[i] - matrix[i, i] for i in old]),
        per_class=[float(value) for value in per_class],
    )


def _ratio(part: float, whole: float) -> float:
    return float(part / whole) if whole else float("nan")


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    known = [float(value) for value in values if not np.isnan(value)]
    return sum(known) / len(known) if known else 0.0
