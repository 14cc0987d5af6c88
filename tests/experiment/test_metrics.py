"""The field's numbers, by hand."""

from __future__ import annotations

import math

import numpy as np

from clipcil.report.metrics import compute_metrics

# Two classes, then one: class 0 has 4 test pictures, class 1 has 6, class 2 has 5.
SIZES, TOTAL = [2, 1], [4, 6, 5]
CORRECT = [[4, 3], [2, 3, 4]]


def test_matrix_and_both_averages() -> None:
    metrics = compute_metrics(SIZES, CORRECT, [TOTAL] * len(CORRECT))
    assert np.allclose(metrics.matrix[0, 0], 70)
    assert np.isnan(metrics.matrix[0, 1])
    assert np.allclose(metrics.matrix[1], [50, 80])
    assert math.isclose(metrics.last, 65)  # mean over tasks
    assert math.isclose(metrics.last_weighted, 100 * 9 / 15)  # over pictures
    assert math.isclose(metrics.average, (70 + 65) / 2)
    assert math.isclose(metrics.average_weighted, (70 + 60) / 2)


def test_forgetting_and_backward_transfer() -> None:
    metrics = compute_metrics(SIZES, CORRECT, [TOTAL] * len(CORRECT))
    assert math.isclose(metrics.forgetting, 20)
    assert math.isclose(metrics.backward_transfer, -20)
    assert metrics.per_class == [50.0, 50.0, 80.0]


def test_forgetting_is_measured_from_the_best() -> None:
    metrics = compute_metrics([1, 1, 1], [[1], [9, 5], [4, 5, 5]], [[10, 10, 10]] * 3)
    assert math.isclose(metrics.forgetting, ((90 - 40) + (50 - 50)) / 2)
    assert math.isclose(metrics.backward_transfer, ((40 - 10) + 0) / 2)


def test_one_task_has_nothing_to_forget() -> None:
    metrics = compute_metrics([2], [[1, 1]], [[2, 2]])
    assert (metrics.last, metrics.average, metrics.forgetting, metrics.backward_transfer) == (50, 50, 0, 0)


def test_a_class_without_test_pictures_is_left_out() -> None:
    metrics = compute_metrics([1, 1], [[0], [0, 3]], [[0, 4]] * 2)
    assert math.isclose(metrics.last, 75)
    assert math.isnan(metrics.per_class[0])
