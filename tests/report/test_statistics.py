"""Intervals: against a bootstrap written out, against what is known, and for how often they are right."""

import csv
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from clipcil.intervals import wilson_interval
from clipcil.report.runs import RunRecord, find_runs
from clipcil.report.statistics import Bootstrap, interval, paired
from support.finished_runs import write_run


def run_of(folder: Path, tasks: list[int], right: list[bool], order: str = "seed:1", last: float = 0.0) -> RunRecord:
    """A run with these answers; picture i is of task `tasks[i]`."""
    folder.mkdir(parents=True)
    with (folder / "predictions.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["task", "row", "picture", "class", "predicted", "probability"])
        for row, (task, is_right) in enumerate(zip(tasks, right, strict=True)):
            writer.writerow([task, row, "", "a", "a" if is_right else "b", "0.5"])
    config = {"run": {"order": order, "seed": 0}, "method": {}}
    return RunRecord.model_construct(folder=folder, config=config, last=last)


def orders_of(folder: Path, rights: Iterable[list[bool]]) -> list[RunRecord]:
    """A run of one task for each of these answers, each with its own class order."""
    return [run_of(folder / str(i), [1] * len(right), right, f"seed:{i}") for i, right in enumerate(rights)]


THREE = [[index % 10 < level for index in range(200)] for level in (5, 7, 9)]
"""Answers of three class orders: 50, 70 and 90 % are right."""


def test_an_accuracy_is_the_mean_over_tasks_and_its_interval_lies_within_0_and_100(tmp_path: Path) -> None:
    """Tasks of unequal size weigh the same: A_B of the paper, not the share of right pictures."""
    run = run_of(tmp_path / "a", [1, 1, 1, 1, 2, 2], [True, True, True, False, False, True])
    mean = Bootstrap([run]).mean([run])
    assert mean is not None and mean.mean == pytest.approx(100 * (3 / 4 + 1 / 2) / 2)
    few = run_of(tmp_path / "few", [1, 1, 2], [True, True, True])  # a draw without any of them is not an accuracy of 0
    assert Bootstrap([few]).mean([few]) == pytest.approx((100, 100 * wilson_interval(8 / 3, 8 / 3)[0], 100))
    two = orders_of(tmp_path, [[True] * 20, [True] * 15 + [False] * 5])
    found = Bootstrap(two).mean(two)
    assert found is not None and (found.low, found.high) == (0, 100)  # two orders say next to nothing


@pytest.mark.parametrize("right", [True, False])
def test_nine_answers_that_agree_are_not_certain(tmp_path: Path, right: bool) -> None:
    runs = orders_of(tmp_path, [[right] * 9] * 2)
    low, high = (100 * bound for bound in wilson_interval(9 * right, 9))
    assert high - low > 25
    for some in (runs[:1], runs):  # a second run without other answers tells nothing of other pictures
        assert Bootstrap(runs).mean(some) == pytest.approx((100 * right, low, high))


def test_runs_on_other_pictures_or_without_predictions_have_no_interval_and_take_none_from_the_rest(
    tmp_path: Path,
) -> None:
    odd, one, two = orders_of(tmp_path, [[True] * size for size in (3, 4, 4)])
    empty = one.model_copy(update={"folder": tmp_path})
    bootstrap = Bootstrap([odd, one, empty, two])
    assert bootstrap.mean([odd]) is None and bootstrap.mean([one, empty]) is None and bootstrap.mean([one]) is not None
    assert bootstrap.difference([(one, odd)]) is None and bootstrap.difference([]) is None
    assert bootstrap.difference([(one, two)]) == (0, 0, 0)


def test_the_interval_is_that_of_a_bootstrap_written_out(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    count, runs = 300, 4
    levels = random.uniform(0.4, 0.9, runs)
    right = [random.random(count) < level for level in levels]
    made = orders_of(tmp_path, [each.tolist() for each in right])
    found = Bootstrap(made).mean(made)
    table = 100 * np.stack(right)
    measured, means, parts = table.mean(1), [], []
    for _ in range(4000):
        values = table[:, random.integers(0, count, count)].mean(1)
        means.append(values.mean() - measured.mean())
        parts.append(((values - values.mean() - measured + measured.mean()) ** 2).sum() / (runs - 1))
    shared = np.var(means) - np.mean(parts) / runs  # without what pictures do to single runs
    pictures = np.array(means) * (max(0, shared) / np.var(means)) ** 0.5
    drawn = measured.mean() + pictures + measured.std(ddof=1) / runs**0.5 * random.standard_t(runs - 1, 4000)
    assert found is not None and found.mean == pytest.approx(table.mean())
    low, high = stats.t.interval(0.95, runs - 1, measured.mean(), stats.sem(measured))
    assert found.low < low + 1 and found.high > high - 1  # orders are most of it here
    low, high = np.quantile(drawn, (0.025, 0.975))
    assert (found.low, found.high) == pytest.approx((max(0, low), min(100, high)), abs=2.5)


def test_pairing_takes_out_what_both_share(tmp_path: Path) -> None:
    """Two methods wrong on the same hard pictures differ by nothing, however hard the pictures are."""
    random = np.random.default_rng(0)
    hard = (random.random(200) < 0.5).tolist()
    worse = orders_of(tmp_path / "worse", [hard] * 3)
    better = orders_of(tmp_path / "better", [[*hard[:190], *[True] * 10]] * 3)
    bootstrap = Bootstrap([*worse, *better])
    same, gain = bootstrap.difference(paired(worse, worse)), bootstrap.difference(paired(better, worse))
    alone = bootstrap.mean(better)
    assert same is not None and same == (0, 0, 0)
    assert gain is not None and alone is not None and gain.high - gain.low < 0.5 * (alone.high - alone.low)


def test_the_same_runs_give_the_same_interval_in_any_company(tmp_path: Path) -> None:
    runs = find_runs([write_run(tmp_path / f"{i}", order=f"seed:{i}", tasks=10, right=0.5).parent for i in range(3)])
    assert Bootstrap(runs).mean(runs[:2]) == Bootstrap(runs[:2]).mean(runs[:2])


@pytest.mark.parametrize(("spread", "count"), [(0.0, 200), (0.02, 200), (0.05, 200), (0.02, 2000), (0.05, 2000)])
def test_how_often_the_interval_of_three_orders_holds_the_truth(spread: float, count: int) -> None:
    """Orders with a standard deviation of 0, 2 or 5 points: 95 % are aimed at, with few pictures and with many."""
    random = np.random.default_rng(1)
    hits = 0
    trials = 120
    for _ in range(trials):
        levels = 0.05 + random.normal(0, spread, 3)
        pictures = random.normal(0, 0.15, count)  # the same in all orders
        table = 100 * (levels[:, None] + pictures[None] + random.normal(0, 0.3, (3, count)))
        counts = random.poisson(1.0, (400, count)).astype(float)
        drawn = counts @ table.T / counts.sum(1, keepdims=True)
        found = interval(np.concatenate([table.mean(1)[None], drawn]))
        hits += found.low <= 5 <= found.high
    assert 0.9 * trials <= hits < trials, hits  # one that holds it always is too wide


def test_orders_that_agree_by_chance_do_not_make_the_pictures_certain(tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    rows = [random.permutation([True] * 100 + [False] * 100).tolist() for _ in range(3)]  # 50 % each, of other pictures
    made = orders_of(tmp_path, rows)
    found = Bootstrap(made).mean(made)
    assert found is not None and found.mean == 50 and 3 < found.high - found.low < 12


def test_seeds_of_one_class_order_are_no_more_orders(tmp_path: Path) -> None:
    """Four seeds that change nothing tell nothing new about orders: the interval is that of one seed."""
    once = orders_of(tmp_path / "once", THREE)
    more = [run for seed in range(4) for run in orders_of(tmp_path / str(seed), THREE)]
    bootstrap = Bootstrap([*once, *more])
    one, four = bootstrap.mean(once), bootstrap.mean(more)
    assert one is not None and four is not None and four == pytest.approx(one)
    by_seed = bootstrap.mean([run for run in more if run.order == "seed:0"])
    assert by_seed is not None and by_seed.low < by_seed.mean < by_seed.high  # seeds of a single order are runs


def test_an_order_with_more_seeds_weighs_no_more_in_a_difference(tmp_path: Path) -> None:
    *runs, other = orders_of(tmp_path, [*THREE, [False] * 200])
    bootstrap = Bootstrap([other, *runs])
    once, more = (bootstrap.difference([(run, other) for run in some]) for some in (runs, [runs[0]] * 3 + runs))
    assert once is not None and more is not None and more == pytest.approx(once) and once.mean == pytest.approx(70)


def test_a_mean_that_rests_on_one_order_most_of_all_is_less_certain() -> None:
    """Weights of 4, 1 and 1 sixths: the squares of the weights sum to a half, not to a third."""
    orders = ["a", "a", "a", "a", "b", "c"]
    found = interval(np.tile([69.0, 69.0, 69.0, 69.0, 70.0, 71.0], (2001, 1)), orders)
    assert found.mean == pytest.approx(69.5)
    assert (found.high - found.low) / 2 == pytest.approx(4.303 * 0.5**0.5, rel=0.01)
