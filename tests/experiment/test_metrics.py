"""The field's numbers, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clipcil.experiment.evaluate import Record
from clipcil.experiment.results import Results


def results_of(sizes: list[int], correct: Sequence[list[int]], total: list[int]) -> Results:
    records = [Record(right, total[: len(right)], []) for right in correct]
    return Results({}, [f"class {index}" for index in range(len(total))], sizes, records, [None] * len(records), [])


def test_matrix_averages_forgetting_and_backward_transfer() -> None:
    """Two classes, then one: class 0 has 4 test pictures, class 1 has 6, class 2 has 5."""
    results = results_of([2, 1], [[4, 3], [2, 3, 4]], [4, 6, 5])
    assert np.allclose(results.matrix, [[70, math.nan], [50, 80]], equal_nan=True)
    assert math.isclose(results.last, 65)  # mean over tasks
    assert math.isclose(results.last_weighted, 100 * 9 / 15)  # over pictures
    assert math.isclose(results.average, (70 + 65) / 2)
    assert math.isclose(results.average_weighted, (70 + 60) / 2)
    assert math.isclose(results.forgetting, 20) and math.isclose(results.backward_transfer, -20)
    assert list(results.per_class.values()) == [50.0, 50.0, 80.0]


def test_forgetting_is_measured_from_the_best() -> None:
    results = results_of([1, 1, 1], [[1], [9, 5], [4, 5, 5]], [10, 10, 10])
    assert math.isclose(results.forgetting, ((90 - 40) + (50 - 50)) / 2)
    assert math.isclose(results.backward_transfer, ((40 - 10) + 0) / 2)


def test_one_task_has_nothing_to_forget() -> None:
    results = results_of([2], [[1, 1]], [2, 2])
    assert (results.last, results.average, results.forgetting, results.backward_transfer) == (50, 50, 0, 0)


def test_a_class_without_test_pictures_is_left_out() -> None:
    results = results_of([1, 1], [[0], [0, 3]], [0, 4])
    assert math.isclose(results.last, 75) and math.isnan(results.per_class["class 0"])
