"""A full disk, a folder that cannot be written, a file taken away, two runs in one folder: one line, nothing lost."""

import errno
import os
import shutil
from pathlib import Path

import pytest

import clipcil
from clipcil import storage
from clipcil.classifier import export
from clipcil.errors import UserError
from clipcil.storage import run_lock, whole_file, write_text
from support.processes import files_of_at_most
from support.short_runs import Killed, Runner, Told, digest, tree


def test_no_room_for_a_checkpoint_is_one_line_and_the_older_one_stays_whole(
    runner: Runner, stopped: Path, whole: Path
) -> None:
    older = {name: data for name, data in tree(stopped / "checkpoint").items() if name.startswith("task-")}
    assert older
    with files_of_at_most(20_000), pytest.raises(UserError, match=r"cannot write .*File too large") as caught:
        runner.run("rapf", stopped, resume=True)
    assert "\n" not in str(caught.value)
    assert older.items() <= tree(stopped / "checkpoint").items()
    assert not list(stopped.rglob(".tmp"))
    runner.run("rapf", stopped, resume=True)  # there is room again
    assert digest(stopped) == digest(whole)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_whatever_the_disk_says_is_one_line_and_the_old_file_stays(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_text(path, "old")
    for name in ("fsync", "open"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(number))
            with pytest.raises(UserError, match=f"cannot write {path}: {os.strerror(number)}"):
                write_text(path, "new")
        assert tree(tmp_path) == {"results.json": b"old"}
    with pytest.raises(Killed), whole_file(path) as part:
        part.write_text("half")
        raise Killed
    assert tree(tmp_path) == {"results.json": b"old"}


def test_no_room_for_an_export_leaves_the_old_one_or_no_folder(
    made: clipcil.Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_trace", lambda *args: bytes(100))
    export.export(made, tmp_path / "old")
    before = tree(tmp_path)
    monkeypatch.setattr(export, "_trace", lambda *args: bytes(100_000))
    for folder in (tmp_path / "old", tmp_path / "new" / "folder"):
        with files_of_at_most(50_000), pytest.raises(UserError, match=r"cannot write .*model.pt2: File too large"):
            export.export(made, folder)
    assert tree(tmp_path) == before and not (tmp_path / "new").exists()


def test_an_export_waits_for_no_other_and_deletes_what_a_killed_one_left(
    made: clipcil.Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "_trace", lambda *args: bytes(100))
    (tmp_path / ".tmp").mkdir()
    (tmp_path / ".tmp" / "0123456789abcdef").write_bytes(b"half")
    with run_lock(tmp_path), pytest.raises(UserError, match="is in use by another process"):
        export.export(made, tmp_path)
    export.export(made, tmp_path)
    assert tree(tmp_path).keys() == {"classes.json", "classifier.safetensors", "model.pt2"}


def failing(number: int) -> object:
    def fail(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_a_folder_that_cannot_be_written_or_a_refused_start_leaves_no_folder(runner: Runner, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"cannot write to .*Not a directory"):
        runner.run("rapf", tmp_path / "file" / "run")
    with pytest.raises(UserError, match="is neither natural"):
        runner.run("rapf", tmp_path / "run", order="no-such-file")
    assert tree(tmp_path) == {"file": b"mine"} and not (tmp_path / "run").exists()


def test_no_room_for_the_lock_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.FileLock, "acquire", failing(errno.ENOSPC))
    with pytest.raises(UserError, match=r"cannot write to .*No space left"), run_lock(tmp_path / "a" / "b"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_second_run_into_one_folder_is_refused(runner: Runner, stopped: Path) -> None:
    before = tree(stopped)
    with run_lock(stopped), pytest.raises(UserError, match="is in use by another process"):
        runner.run("rapf", stopped, resume=True)
    assert tree(stopped) == before


def test_a_log_taken_away_does_not_stop_the_run(runner: Runner, stopped: Path, whole: Path) -> None:
    (stopped / "steps.jsonl").unlink()
    told = Told()
    runner.run("rapf", stopped, resume=True, display=told)
    assert any("steps.jsonl was removed or truncated" in line for line in told.lines)
    same = ("results.json", "matrix.csv", "predictions.csv")
    assert digest(stopped, same) == digest(whole, same)
    assert b"\0" not in (stopped / "steps.jsonl").read_bytes()


def test_the_run_folder_taken_away_in_mid_run_is_one_line(runner: Runner, out: Path) -> None:
    class Thief(Told):
        def end_task(self, results: object) -> None:
            shutil.rmtree(out)

    with pytest.raises(UserError, match=r"cannot write .*steps.jsonl: No such file"):
        runner.run("rapf", out, display=Thief())


def test_results_taken_away_are_made_again(runner: Runner, out: Path, whole: Path) -> None:
    runner.run("rapf", out)
    (out / "results.json").unlink()
    (out / "matrix.csv").write_text("damaged")
    runner.run("rapf", out, resume=True)
    assert digest(out) == digest(whole)
