"""Finished runs as a table."""

import sys
from pathlib import Path

import pytest

import clipcil
from clipcil.report.runs import find_runs
from support.errors import one_line
from support.finished_runs import write_run


def test_rows_hold_numbers_options_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "a", "ranpac")
    write_run(tmp_path / "b", "simplecil", shots=2)
    table = clipcil.read_runs(tmp_path)
    ranpac, simple = table
    assert (simple["method"], simple["shots"], simple["folder"]) == ("simplecil", 2, str(tmp_path / "b"))
    assert simple.keys() == ranpac.keys() and simple["method.held_out"] is None and ranpac["method.held_out"] == 0.2
    assert simple["last"] == find_runs([tmp_path / "b"])[0].last and simple["finished"] == "2026-01-31"
    assert list(table.to_pandas()["last"]) == [row["last"] for row in table]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with one_line("pip install 'clipcil[pandas]'"):
        table.to_pandas()
    with one_line("nothing", "not a folder"):
        clipcil.read_runs(tmp_path / "nothing")
