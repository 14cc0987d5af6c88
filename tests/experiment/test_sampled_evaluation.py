"""Measuring old tasks on a fixed sample of their test pictures."""

from __future__ import annotations

import numpy as np

import clipcil


def results(**options: object) -> clipcil.experiment.results.Results:  # type: ignore[name-defined]
    experiment = clipcil.Experiment("simplecil", data="emoji", tasks=4, device="cpu", **options)
    for task in experiment:
        experiment.learn(task)
    return experiment.results


def test_old_tasks_are_sampled_and_the_end_is_whole() -> None:
    whole, sampled = results(), results(test_sample=10)
    assert [sum(record.total) for record in whole.records] == [50, 100, 150, 200]
    assert [sum(record.total) for record in sampled.records] == [50, 60, 70, 200]
    assert sampled.last == whole.last and sampled.per_class == whole.per_class
    assert np.array_equal(np.diag(sampled.matrix), np.diag(whole.matrix))  # the newest task is measured whole
    assert all(value * 10 % 100 == 0 for value in sampled.matrix[2, :2])  # shares of ten pictures
