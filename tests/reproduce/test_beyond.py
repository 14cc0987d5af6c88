"""The comparison is paired by class order and seed."""

import math
from pathlib import Path

import pytest

from clipcil.errors import UserError
from clipcil.report.runs import find_runs
from reproduce.beyond import above, collect, table

ROOT = Path(__file__).parents[2]


def test_differences_are_paired_by_order_and_seed_and_seeds_of_one_order_count_once() -> None:
    ours = {("seed:1", 0): 80.0, ("seed:2", 0): 60.0, ("seed:3", 0): 50.0}
    theirs = {("seed:2", 0): 58.0, ("seed:1", 0): 76.0, ("seed:9", 0): 99.0}
    assert above(ours, theirs) == (3.0, pytest.approx(1.0), 2)
    assert above(ours, {})[2] == 0
    ours = {(order, seed): 70.0 for order in ("seed:1", "seed:2") for seed in (0, 1)}
    theirs = {("seed:1", 0): 69.0, ("seed:1", 1): 67.0, ("seed:2", 0): 66.0, ("seed:2", 1): 66.0}
    assert above(ours, theirs) == (3.0, 1.0, 2)
    one = {key: value for key, value in theirs.items() if key[0] == "seed:1"}
    mean, error, count = above(ours, one)
    assert (mean, count) == (2.0, 1) and math.isnan(error), "two seeds of one order say nothing about orders"


def test_the_average_is_over_streams_not_runs() -> None:
    one, two = ("seed:1", 0), ("seed:2", 0)
    found = {
        ("emoji", 10): {"strata": {one: 80.0, two: 80.0}, "other": {one: 70.0, two: 70.0}},
        ("cub200", 20): {"strata": {one: 30.0}, "other": {one: 32.0}},
    }
    lines = table(found, "strata").splitlines()
    assert lines[2].startswith("| strata | 30.0 | 80.0 |")
    assert "+4.0 over 2 streams" in lines[3] and "32.0 (-2.0" in lines[3] and "70.0 (+10.0 ± 0.0, 2)" in lines[3]


def test_runs_that_share_a_name_alone_are_not_compared() -> None:
    """Two datasets of the kind `folder`: the name of their stream is the same, and their classes are not."""
    folders = [ROOT / "reproduce" / "evidence" / name for name in ("flowers", "grocery-store")]
    assert all(len(collect(find_runs([folder]))) == 1 for folder in folders)
    with pytest.raises(UserError, match="are not on the same stream of tasks"):
        collect(find_runs(folders))
