"""Measuring on held-out training pictures, by which settings are chosen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import clipcil
from clipcil.checks import some_classes
from clipcil.cli import main
from clipcil.experiment.grid import plan
from clipcil.experiment.spec import Grid
from clipcil.report.compare import group_runs
from clipcil.report.runs import find_runs
from support.lessons import refused


def test_the_test_pictures_take_no_part(tmp_path: Path) -> None:
    data = some_classes(10)
    blind = type(data)(**{**vars(data), "test": data.test.subset(data.test.labels[:0])})  # none at all
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


def test_runs_without_it_keep_their_folders() -> None:
    """The name of a run's folder ends in a hash of its options: an option that is not given is no part of it."""
    (planned,) = plan(Grid(methods=("simplecil",), data=("emoji",)))
    assert "hold_out" not in planned.table["run"]
    (held,) = plan(Grid(methods=("simplecil",), data=("emoji",), run={"hold_out": 1}))
    assert held.folder != planned.folder


@pytest.mark.parametrize("count", ["6", "0"])
def test_a_wrong_number_is_named(count: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert count in refused(capsys, "run", "simplecil", "--hold-out", count, "--out", str(tmp_path / "run"))
