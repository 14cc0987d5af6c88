"""A run stopped at any checkpoint or stage and taken up again ends with the same bytes, for every method."""

import json
from pathlib import Path

import pytest

from clipcil.methods.registry import methods
from support.short_runs import Runner, digest


@pytest.mark.parametrize("name", sorted(methods()))
def test_killed_after_every_write_it_ends_with_the_same_bytes(name: str, runner: Runner, tmp_path: Path) -> None:
    runner.run(name, tmp_path / "whole")
    kills = runner.interrupted(name, tmp_path / "cut", lambda written: True)
    assert kills >= 3  # at least one checkpoint for each of the three tasks
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


@pytest.mark.parametrize("name", ["dmc-ot", "rapf"])
def test_killed_once_in_the_middle_it_ends_with_the_same_bytes(name: str, runner: Runner, tmp_path: Path) -> None:
    """The rest of the run follows in one process: nothing that a resumed process lacks may matter later on."""
    runner.run(name, tmp_path / "whole")
    assert runner.interrupted(name, tmp_path / "cut", lambda written: written == 4) == 1
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


def test_the_step_log_has_every_step_once(runner: Runner, out: Path) -> None:
    runner.interrupted("rapf", out, lambda written: written % 2 == 0)
    lines = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    steps = [(line["task"], line["stage"], line["epoch"], line["step"]) for line in lines]
    pictures = 12  # two classes of six
    assert steps == [
        (t, "adapter", e, s) for t in range(3) for e in range(runner.epochs) for s in range(-(-pictures // 8))
    ]


def test_stages_are_forgotten_with_their_task_and_two_checkpoints_stay(whole: Path) -> None:
    left = sorted(path.name.rpartition("-")[0] for path in (whole / "checkpoint").rglob("*.safetensors"))
    assert left == ["task-0002", "task-0003"]
