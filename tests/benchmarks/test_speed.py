"""The README's table of speed says what was measured, and what was missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import Row
from benchmarks.speed import speed_table
from clipcil.errors import UserError

MACHINE = {"cores": 2, "threads": 2, "torch": "2.9.0", "instructions": "AVX2", "load before": 0.1, "quick": False}


def keep(folder: Path, name: str, *rows: Row, **machine: object) -> None:
    folder.mkdir(exist_ok=True)
    content = {"machine": MACHINE | machine, "rows": [row.as_dict() for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_rows_in_order_with_what_was_missed(tmp_path: Path) -> None:
    keep(
        tmp_path,
        "here",
        Row("S10", "a small one", "2 s", "1 s", "2.0×"),
        Row("P2", "features", "9 s", "1 s", "9.0×", "≥10×", False),
        Row("P1", "prompts", "9 s", "1 s", "9.0×", "≥5×", True, error=1e-3, tolerance=1e-5),
        Row("S9", "another", "", "1 s", "1 s"),
    )
    lines = speed_table(tmp_path).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == ["| P1", "| P2", "| S9", "| S10"]
    assert lines[2] == "| P1 | prompts | 9 s | 1 s | 9.0×: **missed** | ≥5× |"  # the two sides do not agree
    assert "**missed**" in lines[3] and "**missed**" not in lines[4] + lines[5]
    assert lines[-1] == "2 threads on 2 cores with AVX2 instructions, load before 0.1, torch 2.9.0."


def test_a_later_file_replaces_the_rows_it_measures_again(tmp_path: Path) -> None:
    keep(tmp_path, "1", Row("P1", "prompts", "9 s", "1 s", "9.0×"), Row("P3", "memory", "8 s", "1 s", "8.0×"))
    keep(tmp_path, "2", Row("P1", "prompts", "6 s", "2 s", "3.0×"), threads=1)
    text = speed_table(tmp_path)
    assert "3.0×" in text and "8.0×" in text and "9.0×" not in text
    assert "\nP3: 2 threads" in text and "\nP1: 1 thread on" in text


def test_what_says_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no measurement"):
        speed_table(tmp_path)
    keep(tmp_path, "quick", Row("P1", "prompts", "", "", ""), quick=True)
    with pytest.raises(UserError, match="made with --quick"):
        speed_table(tmp_path)
