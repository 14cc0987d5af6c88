"""Folders of models that were made by hand, read and changed without a backbone."""

import errno
import io
import json
import os
import sys
from pathlib import Path

import pytest
import tomli_w
import torch

from clipcil.classifier.folder import read_model, restore_previous, write_model
from clipcil.classifier.learner import HeldOut
from clipcil.classifier.load import summarise
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.classifier.state import Facts, KnownClass, LessonRecord, ModelState, TaughtPictures
from clipcil.cli import main
from clipcil.commands.text import json_text
from clipcil.storage import read_toml
from support.errors import one_line


def facts(*names: str) -> Facts:
    known = [KnownClass(name, name, "2026-01-31", 2, "2026-01-31", 4, 3) for name in names]
    return Facts(method="simplecil", backbone="mini", seed=0, templates=("a {}.",), sizes=[len(known)], known=known)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "m", ModelState(facts("red", "blue"), {"x": torch.zeros(1)}))
    return tmp_path / "m"


def edit(folder: Path, change: dict[str, object]) -> None:
    (folder / "model.toml").write_text(tomli_w.dumps({**read_toml(folder / "model.toml"), **change}))


@pytest.fixture
def small(folder: Path) -> SmallPictures:
    found = SmallPictures(folder)
    found.switch(True)
    found.add("red", [b"picture"])
    return found


def test_small_pictures_behind_a_link_are_not_ours(folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / f"{'0' * 24}.json").write_text("[]")
    (folder / "small-pictures").symlink_to(mine)
    small = SmallPictures(folder)
    small.follow([])
    assert not small.on and small.count == 0 and len(list(mine.iterdir())) == 1
    for on in (True, False):
        with one_line("symbolic link"):
            small.switch(on)


def test_of_small_pictures_only_our_own_files_are_read_and_deleted(small: SmallPictures) -> None:
    small.add("gone", [b"picture"])
    (small.folder / "notes.json").write_text("[]")
    os.mkfifo(small.folder / f"{'1' * 24}.json")  # to be read from, it would have to be written to
    (small.folder / f"{'2' * 24}.json").write_text("[" * 100_000)
    assert small.count == 2
    small.follow([])
    assert small.of("red") == [b"picture"] and small.of("gone") == []
    assert (small.folder / "notes.json").exists() and len(list(small.folder.iterdir())) == 2
    with one_line("did not write"):
        small.switch(False)
    assert [path.name for path in small.folder.iterdir()] == ["notes.json"]


def test_a_lesson_does_not_switch_small_pictures_on_again(small: SmallPictures) -> None:
    """They are switched off while a lesson ends that has seen that they were on."""
    small.switch(False)
    small.add("red", [b"picture"])
    assert not small.on and not small.folder.exists()
    small.switch(False)


@pytest.mark.parametrize(
    "change",
    [
        {"lessons": 2**53},
        {"classes": [vars(KnownClass("red", "red", "", 1, "", held_out=1, right=9))]},
        {"history": [vars(LessonRecord("now", 1, 0, 1, 1, held_out=0, right=1))]},
        {"history": [vars(LessonRecord("now", 1, 0, 1, 1, held_out=1, right=-1))]},
    ],
)
def test_numbers_that_cannot_be_are_refused(folder: Path, change: dict[str, object]) -> None:
    edit(folder, {**change, "sizes": [1 if "classes" in change else 2]})
    with one_line("model.toml", "is damaged"):
        read_model(folder)


@pytest.mark.parametrize("key", [f"{HeldOut.prefix}labels", "memory.labels"])
def test_showing_weights_of_any_shape_is_one_line(folder: Path, key: str) -> None:
    told = facts("red")
    told.method = "coop"  # keeps exemplars
    write_model(folder, ModelState(told, {key: torch.tensor(1)}))
    with one_line(str(folder)):
        summarise(folder)


def test_the_accuracy_shown_is_that_of_the_classes_there_are(folder: Path) -> None:
    edit(folder, {"history": [vars(LessonRecord("now", 3, 0, 9, 3, held_out=12, right=2))]})  # before one was forgotten
    assert summarise(folder)["accuracy"] == 6 / 8


def test_names_are_no_markup_on_the_terminal_or_in_the_model_card(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long, strange = "".join(f"part{number}of" for number in range(12)), "<img src=x> *a|b* [c](d)"
    names = strange, "two\n\n# lines\u202e", "a:dog:b", "[bold]c", long
    write_model(folder, ModelState(facts(*names), {"x": torch.zeros(1)}))
    main(["show", str(folder)])
    shown = capsys.readouterr().out
    assert "a:dog:b" in shown and "[bold]c" in shown
    cells = [line.split()[0] for line in shown.partition("[bold]c")[2].splitlines()[1:] if line.strip()]
    assert "".join(cells) == long, shown
    card = (folder / "README.md").read_text()
    assert r"| \<img src=x\> \*a\|b\* \[c\](d) | 2026-01-31 | 2 |" in card
    assert card.count("\n#") == 0 and "\u202e" not in card


def test_what_later_versions_keep_of_held_out_pictures_is_passed_over() -> None:
    tensors = {**HeldOut.empty(2, 3).tensors(), f"{HeldOut.prefix}later": torch.zeros(1)}
    assert len(HeldOut.empty(2, 3).take(tensors, 1)) == 0 and not tensors


@pytest.mark.parametrize(("labels", "numbers"), [([0.0], [0]), ([0], [0.0]), ([0, 2], [0, 0]), ([0, -1], [0, 0])])
def test_checksums_that_are_damaged_are_refused(labels: list[float], numbers: list[float]) -> None:
    damaged = {"taught.labels": torch.tensor(labels), "taught.checksums": torch.tensor(numbers)}
    nothing = torch.zeros(0, dtype=torch.int64)
    with one_line("taught"):
        TaughtPictures(nothing, nothing).take(damaged, classes=2)


def test_without_room_an_undo_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(folder, ModelState(facts("red"), {"x": torch.ones(1)}), keep_previous=True)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with one_line("No space left"):
            restore_previous(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [known.name for known in restore_previous(folder).known] == ["red", "blue"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("indent", [None, 1])
def test_json_is_json_on_every_terminal(encoding: str, indent: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"name": "é 😀 \u202e\x9b\u200f\x7f\n\U000e0001", "path": "\udcff"}
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace"))
    text = json_text(value, indent)
    assert json.loads(text.encode(encoding).decode(encoding)) == value
    assert not set("\u202e\x9b\u200f\x7f\U000e0001\udcff") & set(text)
    assert ("é" in text) == (encoding != "ascii")
