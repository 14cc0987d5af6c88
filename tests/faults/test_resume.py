"""A run stopped at any checkpoint and taken up again ends with the same bytes, for every method."""

from __future__ import annotations

from pathlib import Path

import pytest
from short_runs import Runner, digest

from clipcil.methods.registry import methods


@pytest.mark.parametrize("name", sorted(methods()))
def test_killed_after_every_write_it_ends_with_the_same_bytes(name: str, runner: Runner, tmp_path: Path) -> None:
    runner.run(name, tmp_path / "whole")
    kills = runner.interrupted(name, tmp_path / "cut", lambda written: True)
    assert kills >= 3  # at least one checkpoint for each of the three tasks
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")
