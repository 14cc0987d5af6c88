"""Sweeps: the runs they consist of, what they reuse, and the curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipcil.errors import UserError
from clipcil.experiment.grid import plan, plan_sweep
from clipcil.experiment.spec import Grid
from clipcil.report.compare import MeanStd
from clipcil.report.figures import Curve, save_sweep


def test_each_value_is_a_run_and_symbols_of_the_paper_are_names() -> None:
    planned = plan_sweep("dmc-ot", "λ", ["0", "0.5"], Grid(seeds=2))
    assert [(each.label, each.config.ortho, each.spec.seed) for each in planned] == [
        ("0", 0.0, 0), ("0", 0.0, 1), ("0.5", 0.5, 0), ("0.5", 0.5, 1),
    ]  # fmt: skip


def test_options_of_the_run_can_be_swept_and_without_values_those_of_the_study_are_taken() -> None:
    planned = plan_sweep("simplecil", "tasks", ["5", "10", "20"], Grid())
    assert [each.spec.tasks for each in planned] == [5, 10, 20]
    planned = plan_sweep("dmc-ot", "M", [], Grid())
    assert [each.config.prompt_length for each in planned] == [1, 2, 5, 10, 16, 20]


def test_a_sweep_reuses_what_a_bench_has_done() -> None:
    (usual,) = plan(Grid(methods=("dmc-ot",)))
    swept = plan_sweep("dmc-ot", "beta", ["1.5", f"{usual.config.beta:g}"], Grid())
    assert [each.folder == usual.folder for each in swept] == [False, True]


@pytest.mark.parametrize(
    ("key", "values", "more", "named"),
    [
        ("betta", ["1", "2"], {}, "'beta'"),
        ("beta", ["1"], {}, "two values of 'beta'"),
        ("beta", ["1", "big"], {}, "'beta' is 'big'"),
        ("tasks", ["5", "five"], {}, "'tasks' is 'five'"),
        ("max_replay", [], {}, "two values of 'max_replay'"),
        ("order", ["seed:1", "seed:2"], {"orders": ("seed:3",)}, "--orders"),
        ("tasks", ["5", "10"], {"run": {"increment": "20"}}, "--increment"),
        ("test_sample", ["5", "10"], {"run": {"test_sample": "20"}}, "--test-sample"),
        ("β", ["0", "1"], {"set": ("prompt_length=3", "beta = 0.5")}, "--set beta = 0.5"),
    ],
)
def test_wrong_words_are_refused(key: str, values: list[str], more: dict[str, Any], named: str) -> None:
    """So are options that say otherwise."""
    with pytest.raises(UserError) as caught:
        plan_sweep("dmc-ot", key, values, Grid(**more))
    assert named in str(caught.value)


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    points = [(value, MeanStd(50 + i, 1.0), MeanStd(60 + i, None)) for i, value in enumerate(("10", "0", "0.5"))]
    save_sweep([Curve("emoji", points), Curve("cifar100", points[:2])], "title", "beta", tmp_path / "a" / "curve.png")
    image = Image.open(tmp_path / "a" / "curve.png").convert("RGB")
    assert image.width > 600
    colours = {colour for _, colour in image.getcolors(maxcolors=10**6)}
    assert {(213, 94, 0), (0, 114, 178)} <= colours, "a line of its own colour for each dataset"
