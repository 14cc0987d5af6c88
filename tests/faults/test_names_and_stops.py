"""Names that mean one class or cannot be printed, models that change while they are read, signals, no room."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import clipcil
from clipcil.classifier import folder as model_folder
from clipcil.classifier.folder import load_model
from clipcil.classifier.predict import Prediction
from clipcil.cli import main
from clipcil.commands import text
from clipcil.data.cache import PixelStore
from clipcil.errors import UserError, printable
from clipcil.experiment.monitor import PlainDisplay
from clipcil.signals import stops_once, uninterrupted
from support.lessons import plain, refused, week
from support.processes import files_of_at_most
from support.short_runs import Told, tree


def test_a_renamed_class_is_found_again_by_its_folder(saved: Path) -> None:
    model = clipcil.load(saved)
    for name in ("_", " _ ", "\x00", ""):
        with pytest.raises(UserError, match="the new name is empty"):
            model.rename("red", name)
    model.rename("red", "dark_red")
    lesson = model.learn({"dark red": plain("red", "maroon")})
    assert not lesson.new and model.classes == ["dark red", "blue"]


def test_a_model_is_read_while_another_replaces_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = clipcil.load(saved)
    model.forget("blue")
    read, swapped = model_folder.read_model, []

    def slowly(folder: Path, *args: str) -> Any:
        facts = read(folder, *args)
        if not swapped:
            swapped.append(True)
            monkeypatch.setattr(model_folder, "read_model", read)
            model.save(saved)
        return facts

    monkeypatch.setattr(model_folder, "read_model", slowly)
    facts, tensors = load_model(saved)
    assert [known.name for known in facts.known] == ["red"] and tensors


# -- tracebacks -------------------------------------------------------------------------------------------------------


def test_names_reach_the_terminal_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("m[red]x\x1b[2J\x9b\u202e\n") == "m[red]x\\x1b[2J\\x9b\\u202e\\n"
    assert printable("größe 👩\u200d👩 鳥") == "größe 👩\u200d👩 鳥"
    PlainDisplay().tell("m[red]x\x1b[2J")
    for line in (text.print_line, text.print_json, text.csv_printer(1)):
        line(Path("a\x1b[2J\x9b.png"), Prediction(["x\x1b"], [1.0]))
    out = capsys.readouterr().out
    assert "m[red]x" in out and "\x1b" not in out and "\x9b" not in out


def test_any_name_can_be_printed(saved: Path, tmp_path: Path) -> None:
    """File names that are not UTF-8, and a terminal that knows only Latin-1."""
    names = [b"\xff.png", "Ā.png".encode()]
    for name in names:
        plain("red")[0].save(tmp_path / "a.png")
        (tmp_path / "a.png").rename(tmp_path / os.fsdecode(name))
    files = [os.fsencode(tmp_path) + b"/" + name for name in names]
    for encoding in ("utf-8:strict", "latin-1:strict"):
        done = subprocess.run(
            [sys.executable, "-m", "clipcil", "predict", str(saved), *files],
            env={**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert b"\\udcff.png: " in done.stdout
        assert ("Ā" if encoding.startswith("utf") else "\\u0100").encode() + b".png: " in done.stdout


def test_another_number_of_threads_is_said(tmp_path: Path) -> None:
    """A run of two tasks is stopped after the first; its folder says that it began with 77 threads."""
    told, environment = Told(), tmp_path / "run" / "environment.json"
    clipcil.Experiment("zero-shot", tasks=2).run(tmp_path / "run", display=told)
    assert not told.lines
    kept = json.loads(environment.read_text())
    assert kept["backbone"] == "mini"
    environment.write_text(json.dumps({**kept, "threads": 77}))
    clipcil.Experiment("zero-shot", tasks=2).run(tmp_path / "run", display=told)
    assert any("begun with 77 threads" in line and "OMP_NUM_THREADS=77" in line for line in told.lines)


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """Signals as a terminal has them: a background job is started with some of them ignored."""
    old = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_second_signal_is_passed_over() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGHUP"), stops_once(for_good=False):
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("signals")
def test_a_signal_waits_for_the_end_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch aborts where an exception is raised while it is imported, and some code of Python's passes it over."""
    (tmp_path / "imported_once.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"), stops_once(for_good=False):
        import_module("imported_once")
        time.sleep(60)
    assert "imported_once" in sys.modules


@pytest.mark.usefixtures("signals")
def test_a_stop_that_meets_a_callback_is_not_lost(capsys: pytest.CaptureFixture[str]) -> None:
    class Callback:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"), stops_once(for_good=False):
        Callback()
        time.sleep(60)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("signals")
def test_a_stop_that_other_code_takes_for_an_error_stays_a_stop() -> None:
    """safetensors makes a ValueError of it; what a cleanup reports is another thing."""
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGTERM"), stops_once(for_good=False):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        raise ValueError("no such shape")
    with pytest.raises(UserError, match="the disk is full"), stops_once(for_good=False):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise UserError("the disk is full")


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGALRM])
def test_a_write_is_completed(number: signal.Signals) -> None:
    written = False
    with pytest.raises(KeyboardInterrupt), stops_once(for_good=False), uninterrupted():
        signal.raise_signal(number)
        written = True
    assert written


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_a_stopped_lesson_leaves_no_picture_behind(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    fill = PixelStore._fill

    def stop(self: PixelStore, *args: Any) -> Any:
        made = fill(self, *args)
        assert list((tmp_path / "t").rglob("*.rows"))
        signal.raise_signal(number)
        return made

    monkeypatch.setattr(PixelStore, "_fill", stop)
    with pytest.raises(SystemExit) as ended:
        main(["learn", str(tmp_path / "m"), str(week(tmp_path / "week")), "--quiet"])
    assert ended.value.code == 130
    assert not list((tmp_path / "t").iterdir()) and not (tmp_path / "m").exists()


def test_no_room_for_a_model_or_for_temporary_pictures_is_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(saved)
    source = str(week(tmp_path / "week"))
    with files_of_at_most(100):
        assert "set TMPDIR" in refused(capsys, "learn", str(saved), source, "--quiet")
    model = clipcil.load(saved)
    model.rename("red", "crimson")
    with files_of_at_most(100), pytest.raises(UserError, match=r"cannot write .*File too large"):
        model.save(saved)
    assert tree(saved) == before
