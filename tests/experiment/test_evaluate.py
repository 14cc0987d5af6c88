"""The field's numbers by hand; drift is nothing where nothing moved; evaluation on a sample or on held-out pictures."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import clipcil
from clipcil.checks import Fixture, some_classes
from clipcil.cli import main
from clipcil.clip import CLIP
from clipcil.experiment.evaluate import Record, class_drift, copy_memory, measure_drift
from clipcil.experiment.results import Results
from clipcil.memory.gaussians import AffineMap, GaussianMemory
from clipcil.methods.dmc import DMCOT
from clipcil.report.compare import group_runs
from clipcil.report.runs import NUMBERS, find_runs


@pytest.mark.parametrize(
    ("sizes", "correct", "total", "numbers"),
    [
        # Class 0 has 4 test pictures, class 1 has 6, class 2 has 5: 70 % of the first task, then 50 % and 80 %.
        ([2, 1], [[4, 3], [2, 3, 4]], [4, 6, 5], (65, 67.5, 60, 65, 20, -20)),
        # Forgetting is measured from the best, backward transfer from the first.
        ([1, 1, 1], [[1], [9, 5], [4, 5, 5]], [10] * 3, (140 / 3, 380 / 9, 140 / 3, 380 / 9, 25, 15)),
        ([2], [[1, 1]], [2, 2], (50, 50, 50, 50, 0, 0)),  # one task has nothing to forget
        ([1, 1], [[0], [0, 3]], [0, 4], (75, 37.5, 75, 75, 0, 0)),  # a class without test pictures
    ],
)
def test_the_numbers_of_the_field(
    sizes: list[int], correct: list[list[int]], total: list[int], numbers: tuple[float, ...]
) -> None:
    records = [Record(right, total[: len(right)], []) for right in correct]
    found = Results({}, [f"class {index}" for index in range(len(total))], sizes, records, [None] * len(records), [])
    assert [getattr(found, name) for name in NUMBERS] == pytest.approx(numbers)
    if sizes == [2, 1]:
        assert np.allclose(found.matrix, [[70, math.nan], [50, 80]], equal_nan=True)
    shares = [100 * right / count if count else math.nan for right, count in zip(correct[-1], total, strict=True)]
    assert np.array_equal(list(found.per_class.values()), shares, equal_nan=True)


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
    with fixture.stream.trained(0, 4, 9) as part:
        assert torch.bincount(part.labels).tolist() == [4, 4, 4, 4]
    with fixture.stream.trained(0, 100, 9) as part:
        assert len(part) == 24
    with fixture.stream.trained(0, 100, 2) as part:
        assert part.labels.tolist() == [0] * 6 + [1] * 6


def results(**options: object) -> Results:
    experiment = clipcil.Experiment("simplecil", data=some_classes(20), tasks=4, device="cpu", **options)
    for task in experiment:
        experiment.learn(task)
    return experiment.results


def test_old_tasks_are_sampled_and_the_end_is_whole() -> None:
    whole, sampled = results(), results(test_sample=5)
    assert [sum(record.total) for record in whole.records] == [10, 20, 30, 40]
    assert [sum(record.total) for record in sampled.records] == [10, 15, 20, 40]
    assert sampled.last == whole.last and sampled.per_class == whole.per_class
    assert np.array_equal(np.diag(sampled.matrix), np.diag(whole.matrix))  # the newest task is measured whole
    assert all(value % 20 == 0 for value in sampled.matrix[2, :2])  # shares of five pictures


def test_the_test_pictures_take_no_part_where_pictures_are_held_out(tmp_path: Path) -> None:
    data = some_classes(10)
    blind = replace(data, test=data.test.subset(data.test.labels[:0]))  # none at all
    found = {}
    for name, given in (("whole", data), ("blind", blind)):
        experiment = clipcil.Experiment("simplecil", data=given, tasks=5, hold_out=2, device="cpu")
        found[name] = experiment.run(tmp_path / name)
    assert np.array_equal(found["whole"].matrix, found["blind"].matrix, equal_nan=True)
    assert sum(found["blind"].records[-1].total) == 2 * len(data.classes)
    assert any("held-out training pictures" in note for note in found["blind"].notes)


def test_folds_by_seed_and_a_report_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--methods", "simplecil", "--data", "emoji", "--tasks", "5", "--out", str(tmp_path)]
    main([*words, "--hold-out", "1", "--seeds", "2"])
    assert "1 held-out training pictures per class" in capsys.readouterr().out
    main([*words, "--quiet"])
    runs = find_runs([tmp_path])
    assert len({run.last for run in runs}) == len(runs) == 3
    main(["report", str(tmp_path), "--out", str(tmp_path / "report.html")])
    page = (tmp_path / "report.html").read_text()
    assert "1 held-out training pictures per class" in page and "100 held-out training pictures" in page
    held_out = next(group for group in group_runs(runs) if len(group.runs) == 2)
    assert held_out.paper_result() is None, "the paper's numbers are of test pictures"
