"""Drift is nothing where nothing moved, with a floor that a perfect calibration reaches; evaluation on a sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import clipcil
from clipcil.checks import Fixture, some_classes
from clipcil.clip import CLIP
from clipcil.experiment.evaluate import class_drift, copy_memory, measure_drift
from clipcil.experiment.results import Results
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.methods.dmc import DMCOT


def memory_of(features: torch.Tensor) -> GaussianMemory:
    memory = GaussianMemory()
    memory.add([features])
    return memory


def test_a_perfect_memory_is_at_the_floor() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(40, 8, generator=generator, dtype=torch.float64) + 2
    moved = AffineMap(torch.diag(torch.linspace(0.5, 2, 8, dtype=torch.float64)), torch.ones(8, dtype=torch.float64))
    stale, perfect = memory_of(features), memory_of(moved(features))
    found = class_drift(moved(features), stale, perfect, 0)
    assert found.cosine_floor == 0 and found.cosine_after == pytest.approx(0, abs=1e-12)
    assert found.w2_after == pytest.approx(found.w2_floor, abs=1e-6)
    assert found.cosine_before > 0.01 and found.w2_before > 2 * found.w2_floor


def test_the_floor_is_what_a_part_of_the_pictures_misses_on_average() -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(60, 30, generator=generator, dtype=torch.float64) + 2
    memory, apart, floors = memory_of(features), [], []
    for _ in range(300):
        part = features[torch.randperm(60, generator=generator)[:20]]
        found = class_drift(part, memory, memory, 0)
        apart.append(found.cosine_after)
        floors.append(found.cosine_floor)
    assert sum(apart) == pytest.approx(sum(floors), rel=0.15)


def test_against_training_pictures_and_only_as_many_as_asked_for(mini: CLIP, tmp_path: Path) -> None:
    fixture = Fixture(DMCOT, mini, some_classes(6), (4, 2), tmp_path)
    tasks = fixture.stream.tasks()
    fixture.method.learn(next(tasks))
    before = copy_memory(fixture.method)
    assert before is not None
    still = measure_drift(before, fixture.method, fixture.stream, 1)
    assert still["cosine_before"] == still["cosine_after"] == pytest.approx(0, abs=1e-6)  # these very pictures
    fixture.method.learn(next(tasks))
    found = measure_drift(before, fixture.method, fixture.stream, 1)
    assert found["cosine_before"] > still["cosine_before"]
    with fixture.stream.trained(0, 4) as part:
        assert torch.bincount(part.labels).tolist() == [4, 4, 4, 4]
    with fixture.stream.trained(0, 100) as part:
        assert len(part) == 24


def results(**options: object) -> Results:
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
