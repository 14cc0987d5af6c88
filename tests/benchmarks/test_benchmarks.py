"""Both sides of every benchmark give the same result at small sizes, and the table praises nothing it should not."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import p1_prompt_step, p3_memory
from benchmarks.harness import Row, difference, speed_table, versus
from benchmarks.p2_features_once import METHODS, OneTask, compare
from benchmarks.shapes import SMALL_TEXT, SMALL_VISION, random_clip
from clipcil.clip import CLIP
from clipcil.data.reader import Reader
from clipcil.errors import UserError

MACHINE = {"cores": 2, "threads": 2, "torch": "2.9.0", "instructions": "AVX2", "load before": 0.1, "quick": False}


@pytest.mark.parametrize("weight_gradients", [True, False])
def test_prompt_gradients(weight_gradients: bool) -> None:
    step = p1_prompt_step.Step(random_clip(SMALL_VISION, SMALL_TEXT), classes=7, length=4, batch=5)
    ours = step.ours()
    assert float(ours.abs().max()) > 0
    assert difference(ours, step.theirs(weight_gradients)) < 1e-5
    assert all(parameter.grad is None for parameter in step.clip.text.parameters())


@pytest.fixture(scope="module")
def known(tiny_clip: CLIP) -> Reader:
    return OneTask("rapf", tiny_clip).reader


@pytest.mark.parametrize("name", METHODS)
def test_features_once_or_at_every_step(name: str, tiny_clip: CLIP, known: Reader) -> None:
    settings = {"image_weight": 0.0} if name == "engine" else {}
    row = compare(name, tiny_clip, known, epochs=2, **settings)
    assert row.error is not None and row.error < 1e-3


def test_moments_after_many_maps() -> None:
    dense, ours = p3_memory.both(tasks=3, classes=6, dim=12, count=5)
    map = p3_memory.near_identity(12)
    dense.transport(map)
    ours.transport(map)
    assert p3_memory.moment_error(dense, ours) < 1e-10
    dense.covariances[2, 0, 0] *= 1.001
    assert p3_memory.moment_error(dense, ours) > 1e-5


def test_a_goal_counts_only_when_both_sides_agree() -> None:
    seconds = {"theirs": 10.0, "ours": 1.0}
    assert versus("P0", "step", seconds, 5.0, error=1e-7, tolerance=1e-5).passed is True
    assert versus("P0", "step", seconds, 5.0, error=1e-3, tolerance=1e-5).passed is False
    assert versus("P0", "step", seconds, 20.0, error=1e-7, tolerance=1e-5).passed is False
    assert versus("P0", "step", seconds).passed is None
    for wrong in (torch.tensor([1.0, float("nan")]), torch.tensor([1.0])):
        assert difference(wrong, torch.tensor([1.0, 2.0])) == float("inf")
    assert difference(torch.tensor([1.0, 4.2]), torch.tensor([1.0, 4.0])) == pytest.approx(0.05, rel=1e-5)


def test_kept_rows_in_order_with_the_goals_that_were_missed(tmp_path: Path) -> None:
    def keep(name: str, *rows: Row, **machine: object) -> None:
        content = {"machine": MACHINE | machine, "rows": [row.as_dict() for row in rows]}
        (tmp_path / f"{name}.json").write_text(json.dumps(content))

    with pytest.raises(UserError, match="no measurement"):
        speed_table(tmp_path)
    small, other = Row("S10", "a small one", "2 s", "1 s", "2.0×"), Row("S9", "another", "", "1 s", "1 s")
    features = Row("P2", "features", "9 s", "1 s", "9.0×", "≥10×", False)
    keep("1", small, features, Row("P1", "prompts", "9 s", "1 s", "9.0×", "≥5×", True, 1e-3, 1e-5), other)
    lines = speed_table(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| P1", "| P2", "| S9", "| S10"]
    assert lines[2] == "| P1 | prompts | 9 s | 1 s | 9.0×: **missed** | ≥5× |"  # the two sides do not agree
    assert "**missed**" in lines[3] and "**missed**" not in lines[4] + lines[5]
    keep("2", Row("P2", "features", "6 s", "2 s", "3.0×"), threads=1)
    text = speed_table(tmp_path)
    assert text.count("| P2 |") == 1 and "3.0×" in text
    assert "\nS10, P1, S9: 2 threads" in text and "\nP2: 1 thread on" in text
    keep("quick", other, quick=True)
    with pytest.raises(UserError, match="--quick"):
        speed_table(tmp_path)
