"""A checkpoint that is damaged is named and left aside; one of another run is refused with the difference."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from clipcil.experiment.checkpoint import CheckpointFolder, SnapshotFolder, load_tensors, save_tensors
from short_runs import Killed, Runner, Told, digest, stop_after

from clipcil.errors import UserError
from clipcil.files import sha256
from clipcil.training.trainer import Snapshot


@pytest.fixture(scope="module")
def whole(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    runner.run("rapf", out)
    return out


@pytest.fixture(scope="module")
def stopped(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Killed when two tasks and the first epoch of the third were kept."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 7)
        runner.run("rapf", out)
    assert (out / "checkpoint/stages-0002/00-adapter-0001.safetensors").is_file()
    return out


@pytest.fixture
def copy(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "copy"))


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "one bit": overwrite,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
    "a pickle": lambda path: path.write_bytes(b"\x80\x04\x95\x05\x00\x00\x00."),
}


@pytest.mark.parametrize("part", ["safetensors", "json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    damage: str, part: str, runner: Runner, copy: Path, whole: Path
) -> None:
    DAMAGE[damage](copy / f"checkpoint/task-0002.{part}")
    told = Told()
    runner.run("rapf", copy, resume=True, display=told)
    assert [line for line in told.lines if "task-0002" in line and "going back" in line], told.lines
    assert "going on after task 1 of 3" in told.lines
    assert digest(copy) == digest(whole)


@pytest.mark.parametrize("part", ["safetensors", "json"])
def test_a_damaged_snapshot_is_named_and_its_stage_trained_again(
    part: str, runner: Runner, copy: Path, whole: Path
) -> None:
    overwrite(copy / f"checkpoint/stages-0002/00-adapter-0001.{part}")
    told = Told()
    runner.run("rapf", copy, resume=True, display=told)
    assert any("00-adapter-0001" in line for line in told.lines)
    assert digest(copy) == digest(whole)


def test_with_every_checkpoint_damaged_it_starts_from_the_beginning(runner: Runner, copy: Path, whole: Path) -> None:
    for path in (copy / "checkpoint").rglob("*.safetensors"):
        path.write_bytes(b"?")
    runner.run("rapf", copy, resume=True)
    assert digest(copy) == digest(whole)


def test_an_earlier_stage_that_is_damaged_takes_the_later_ones_with_it(runner: Runner, tmp_path: Path) -> None:
    """Otherwise the log would have a hole where the later stage was."""
    runner.run("dmc", tmp_path / "whole")
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3)  # both epochs of stage 1, one of stage 2
        runner.run("dmc", tmp_path / "cut")
    overwrite(tmp_path / "cut/checkpoint/stages-0000/00-stage1-0002.safetensors")
    runner.run("dmc", tmp_path / "cut", resume=True)
    assert digest(tmp_path / "cut") == digest(tmp_path / "whole")


@pytest.mark.parametrize(
    ("method", "changes", "difference"),
    [
        ("simplecil", {}, "its config.run.method is simplecil, not rapf"),
        ("rapf", {"seed": 1}, "its config.run.seed is 1, not 0"),
        ("rapf", {"order": "natural"}, r"its classes\[\d\] is .*, not "),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_with_the_difference(
    method: str, changes: dict[str, str], difference: str, runner: Runner, copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2 if method == "simplecil" else 6)
        runner.run(method, tmp_path / "other", **changes)
    for part in ("safetensors", "json"):
        shutil.copy(tmp_path / f"other/checkpoint/task-0002.{part}", copy / f"checkpoint/task-0002.{part}")
    before = digest(copy, ("config.toml", "steps.jsonl"))
    with pytest.raises(UserError, match=difference) as caught:
        runner.run("rapf", copy, resume=True)
    assert "task-0002.safetensors belongs to another run" in str(caught.value)
    assert digest(copy, ("config.toml", "steps.jsonl")) == before


def test_other_weights_or_other_pictures_are_refused(runner: Runner, copy: Path) -> None:
    path = copy / "checkpoint/task-0002.json"
    facts = json.loads(path.read_text())
    for key, expected in (("backbone", "its backbone is other"), ("dataset", "its dataset.train is other")):
        changed = json.loads(json.dumps(facts))
        changed["belongs"][key] = "other" if key == "backbone" else {**facts["belongs"]["dataset"], "train": "other"}
        path.write_text(json.dumps(changed))
        with pytest.raises(UserError, match=expected):
            runner.run("rapf", copy, resume=True)


def test_a_renamed_checkpoint_is_refused(runner: Runner, copy: Path) -> None:
    for part in ("safetensors", "json"):
        (copy / f"checkpoint/task-0002.{part}").rename(copy / f"checkpoint/task-0003.{part}")
    with pytest.raises(UserError, match="after task 2; it was renamed"):
        runner.run("rapf", copy, resume=True)


def test_a_snapshot_of_another_run_is_left_aside(runner: Runner, copy: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 7)
        runner.run("rapf", tmp_path / "other", seed=1)
    shutil.rmtree(copy / "checkpoint/stages-0002")
    shutil.copytree(tmp_path / "other/checkpoint/stages-0002", copy / "checkpoint/stages-0002")
    told = Told()
    runner.run("rapf", copy, resume=True, display=told)
    assert any("belongs to another run" in line for line in told.lines)
    assert digest(copy) == digest(whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_never_holds_a_nan(value: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training diverged: 'w' holds a NaN or an infinity"):
        save_tensors(tmp_path / "x.safetensors", {"w": torch.tensor([1.0, value])}, {})
    assert list(tmp_path.iterdir()) == []


def test_the_manifest_holds_the_checksum(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_tensors(path, {"w": torch.arange(3.0), "n": torch.tensor(2)}, {"tasks": 1})
    tensors, facts = load_tensors(path)
    assert facts == {"tasks": 1, "sha256": sha256(path)}
    assert torch.equal(tensors["w"], torch.arange(3.0))
    assert tensors["n"].shape == ()


def test_nothing_a_run_writes_is_ever_unpickled() -> None:
    """Two readers of foreign files know pickles: one through weights_only, the other with a list of what is allowed."""
    source = Path(__file__).parents[2] / "src"
    texts = {path.name: path.read_text() for path in source.rglob("*.py")}
    assert {name for name, text in texts.items() if re.search(r"^\s*(import|from) pickle", text, re.M)} <= {
        "cifar_pickle.py"
    }
    assert "def find_class" in texts.get("cifar_pickle.py", "def find_class")
    for text in texts.values():
        assert text.count("torch.load(") <= text.count("weights_only=True")


def test_snapshots_of_more_than_ten_thousand_epochs_are_found_and_dropped(tmp_path: Path) -> None:
    snapshots = SnapshotFolder(tmp_path, lambda line: None)
    for epoch in (9_998, 9_999, 10_000, 10_001):
        snapshots.save(0, 0, "train", Snapshot(epoch, {"weight": torch.zeros(1)}), log_size=epoch)
        found = snapshots.load(0, 0)
        assert found is not None and (found[0].epoch, found[1]) == (epoch, epoch)
    kept = {path.name for path in (tmp_path / "stages-0000").glob("*.safetensors")}
    assert kept == {"00-train-10000.safetensors", "00-train-10001.safetensors"}
    snapshots.save(0, 0, "train", Snapshot(9_999, {"weight": torch.zeros(1)}), log_size=0)  # trained again from here
    assert [path.name for path in (tmp_path / "stages-0000").glob("*.safetensors")] == ["00-train-9999.safetensors"]


def test_checkpoints_of_more_than_ten_thousand_tasks_are_found_newest_first(tmp_path: Path) -> None:
    for task in (9_999, 10_000, 10_001):
        (tmp_path / f"task-{task}.json").touch()
    (tmp_path / "task-notes.txt").touch()
    found = [path.stem for path in CheckpointFolder(tmp_path, {})._paths()]
    assert found == ["task-10001", "task-10000", "task-9999"]
