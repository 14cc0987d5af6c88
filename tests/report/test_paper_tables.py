"""The paper's numbers: complete, as printed, and found for the runs they belong to."""

from statistics import fmean

import pytest

from clipcil.errors import UserError
from clipcil.paper import Row, paper_result, read_table, table_names

ROWS = [(name, row) for name in ("table1", "table2", "table3", "table4", "table5") for row in read_table(name).rows]
OT = {"calibration": "task", "task_prompt": True, "simultaneous": False}


def row_of(table: str, label: str) -> Row:
    return next(row for row in read_table(table).rows if row.label == label)


def test_every_table_is_whole() -> None:
    assert table_names() == ["claims", "sensitivity", "table1", "table2", "table3", "table4", "table5"]
    assert [len(read_table(f"table{i}").rows) for i in range(1, 6)] == [12, 12, 2, 3, 2]
    for name, row in ROWS:
        assert len(row.last) == len(read_table(name).datasets), (name, row.label)
        assert len(row.average) in (0, len(row.last)), (name, row.label)


@pytest.mark.parametrize(
    ("better", "worse", "gain"),
    [
        (("table1", "DMC"), ("table1", "PROOF"), 1.13),
        (("table1", "DMC"), ("table1", "CLAP4CLIP"), 1.98),
        (("table3", "Two-stage training"), ("table3", "Simultaneous training"), 2.91),
        (("table4", "with OT"), ("table4", "w/o OT"), 1.67),
        (("table5", "with task-augment"), ("table5", "w/o task-augment"), 0.75),
    ],
)
def test_gains_of_the_text_follow_from_the_tables(better: tuple[str, str], worse: tuple[str, str], gain: float) -> None:
    """The text of the paper states these means, so a slip in copying a table shows here."""
    assert fmean(row_of(*better).last) - fmean(row_of(*worse).last) == pytest.approx(gain, abs=0.006)


def test_a_run_finds_its_own_row() -> None:
    whole = paper_result("dmc-ot", OT, "cub200", 10)
    assert whole is not None and (whole.table, whole.last, whole.average) == ("table1", 78.11, 83.13)
    without = paper_result("dmc-ot", {**OT, "calibration": "none"}, "cub200", 10)
    assert without is not None and (without.table, without.last, without.average) == ("table4", 77.95, None)
    long = paper_result("rapf", {}, "cifar100", 20)
    assert long is not None and (long.table, long.last) == ("table2", 78.73)


@pytest.mark.parametrize(
    ("data", "tasks", "calibration"),
    [("emoji", 10, "task"), ("cub200", 20, "task"), ("cifar100", 7, "task"), ("cifar100", 10, "pairs")],
)
def test_what_the_paper_did_not_measure_has_no_number(data: str, tasks: int, calibration: str) -> None:
    assert paper_result("dmc-ot", {**OT, "calibration": calibration}, data, tasks) is None


def test_the_sensitivity_study_says_that_its_values_are_ours() -> None:
    study = read_table("sensitivity")
    assert "ours" in study.note and {row.label.split()[0] for row in study.rows} == {"M", "β", "λ"}
    assert all(not row.last and not row.average for row in study.rows)


def test_an_unknown_table_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'table1'"):
        read_table("tabel1")
