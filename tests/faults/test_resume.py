"""A run stopped at any checkpoint and taken up again ends with the same bytes, for every method."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from short_runs import Killed, Runner, digest, few_classes, stop_after

from clipcil.clip import CLIP
from clipcil.experiment.checkpoint import SnapshotFolder
from clipcil.methods.registry import methods


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


def test_stages_are_forgotten_with_their_task_and_two_checkpoints_stay(runner: Runner, out: Path) -> None:
    runner.run("rapf", out)
    left = sorted(path.name for path in (out / "checkpoint").iterdir())
    assert left == ["task-0002.json", "task-0002.safetensors", "task-0003.json", "task-0003.safetensors"]


def test_short_epochs_share_a_snapshot(mini: CLIP, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing one takes longer than an epoch here: the first epoch has one and the end of the stage, and with a share
    of none the end alone; the log has every step, and the results are the same."""
    logs, written = [], []
    save = SnapshotFolder.save

    def counted(self: SnapshotFolder, *args: Any) -> None:
        written[-1] += 1
        save(self, *args)

    monkeypatch.setattr(SnapshotFolder, "save", counted)
    for share in (math.inf, 1e-9):
        monkeypatch.setattr("clipcil.experiment.monitor.SNAPSHOT_SHARE", share)
        written.append(0)
        Runner(mini, few_classes(6), epochs=5).run("rapf", out / str(share))
        logs.append(digest(out / str(share)))
    assert written == [3 * 5, 1 + 3]  # three tasks of one stage
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)  # the end of the first stage, before its checkpoint: the log is written with a snapshot
        patch.setattr("clipcil.experiment.monitor.SNAPSHOT_SHARE", 1e-9)
        Runner(mini, few_classes(6), epochs=5).run("rapf", out / "cut")
    Runner(mini, few_classes(6), epochs=5).run("rapf", out / "cut", resume=True)
    assert [*logs, digest(out / "cut")] == [logs[0]] * 3


def test_two_snapshots_of_a_stage_stay_while_it_is_trained(mini: CLIP, out: Path) -> None:
    """Killed when the fourth snapshot was written and nothing dropped for it yet: of the older ones two are there."""
    five = Runner(mini, few_classes(6), epochs=5)
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        five.run("rapf", out)
    names = sorted(path.name for path in (out / "checkpoint" / "stages-0000").glob("*.safetensors"))
    assert names == [f"00-adapter-000{epoch}.safetensors" for epoch in (2, 3, 4)]
