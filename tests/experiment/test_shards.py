"""Checkpoints of a growing memory write only what is new."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from clipcil.errors import UserError
from clipcil.experiment import shards
from clipcil.experiment.checkpoint import CheckpointFolder


class Growing(torch.nn.Module):
    """Stands for a method whose memory grows by 10 rows a task."""

    tunes_tower, name = False, "growing"

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.sizes: list[int] = []
        self.register_buffer("rows", torch.zeros(0, 3))

    def grow(self, names: list[str]) -> None:
        self.names += names
        self.sizes.append(len(names))
        self.rows = torch.cat([self.rows, torch.zeros(10, 3)])

    def learn(self) -> None:
        self.grow([f"class {len(self.names)}"])
        self.rows[-10:] = torch.randn(10, 3)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "ROWS", 16)


def learnt(folder: Path, tasks: int) -> tuple[Growing, list[dict[str, int]]]:
    torch.manual_seed(0)
    checkpoints, method, listing = CheckpointFolder(folder, {"run": 1}), Growing(), []
    for task in range(1, tasks + 1):
        method.learn()
        checkpoints.save(task, method, {})  # type: ignore[arg-type]
        listing.append({path.name: path.stat().st_mtime_ns for path in (folder / "shards").glob("*")})
    return method, listing


def restored(folder: Path) -> Growing:
    checkpoints, fresh = CheckpointFolder(folder, {"run": 1}), Growing()
    found = checkpoints.newest(lambda line: None)
    assert found is not None
    checkpoints.restore(found, fresh)  # type: ignore[arg-type]
    return fresh


def test_a_shard_is_written_once_and_the_state_comes_back(tmp_path: Path) -> None:
    method, listing = learnt(tmp_path, 9)
    assert [len(files) for files in listing] == [0, 1, 1, 2, 3, 3, 4, 5, 5]
    for before, after in pairwise(listing):
        assert all(after[name] == time for name, time in before.items())  # none was written again
    assert torch.equal(restored(tmp_path).rows, method.rows)
    last = (tmp_path / "task-0009.safetensors").stat().st_size
    assert last < 10_000  # most of it is the random state; the rows are in the shards


def test_a_damaged_or_missing_shard_is_named_and_the_checkpoint_before_used(tmp_path: Path) -> None:
    learnt(tmp_path, 8)
    newest = max((tmp_path / "shards").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    told: list[str] = []
    found = CheckpointFolder(tmp_path, {"run": 1}).newest(told.append)
    assert found is not None and found.tasks == 7 and newest.name in told[0]


def test_shards_that_nothing_names_are_deleted_and_other_files_are_not(tmp_path: Path) -> None:
    learnt(tmp_path, 4)
    (tmp_path / "shards" / ("0" * 64 + ".safetensors")).write_bytes(b"old")
    (tmp_path / "shards" / "mine.txt").write_text("mine")
    shards.keep_only(tmp_path / "shards", [])
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("table", [{"rows": ["../../etc"]}, {"other": ["a" * 64]}, ["x"], {"rows": "a" * 64}])
def test_a_hostile_table_is_refused(table: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        shards.join(tmp_path / "shards", {"rows": torch.zeros(2, 3)}, table)
