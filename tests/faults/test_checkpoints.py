"""A damaged checkpoint is named and left aside; a checkpoint of another run is refused with the difference."""

import shutil
from pathlib import Path

import pytest
import torch

from clipcil.errors import UserError
from clipcil.tensor_store import TensorStore, read_entry
from support.short_runs import Killed, Runner, Told, digest, stop_after


def find(run: Path, key: str) -> Path:
    """The file of a checkpoint."""
    (path,) = TensorStore(run / "checkpoint").paths(key)
    return path


def stages(run: Path) -> list[Path]:
    return list((run / "checkpoint" / "stages").glob("*.safetensors"))


def overwrite(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(runner: Runner, stopped: Path, whole: Path) -> None:
    overwrite(find(stopped, "task-0002"))
    told = Told()
    runner.run("rapf", stopped, resume=True, display=told)
    assert [line for line in told.lines if "task-0002" in line and "going back" in line], told.lines
    assert "continuing after task 1 of 3" in told.lines
    assert digest(stopped) == digest(whole)


@pytest.mark.parametrize("every", [False, True], ids=["a stage", "every file"])
def test_a_damaged_entry_is_computed_again(every: bool, runner: Runner, stopped: Path, whole: Path) -> None:
    for path in (stopped / "checkpoint").rglob("*.safetensors") if every else stages(stopped)[:1]:
        overwrite(path)
    runner.run("rapf", stopped, resume=True)
    assert digest(stopped) == digest(whole)


def test_a_stage_before_one_that_is_kept_can_be_trained_again(runner: Runner, tmp_path: Path) -> None:
    runner.run("dmc", tmp_path / "whole")
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2)  # both stages of the first task
        runner.run("dmc", tmp_path / "cut")
    overwrite(sorted(stages(tmp_path / "cut"))[0])
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
    method: str, changes: dict[str, str], difference: str, runner: Runner, stopped: Path, tmp_path: Path
) -> None:
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 2 if method == "simplecil" else 4)
        runner.run(method, tmp_path / "other", **changes)
    find(stopped, "task-0002").unlink()
    shutil.copy(find(tmp_path / "other", "task-0002"), stopped / "checkpoint")
    before = digest(stopped, ("config.toml", "steps.jsonl"))
    with pytest.raises(UserError, match=difference) as caught:
        runner.run("rapf", stopped, resume=True)
    assert "belongs to another run" in str(caught.value)
    assert digest(stopped, ("config.toml", "steps.jsonl")) == before


@pytest.mark.parametrize("key", ["backbone", "dataset", "name"])
def test_other_weights_or_pictures_and_another_name_are_refused(key: str, runner: Runner, stopped: Path) -> None:
    path = find(stopped, "task-0002")
    tensors, facts = read_entry(path)
    if key == "name":
        path.rename(path.with_name(path.name.replace("task-0002", "task-0003")))
    else:
        facts["belongs"][key] = "other" if key == "backbone" else {**facts["belongs"]["dataset"], "train": "other"}
        TensorStore(stopped / "checkpoint").save("task-0002", tensors, facts)
    said = "is not the checkpoint after task" if key == "name" else f"its {key}.* is other"
    with pytest.raises(UserError, match=said):
        runner.run("rapf", stopped, resume=True)


def test_other_files_beside_the_checkpoints_stay(runner: Runner, stopped: Path, whole: Path) -> None:
    place = find(stopped, "task-0002")
    others = [place.with_name(place.name.replace("task-0002", key)) for key in ("other", "task-x")]
    for path in others:
        shutil.copy(place, path)
    runner.run("rapf", stopped, resume=True)
    assert digest(stopped) == digest(whole) and all(path.exists() for path in others)


def test_a_stage_of_another_run_is_not_taken(runner: Runner, stopped: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 5)
        runner.run("rapf", tmp_path / "other", seed=1)
    stages(stopped)[0].unlink()
    shutil.copy(stages(tmp_path / "other")[0], stopped / "checkpoint" / "stages")
    runner.run("rapf", stopped, resume=True)
    assert digest(stopped) == digest(whole)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_checkpoint_never_holds_a_nan(value: float, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training diverged: 'w' holds a NaN or an infinity"):
        TensorStore(tmp_path).save("x", {"w": torch.tensor([1.0, value])})
    assert list(tmp_path.iterdir()) == []
