"""The table does not praise what it should not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.harness import Row, alternate, difference, table, versus


def test_a_goal_counts_only_when_both_sides_agree() -> None:
    seconds = {"theirs": 10.0, "ours": 1.0}
    assert versus("P0", "step", seconds, 5.0, error=1e-7, tolerance=1e-5).passed is True
    assert versus("P0", "step", seconds, 5.0, error=1e-3, tolerance=1e-5).passed is False
    assert versus("P0", "step", seconds, 20.0, error=1e-7, tolerance=1e-5).passed is False
    assert versus("P0", "step", seconds).passed is None


@pytest.mark.parametrize("wrong", [torch.tensor([1.0, float("nan")]), torch.tensor([1.0])])
def test_a_result_that_cannot_be_compared_is_infinitely_wrong(wrong: torch.Tensor) -> None:
    assert difference(wrong, torch.tensor([1.0, 2.0])) == float("inf")


def test_difference_is_relative_to_the_largest_entry() -> None:
    assert difference(torch.tensor([1.0, 4.2]), torch.tensor([1.0, 4.0])) == pytest.approx(0.05, rel=1e-5)


def test_sides_take_turns() -> None:
    calls: list[str] = []
    seconds = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3  # one turn to warm up
    assert set(seconds) == {"a", "b"}


def test_the_table_has_a_line_for_each_row_and_notes_under_it() -> None:
    text = table([Row("P1", "a", "2 s", "1 s", "2×", "≥5×", False, note="because"), Row("P2", "b", "", "", "")])
    assert text.count("\n| P") == 2
    assert "MISS" in text
    assert text.endswith("- P1 a: because")
