"""The commands as a person types them; broken input gives one line."""

import csv
import io
import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import clipcil
from clipcil.classifier.predict import Prediction
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.cli import COMMANDS, main
from clipcil.commands import text
from clipcil.commands.folders import watch
from clipcil.data.pictures import thumbnail
from support.errors import one_line
from support.lessons import pictures, refused, write_tree

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("people")
    week = write_tree(folder / "week1", pictures(["airplane", "ant"]))
    main(["learn", str(folder / "m"), str(week), "--method", "simplecil", "--quiet"])
    return folder / "m"


@pytest.fixture
def own(model: Path, tmp_path: Path) -> str:
    """A copy that a test may change."""
    clipcil.load(model).save(tmp_path / "own")
    return str(tmp_path / "own")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("asked"), pictures(["airplane", "ant"], test=True))
    (root / "ant" / "bad.png").write_bytes(b"no picture")
    return root


def said(capsys: Capture, *words: object, code: int = 0) -> str:
    """What a command prints on stdout; one line on stderr where it is refused."""
    capsys.readouterr()
    if code == 2:
        return refused(capsys, *map(str, words))
    with pytest.raises(SystemExit) if code else nullcontext() as stop:
        main(list(map(str, words)))
    assert not code or stop.value.code == code
    return capsys.readouterr().out


def test_learning_shows_what_it_does(tmp_path: Path, capsys: Capture) -> None:
    week, place = write_tree(tmp_path / "week", pictures(["bee", "banana"])), tmp_path / "m"
    pictures(["apple"])["apple"][0].save(week / "loose.png")
    (week / "bee" / "clip.mp4").write_bytes(b"a film")
    dry = said(capsys, "learn", place, week, "--dry-run")
    assert "banana" in dry and not place.exists()
    shown = said(capsys, "learn", place, week, "--method", "simplecil")
    for words in ("1 .mp4", str(week / "bee" / "clip.mp4"), "2 classes", "10 of 12 pictures", f"test {place} FOLDER"):
        assert words in shown
    write_tree(tmp_path / "next", pictures(["bee", "apple"], test=True))
    shown = said(capsys, "learn", place, tmp_path / "next")
    assert "1 new class" in shown and "1 known class" in shown and "3 classes" in shown
    assert "nothing new" in said(capsys, "learn", place, tmp_path / "next", code=2)
    assert "2 classes" in said(capsys, "undo", place)
    assert clipcil.load(place).classes == ["banana", "bee"]


def test_mistakes_are_corrected_by_a_list(own: str, tmp_path: Path, capsys: Capture) -> None:
    tests = write_tree(tmp_path / "new", {**pictures(["ant"], test=True), "bus": pictures(["bus"], test=True)["bus"]})
    page = tmp_path / "mistakes.html"
    assert f"clipcil learn {own} fixes.csv" in said(capsys, "test", own, tests, "--page", page)
    offered = re.findall(r'data-picture="([^"]+)"( checked)?>', page.read_text())
    assert (str(tests / "bus" / "0.png"), "") in offered  # an unknown class is not learnt unless it is ticked
    (tmp_path / "fixes").mkdir()
    fixes = tmp_path / "fixes" / "fixes.csv"
    fixes.write_text(f'picture,class\n"{tests / "bus" / "0.png"}","bus"\n../new/bus/1.png,bus\n')
    assert "would" not in said(capsys, "learn", own, fixes, "--dry-run")
    said(capsys, "learn", own, tmp_path / "fixes")
    assert clipcil.load(own).classes == ["airplane", "ant", "bus"]
    assert "nothing new" in said(capsys, "learn", own, fixes, code=2)
    for wrong, why in (("a,b\n1,2\n", "columns picture and class"), ("picture,class\n", "names no picture")):
        fixes.write_text(wrong)
        assert why in said(capsys, "learn", own, fixes, code=2)
    (tmp_path / "fixes" / "cat").mkdir()  # beside class folders a list is a file like any other
    assert "cat" in said(capsys, "learn", own, tmp_path / "fixes", code=2)


def test_the_page_of_a_model_has_its_curve_its_confusions_its_pictures_and_the_next_command(
    own: str, tmp_path: Path, capsys: Capture
) -> None:
    page = tmp_path / "model.html"
    said(capsys, "report", own, "--out", page)
    assert 'id="answers"' in page.read_text() and 'id="lessons"' not in page.read_text()  # one lesson is no curve
    assert f"clipcil serve {own}" in page.read_text() and 'class="small"' not in page.read_text()
    said(capsys, "learn", own, write_tree(tmp_path / "week2", pictures(["bee", "bus"])))
    small = SmallPictures(Path(own))
    small.switch(True)
    small.add("bee", [thumbnail(pictures(["bee"])["bee"][0], 96)])
    said(capsys, "report", own, "--out", page)
    written = page.read_text()
    assert 'id="lessons"' in written and written.count('class="small"') == 1
    assert f"clipcil test {own} FOLDER --page" in written and f"clipcil predict {own} PICTURE" in written


def test_testing(model: Path, asked: Path, tmp_path: Path, capsys: Capture) -> None:
    unknown = {"ants": pictures(["bus"], test=True)["bus"]}
    strange = write_tree(tmp_path / "new", {**pictures(["ant"], test=True), **unknown})
    page = tmp_path / "mistakes.html"
    shown = said(capsys, "test", model, strange, "--page", page)
    assert "over 1 of 2 classes" in shown and "of 2 pictures of unknown classes 0.0% recognised" in shown
    assert "data:image/jpeg" in page.read_text()  # no threshold, so both unknown pictures are mistakes
    told = json.loads(said(capsys, "test", model, asked, "--json", code=1))
    assert told["pictures"] == 4 and len(told["unreadable"]) == 1 and "bad.png" in told["unreadable"][0]
    assert told["right"] == sum(row["right"] for row in told["classes"])
    assert told["right"] / 4 == told["accuracy"] == clipcil.load(model).score(asked)
    said(capsys, "report", model, "--out", tmp_path / "model.html")
    assert "airplane" in (tmp_path / "model.html").read_text()


def test_watching_hands_on_each_picture_once(tmp_path: Path) -> None:
    batches = watch([tmp_path], pause=0)
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(b"a picture")
        assert [path.name for path in next(batches)] == [name]
    with one_line("nowhere"):
        next(watch([tmp_path / "nowhere"]))


def test_probabilities_that_would_be_zero_are_left_out(capsys: Capture) -> None:
    text.print_line(Path("a.png"), Prediction(["cat", "lynx", "dog"], [0.97, 0.027, 0.003]))
    text.print_line(Path("b.png"), Prediction(["cat", "dog"], [0.004, 0.003]))
    assert capsys.readouterr().out == "a.png: cat 97%, lynx 3%\nb.png: cat 0%\n"


def test_one_class_and_a_folder_with_a_dot_and_a_blank(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tree(tmp_path / "one", pictures(["ant"]))
    shown = said(capsys, "learn", "my v1.2", "one")
    assert "accuracy" not in shown and "clipcil predict 'my v1.2' PICTURE" in shown
    said(capsys, "report", "my v1.2")
    assert (tmp_path / "my v1.2.html").is_file()
    assert "accuracy over 1 class: 100.0%" in said(capsys, "test", "my v1.2", "one")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_wraps_and_has_examples_on_lines_of_their_own(
    command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    shown = said(capsys, command, "--help")
    assert max(map(len, shown.splitlines())) <= 60
    examples = [line for line in shown.splitlines() if line.startswith("  clipcil ")]
    assert len(examples) == (COMMANDS[command].__doc__ or "").count("\n      clipcil ") > 0
    assert not re.search(r"None|default: False|default: \(|INT|FLOAT", shown)


def test_predicting(model: Path, asked: Path, capsys: Capture) -> None:
    assert len(said(capsys, "predict", model, asked / "airplane", "--top", 1).splitlines()) == 2
    lines = said(capsys, "predict", model, asked, "--json", "--top", 2, code=1).splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == 5 and sum("error" in row for row in rows) == 1
    whole = [row for row in rows if "error" not in row]
    assert all(sorted(c["name"] for c in row["classes"]) == ["airplane", "ant"] for row in whole)
    table = list(csv.DictReader(io.StringIO(said(capsys, "predict", model, asked, "--csv", code=1))))
    assert [row["picture"] for row in table] == [row["picture"] for row in rows]
    assert [bool(row["error"]) for row in table] == ["error" in row for row in rows]
    assert [row["name"] for row in table] == [row.get("name") or "" for row in rows]
    no_file = f"{'x' * 300}.png"  # longer than a file system takes: a picture that cannot be read, like any other
    lines = said(capsys, "predict", model, no_file, "nowhere.png", asked / "airplane", code=1).splitlines()
    assert [": cannot be read: " in line for line in lines] == [True, True, False, False]


@pytest.mark.parametrize("by", ["link", "copy"])
def test_sorting_moves_nothing(model: Path, asked: Path, by: str, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(asked.rglob("*.png"))
    for _ in range(2):  # the second time changes nothing
        said(capsys, "predict", model, asked, "--folder-out", tmp_path / "out", "--by", by, code=1)
        found = list((tmp_path / "out").rglob("*.png"))
        assert len(found) == 4 and all(path.is_symlink() == (by == "link") for path in found)
    assert sorted(asked.rglob("*.png")) == before
    assert sorted(path.read_bytes() for path in found) == sorted(p.read_bytes() for p in before if p.name != "bad.png")


def test_show_rename_undo_forget(own: str, capsys: Capture) -> None:
    said(capsys, "rename", own, "ant", "fire ant")
    assert "fire ant (taught as ant)" in said(capsys, "show", own)
    told = json.loads(said(capsys, "show", own, "--json"))
    assert [row["name"] for row in told["classes"]] == ["airplane", "fire ant"]
    for names in (["airplane", "ant"], ["airplane", "fire ant"]):
        said(capsys, "undo", own)
        assert clipcil.load(own).classes == names, "a new name can be undone, and restored"
    for words, classes in (("forget", ["airplane"]), ("undo", ["airplane", "fire ant"])):
        said(capsys, words, own, *(["fire ant", "--yes"] if words == "forget" else []))
        assert clipcil.load(own).classes == classes
    said(capsys, "forget", own, "fire ant", "--yes", "--for-good")
    assert clipcil.load(own).classes == ["airplane"] and "for good" in said(capsys, "undo", own, code=2)


def test_forgetting_asks_on_a_terminal_and_is_refused_elsewhere(
    own: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--yes" in said(capsys, "forget", own, "ANT", code=2)
    terminal = io.StringIO("\nn\nYes\n")
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    for _ in range(2):
        shown = said(capsys, "forget", own, "ANT")
        assert "'ant'" in shown and "5 pictures" in shown and "nothing was changed" in shown
    assert clipcil.load(own).classes == ["airplane", "ant"]
    said(capsys, "forget", own, "ANT")
    assert clipcil.load(own).classes == ["airplane"]
    said(capsys, "undo", own)
    assert "nothing was changed" in said(capsys, "forget", own, "ant"), "the end of the input is no answer"


def test_a_quiet_lesson_prints_its_result_alone(tmp_path: Path, capsys: Capture) -> None:
    week = write_tree(tmp_path / "week", pictures(["bee", "banana"]))
    (week / "bee" / "bad.png").write_bytes(b"no picture")
    (line,) = said(capsys, "learn", tmp_path / "m", week, "--quiet", "--skip-broken").splitlines()
    assert "2 new classes" in line and "accuracy" in line


def test_numbers_of_folders_are_no_part_of_a_class_except_in_models_that_know_them(
    tmp_path: Path, capsys: Capture
) -> None:
    bee, ant = pictures(["bee", "ant"]).values()
    week = write_tree(tmp_path / "week", {"001.Honey_bee": bee[:4], "2.ant": ant[:4]})
    said(capsys, "learn", tmp_path / "m", week, "--method", "simplecil", "--quiet")
    assert clipcil.load(tmp_path / "m").classes == ["Honey bee", "ant"]
    old = clipcil.Classifier("simplecil")
    old.learn({"001.Honey bee": bee[:4], "2.ant": ant[:4]})
    old.save(tmp_path / "old")
    write_tree(tmp_path / "more", {"001.Honey_bee": bee[4:], "2.ant": ant[4:]})
    assert "2 known classes" in said(capsys, "learn", tmp_path / "old", tmp_path / "more")
    assert clipcil.load(tmp_path / "old").classes == ["001.Honey bee", "2.ant"]


def test_a_command_says_what_it_does_before_anything_heavy_is_imported() -> None:
    code = (
        "import io, sys\n"
        "class Terminal(io.StringIO):\n"
        "    isatty = lambda self: True\n"
        "    def write(self, text):\n"
        "        print(text.strip(), 'torch' in sys.modules) if text.strip() else None\n"
        "sys.stderr = Terminal()\n"
        "from clipcil.cli import main\n"
        "main(['show', 'nowhere'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    first, second = done.stdout.splitlines()
    assert first.startswith("clipcil show: loading") and first.endswith("False")
    assert "nowhere" in second and second.endswith("True") and done.returncode == 2


def test_small_pictures_of_the_page_follow_the_commands(own: str, capsys: Capture) -> None:
    small = SmallPictures(Path(own))
    small.switch(True)
    small.add("ant", [b"a small picture"] * 3)
    said(capsys, "rename", own, "ant", "fire ant")
    assert len(small.of("fire ant")) == 3
    said(capsys, "forget", own, "fire ant", "--yes")
    assert small.count == 3, "they are kept for undo"
    said(capsys, "undo", own)
    said(capsys, "forget", own, "fire ant", "--yes", "--for-good")
    assert small.count == 0 and not list(small.folder.iterdir()), "nothing of a forgotten class is left in the folder"


def test_a_page_shows_no_markup_of_a_stranger(own: str, tmp_path: Path, capsys: Capture) -> None:
    toml = Path(own, "model.toml")
    toml.write_text(toml.read_text().replace('name = "ant"', 'name = "<img src=x>"'))
    said(capsys, "report", own, "--out", tmp_path / "page.html")
    for page in ((tmp_path / "page.html").read_text(), clipcil.load(own)._repr_html_()):
        assert "<img src=x" not in page and "&lt;img src=x&gt;" in page


def test_a_dry_run_finds_what_learning_would_refuse(model: Path, tmp_path: Path, capsys: Capture) -> None:
    week = write_tree(tmp_path / "week", pictures(["bee", "ant"]))
    (week / "bee" / "bad.png").write_bytes(b"no picture")
    words = ("learn", tmp_path / "m", week)
    shown = said(capsys, *words, "--dry-run")
    assert "bad.png" in shown and "1 picture" in shown and "--skip-broken" in shown
    assert "skipped" in said(capsys, *words, "--dry-run", "--skip-broken")
    assert "--skip-broken" in said(capsys, *words, "--quiet", code=2)
    (week / "bee" / "bad.png").unlink()
    assert "taught before: 6 pictures" in said(capsys, "learn", model, week, "--dry-run")
    (week / "bee").rename(week / ("x" * 200))
    for more in ("--dry-run", "--quiet"):
        assert "tokens" in said(capsys, *words, more, code=2)


def test_a_class_without_pictures_for_evaluation_and_pictures_of_two_classes(tmp_path: Path, capsys: Capture) -> None:
    week, place = tmp_path / "week", tmp_path / "m"
    write_tree(week, {name: each[:1] for name, each in pictures(["ant", "crab"]).items()})
    assert "is not known" in said(capsys, "learn", place, week, "--method", "simplecil")
    (week / "crab").rename(week / "fly")
    notes = [line for line in said(capsys, "learn", place, week).splitlines() if "taught as" in line]
    assert len(notes) == 1 and "'fly'" in notes[0] and "'crab'" in notes[0]


def test_settings_of_another_version_are_named_with_their_file(own: str, asked: Path, capsys: Capture) -> None:
    toml = Path(own, "model.toml")
    toml.write_text(toml.read_text().replace("[settings]\n", "[settings]\nlooked_at = 5\n"))
    line = said(capsys, "predict", own, asked, code=2)
    assert str(toml) in line and "looked_at" in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learn", "{new}", "{model}"], "clipcil learn {model} {new}?"),
        (["learn", "{week}", "{new}"], "clipcil learn {new} {week}?"),
        (["predict", "{week}", "{model}"], "clipcil predict {model} {week}?"),
        (["test", "{week}", "{model}"], "clipcil test {model} {week}?"),
        (["learn", "{new}", "{nowhere}"], "{nowhere}"),
        (["undo", "{model}"], "nothing can be undone"),
        (["learn", "{model}", "{week}", "--method", "dmc"], "'simplecil'"),
        (["learn", "{model}", "{week}", "--set", "a=1"], "--set"),
        (["learn", "{new}", "{week}", "--method", "simplcil"], "'simplecil'"),
        (["learn", "{week}", "{week}"], "{week}"),
        (["predict", "{nowhere}", "x.png"], "{nowhere}"),
        (["predict", "{model}", "{week}", "--json", "--csv"], "--json"),
        (["predict", "{model}", "{week}", "--top", "0"], "--top"),
        (["predict", "{model}", "{week}", "--out", "x"], "--out"),
        (["predict", "{model}", "{week}", "--on", "ray", "--json"], "--json"),
        (["forget", "{model}", "aunt"], "'ant'"),
        (["rename", "{model}", "ant", "Airplane"], "already"),
        (["show", "{week}"], "{week}"),
        (["export", "{nowhere}"], "{nowhere}"),
        (["serve", "{model}", "--no-open", "--port", "99999"], "99999"),
    ],
)
def test_one_line_when_it_cannot_be(
    model: Path, words: list[str], message: str, capsys: Capture, tmp_path: Path
) -> None:
    places = {"model": model, "week": model.parent / "week1", "new": tmp_path / "new", "nowhere": tmp_path / "nowhere"}
    assert message.format(**places) in said(capsys, *(word.format(**places) for word in words), code=2)
    assert not (tmp_path / "new").exists() and not (tmp_path / "nowhere").exists()
