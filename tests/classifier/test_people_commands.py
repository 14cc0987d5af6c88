"""The commands as a person types them; broken input gives one line."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest

import clipcil
from clipcil.classifier.predict import Prediction
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.classifier.state import KnownClass
from clipcil.cli import COMMANDS, main
from clipcil.commands import text
from clipcil.commands.folders import watch
from clipcil.errors import UserError
from support.lessons import pictures, write_tree


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("people")
    week = write_tree(folder / "week1", pictures(["airplane", "ant"]))
    main(["learn", str(folder / "m"), str(week), "--method", "simplecil", "--quiet"])
    return folder / "m"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("asked"), pictures(["airplane", "ant"], test=True))
    (root / "ant" / "bad.png").write_bytes(b"no picture")
    return root


def copy(model: Path, to: Path) -> str:
    clipcil.load(model).save(to)
    return str(to)


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """What a command prints on stdout; on stderr where it fails."""
    capsys.readouterr()
    if code:
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        assert stop.value.code == code
    else:
        main(list(words))
    out = capsys.readouterr()
    if code == 2:
        assert out.err.count("\n") == 1 and "Traceback" not in out.err
        return out.err
    return out.out


def test_learning_shows_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    week = write_tree(tmp_path / "week", pictures(["bee", "banana"]))
    pictures(["apple"])["apple"][0].save(week / "loose.png")
    (week / "bee" / "clip.mp4").write_bytes(b"a film")
    dry = said(capsys, "learn", str(tmp_path / "m"), str(week), "--dry-run")
    assert "banana" in dry and "nothing was learnt" in dry and not (tmp_path / "m").exists()
    shown = said(capsys, "learn", str(tmp_path / "m"), str(week), "--method", "simplecil")
    for words in (
        "banana",
        "new",
        "skipped: 1 .mp4, 1 picture in no class folder",
        str(week / "bee" / "clip.mp4"),
        "learnt 2 new classes; the model knows 2 classes now",
        "trained on 10 of 12 pictures; 2 held out",
        "measured on 2 pictures held out",
        "pictures from elsewhere can be harder; measure them: clipcil test",
        "too few",
    ):
        assert words in shown
    write_tree(tmp_path / "next", pictures(["bee", "apple"], test=True))
    shown = said(capsys, "learn", str(tmp_path / "m"), str(tmp_path / "next"))
    assert "known: more pictures" in shown
    assert "learnt 1 new class, and more of 1 known class; the model knows 3 classes now" in shown
    assert "nothing new to learn" in said(capsys, "learn", str(tmp_path / "m"), str(tmp_path / "next"), code=2)
    assert "it knows 2 classes" in said(capsys, "undo", str(tmp_path / "m"))
    assert clipcil.load(tmp_path / "m").classes == ["banana", "bee"]


def test_testing(model: Path, asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    strange = write_tree(
        tmp_path / "new", {**pictures(["ant"], test=True), "ants": pictures(["bus"], test=True)["bus"]}
    )
    page = tmp_path / "mistakes.html"
    shown = said(capsys, "test", str(model), str(strange), "--page", str(page))
    assert (
        "measured on 2 pictures" in shown and "unknown classes: 2 pictures" in shown and "did you mean 'ant'" in shown
    )
    assert "data:image/jpeg" in page.read_text()  # no threshold, so both unknown pictures are mistakes
    told = json.loads(said(capsys, "test", str(model), str(asked), "--json", code=1))
    assert told["pictures"] == 4 and len(told["unreadable"]) == 1 and "bad.png" in told["unreadable"][0]
    assert told["right"] == sum(row["right"] for row in told["classes"])
    assert told["right"] / 4 == told["accuracy"] == clipcil.load(model).score(asked)
    said(capsys, "report", str(model), "--out", str(tmp_path / "model.html"))
    assert "airplane" in (tmp_path / "model.html").read_text()


def test_watching_hands_on_each_picture_once(tmp_path: Path) -> None:
    (tmp_path / "camera").mkdir()
    looks: list[int] = []

    def should_stop() -> bool:
        looks.append(1)
        if len(looks) == 2:
            (tmp_path / "camera" / "b.png").write_bytes(b"b")
        return len(looks) > 6

    (tmp_path / "camera" / "a.png").write_bytes(b"a")
    found = [path.name for batch in watch([tmp_path / "camera"], should_stop, pause=0) for path in batch]
    assert found == ["a.png", "b.png"]
    with pytest.raises(UserError, match="is not a folder"):
        next(watch([tmp_path / "nowhere"]))


def test_lines_without_zeros_and_the_list_of_commands(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text.print_line(Path("a.png"), Prediction(["cat", "lynx", "dog"], [0.97, 0.027, 0.003]))
    text.print_line(Path("b.png"), Prediction(["cat", "dog"], [0.004, 0.003]))
    assert capsys.readouterr().out == "a.png: cat 97%, lynx 3%\nb.png: cat 0%\n"
    monkeypatch.setenv("COLUMNS", "60")
    main(["--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60 and "--version" in shown
    main(["--version"])
    assert capsys.readouterr().out == f"clipcil {clipcil.__version__}\n"


def test_one_class_and_a_folder_with_a_dot_and_a_blank(
    asked: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "one", pictures(["ant"]))
    shown = said(capsys, "learn", "my v1.2", "one")
    assert "the model knows one class" in shown and "accuracy" not in shown
    assert "clipcil predict 'my v1.2' PICTURE" in shown
    said(capsys, "report", "my v1.2")
    assert (tmp_path / "my v1.2.html").is_file()
    assert "accuracy over 1 class: 100.0%" in said(capsys, "test", "my v1.2", "one")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_wraps_and_has_examples_on_lines_of_their_own(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    main([command, "--help"])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 60
    lines = [line for line in shown.splitlines() if line.startswith("  clipcil ")]
    assert len(lines) == (COMMANDS[command].__doc__ or "").count("\n      clipcil ") > 0
    assert not re.search(r"None|default: False|default: \(|INT|FLOAT", shown)


def test_predicting(model: Path, asked: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = said(capsys, "predict", str(model), str(asked / "airplane"), "--top", "1")
    assert len(shown.splitlines()) == 2
    lines = said(capsys, "predict", str(model), str(asked), "--json", "--top", "2", code=1).splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 5 and sum("error" in row for row in rows) == 1
    whole = [row for row in rows if "error" not in row]
    assert all([c["name"] for c in row["classes"]] in (["ant", "airplane"], ["airplane", "ant"]) for row in whole)
    table = list(csv.DictReader(io.StringIO(said(capsys, "predict", str(model), str(asked), "--csv", code=1))))
    assert [row["picture"] for row in table] == [row["picture"] for row in rows]
    assert [bool(row["error"]) for row in table] == ["error" in row for row in rows]
    assert all(
        row["name"] == (json_row["name"] or "") for row, json_row in zip(table, rows, strict=True) if row["name"]
    )
    no_file = f"{'x' * 300}.png"  # longer than a file system takes: a picture that cannot be read, like any other
    lines = said(capsys, "predict", str(model), no_file, str(asked / "airplane"), code=1).splitlines()
    assert [line.startswith(f"{no_file}: cannot be read") for line in lines[:3]] == [True, False, False]


@pytest.mark.parametrize("by", ["link", "copy"])
def test_sorting_moves_nothing(
    model: Path, asked: Path, by: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(asked.rglob("*.png"))
    for _ in range(2):  # the second time changes nothing
        said(capsys, "predict", str(model), str(asked), "--folder-out", str(tmp_path / "out"), "--by", by, code=1)
        found = list((tmp_path / "out").rglob("*.png"))
        assert len(found) == 4 and all(path.is_symlink() == (by == "link") for path in found)
    assert sorted(asked.rglob("*.png")) == before
    assert sorted(path.read_bytes() for path in found) == sorted(p.read_bytes() for p in before if p.name != "bad.png")


def test_show_rename_forget(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = copy(model, tmp_path / "m")
    said(capsys, "rename", own, "ant", "fire ant")
    shown = said(capsys, "show", own)
    assert "fire ant (taught as ant)" in shown and "keeps no picture" in shown and "MB on disk" in shown
    told = json.loads(said(capsys, "show", own, "--json"))
    assert [row["name"] for row in told["classes"]] == ["airplane", "fire ant"]
    for names in (["airplane", "ant"], ["airplane", "fire ant"]):
        said(capsys, "undo", own)
        assert clipcil.load(own).classes == names, "a new name can be undone, and restored"
    said(capsys, "forget", own, "fire ant")
    assert clipcil.load(own).classes == ["airplane"]
    assert "after a class was forgotten" in said(capsys, "undo", own, code=2)


def kept(method: str, features: int = 0, pictures: int = 0) -> str:
    return text.kept({"method": method, "exemplars_kept": 0, "features_kept": features, "pictures_kept": pictures})


@pytest.mark.parametrize(("method", "statistics"), [("simplecil", "class means"), ("dmc", "class Gaussians")])
def test_it_is_said_what_statistics_give_away(method: str, statistics: str) -> None:
    expected = (
        f"keeps no picture; keeps {statistics} (of a class with few training pictures, their features can be computed"
    )
    assert kept(method).startswith(expected)
    assert kept(method, features=2, pictures=1).startswith("keeps 1 small picture for the page")


def test_what_keeps_nothing_of_pictures_says_so() -> None:
    assert kept("zero-shot") == "keeps no picture and no features of pictures"
    assert kept("l2p", features=3) == "keeps no picture; keeps the features of 3 pictures for evaluation"


def test_small_pictures_of_the_page_follow_the_commands(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = copy(model, tmp_path / "m")
    small = SmallPictures(tmp_path / "m")
    small.switch(True)
    small.add("ant", [b"a small picture"] * 3)
    assert "keeps 3 small pictures for the page of `clipcil serve`" in said(capsys, "show", own).replace("\n", " ")
    said(capsys, "rename", own, "ant", "fire ant")
    assert len(small.of("fire ant")) == 3
    said(capsys, "forget", own, "fire ant")
    assert small.count == 0 and not list(small.folder.iterdir()), "nothing of a forgotten class is left in the folder"


def test_a_page_shows_no_markup_of_a_stranger(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = copy(model, tmp_path / "m")
    toml = tmp_path / "m" / "model.toml"
    toml.write_text(re.sub(r'learnt = "[^"]*"', 'learnt = "<img src=x onerror=alert(1)>"', toml.read_text(), count=1))
    assert "learnt" in said(capsys, "report", own, "--out", str(tmp_path / "page.html"), code=2)
    classifier = clipcil.load(model)
    classifier.learner.facts.known = [KnownClass("<img src=x>", "a", "", 1, "")]
    assert "<img" not in classifier._repr_html_()


def test_a_dry_run_finds_what_learning_would_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    week = write_tree(tmp_path / "week", pictures(["bee", "banana"]))
    (week / "bee" / "bad.png").write_bytes(b"no picture")
    words = ("learn", str(tmp_path / "m"), str(week))
    shown = said(capsys, *words, "--dry-run").replace("\n", " ")
    assert "bad.png is not a picture" in shown and "1 picture cannot be read" in shown and "--skip-broken" in shown
    assert "would be skipped" in said(capsys, *words, "--dry-run", "--skip-broken")
    assert "leave out all such pictures with --skip-broken" in said(capsys, *words, "--quiet", code=2)
    (week / "bee" / "bad.png").unlink()
    (week / "bee").rename(week / ("x" * 200))
    for more in ("--dry-run", "--quiet"):
        assert "tokens with start and end" in said(capsys, *words, more, code=2)


def test_a_dry_run_names_the_pictures_that_were_taught_before(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same folder again with pictures of a new class: only these would be learnt."""
    week = write_tree(tmp_path / "week", pictures(["ant", "bee"]))
    shown = said(capsys, "learn", str(model), str(week), "--dry-run").replace("\n", " ")
    assert "would be skipped, because taught before: 6 pictures" in shown and "nothing was learnt" in shown


def test_a_class_without_pictures_for_evaluation_and_pictures_of_two_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    week = write_tree(tmp_path / "week", {name: each[:1] for name, each in pictures(["ant", "bee"]).items()})
    own = str(tmp_path / "m")
    shown = said(capsys, "learn", own, str(week), "--method", "simplecil")
    assert f"the accuracy on new pictures is not known; measure it: clipcil test {own} FOLDER" in shown
    write_tree(tmp_path / "more", {"fly": pictures(["crab"])["crab"]})
    said(capsys, "learn", own, str(tmp_path / "more"), "--quiet")
    (tmp_path / "more" / "fly").rename(tmp_path / "more" / "crab")
    notes = [line for line in said(capsys, "learn", own, str(tmp_path / "more")).splitlines() if "taught as" in line]
    assert len(notes) == 1 and notes[0].startswith("note: 6 pictures (") and "as 'crab' and as 'fly'" in notes[0]


def test_a_picture_that_is_not_there_is_said_to_be_missing(
    model: Path, asked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = said(capsys, "predict", str(model), "nowhere.png", str(asked / "ant" / "bad.png"), code=1).splitlines()
    assert lines[0] == "nowhere.png: cannot be read: nowhere.png does not exist; check its name"
    assert "(its format is unknown)" in lines[1]


def test_settings_of_another_version_are_named_with_their_file(
    model: Path, asked: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = copy(model, tmp_path / "m")
    toml = tmp_path / "m" / "model.toml"
    toml.write_text(toml.read_text().replace("[settings]\n", "[settings]\nlooked_at = 5\n"))
    line = said(capsys, "predict", own, str(asked), code=2)
    assert f"the settings in {toml} do not fit this version" in line and "looked_at" in line


def test_an_accuracy_is_over_the_classes_that_were_measured(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_tree(tmp_path / "one", pictures(["ant"], test=True))
    both = write_tree(tmp_path / "both", pictures(["ant", "airplane"], test=True))
    assert "accuracy over 1 of 2 classes" in said(capsys, "test", str(model), str(one))
    assert "accuracy over all 2 classes" in said(capsys, "test", str(model), str(both))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learn", "{new}", "{model}"], "is a model and {new} is not; did you mean: clipcil learn {model} {new}?"),
        (["learn", "{week}", "{new}"], "did you mean: clipcil learn {new} {week}?"),
        (["predict", "{week}", "{model}"], "did you mean: clipcil predict {model} {week}?"),
        (["test", "{week}", "{model}"], "did you mean: clipcil test {model} {week}?"),
        (["learn", "{new}", "{nowhere}"], "does not exist"),
        (["undo", "{model}"], "nothing can be undone"),
        (["learn", "{model}", "{week}", "--method", "dmc"], "has method 'simplecil'"),
        (["learn", "{model}", "{week}", "--set", "a=1"], "--set is for a new model"),
        (["learn", "{new}", "{week}", "--method", "simplcil"], "did you mean 'simplecil'"),
        (["learn", "{week}", "{week}"], "holds other things"),
        (["predict", "{nowhere}", "x.png"], "holds no model"),
        (["predict", "{model}", "{week}", "--json", "--csv"], "not both"),
        (["predict", "{model}", "{week}", "--top", "0"], "--top"),
        (["forget", "{model}", "aunt"], "did you mean 'ant'"),
        (["rename", "{model}", "ant", "Airplane"], "already"),
        (["show", "{week}"], "holds no model"),
        (["export", "{nowhere}"], "holds no model"),
        (["serve", "{model}", "--no-open", "--port", "99999"], "no port 99999; choose one from 0 to 65535"),
    ],
)
def test_one_line_when_it_cannot_be(
    model: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    places = {"model": model, "week": model.parent / "week1", "new": tmp_path / "new", "nowhere": tmp_path / "nowhere"}
    message = message.format(**places)
    assert message in said(capsys, *(word.format(**places) for word in words), code=2)
    assert not (tmp_path / "new").exists() and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("name", ["learn", "predict", "test", "show", "forget", "rename", "undo", "export"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert name in COMMANDS
    main([name, "--help"])
    assert "MODEL" in capsys.readouterr().out
