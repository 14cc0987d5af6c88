"""Files of the user are never lost, overwritten or written through a link."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import clipcil
from clipcil.classifier.export import claim_export
from clipcil.classifier.folder import hold_model
from clipcil.classifier.predict import Prediction
from clipcil.cli import main
from clipcil.commands.folders import Sorter
from clipcil.errors import UserError
from clipcil.experiment.monitor import StepLog
from clipcil.report import html
from clipcil.report.compare import MeanStd
from clipcil.report.figures import Curve, save_sweep
from clipcil.storage import LOCK, run_lock, write_json, write_text, write_toml
from clipcil.tensor_store import TensorStore
from support.finished_runs import write_run
from support.lessons import plain, refused, week
from support.short_runs import tree


@pytest.mark.parametrize("name", ["weights.safetensors", "weights-best.safetensors", ".thesis.pdf.part", ".notes"])
@pytest.mark.parametrize("command", ["learn", "run"])
def test_a_folder_with_files_of_the_user_is_refused_untouched(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "d"
    (folder / "checkpoint" / "a").mkdir(parents=True)
    for path in (folder / name, folder / "checkpoint" / "a" / ".big.part"):
        path.write_text("mine")
    before = tree(folder)
    if command == "learn":
        assert "holds no model" in refused(capsys, "learn", str(folder), str(week(tmp_path / "week")))
    else:
        assert "is not empty and holds no run" in refused(capsys, "run", "simplecil", "--out", str(folder))
    assert tree(folder) == before


def test_files_beside_a_model_stay(saved: Path, made: clipcil.Classifier) -> None:
    for name in ("weights.safetensors", "weights-best.safetensors", "notes.txt", ".a.part"):
        (saved / name).write_text("mine")
    model = clipcil.load(saved)
    model.rename("red", "crimson")
    model.forget("blue")
    model.save(saved)
    assert sum(data == b"mine" for data in tree(saved).values()) == 4


KILLED_AFTER_THE_SWAP = """
import os, signal, sys
from clipcil.classifier import folder as model_folder
from clipcil.cli import main
sweep, calls = model_folder.sweep, []
def kill_the_second_time(folder):
    calls.append(folder)
    sweep(folder) if len(calls) == 1 else os.kill(os.getpid(), signal.SIGKILL)
model_folder.sweep = kill_the_second_time
main(["forget", sys.argv[1], "blue", "--yes"])
"""


def test_what_a_killed_forget_left_is_gone_with_the_next_change(saved: Path) -> None:
    old = next(saved.glob("weights-*"))
    done = subprocess.run([sys.executable, "-c", KILLED_AFTER_THE_SWAP, str(saved)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert old.exists() and "blue" not in (saved / "model.toml").read_text()
    with run_lock(saved):
        assert clipcil.load(saved).classes == ["red"]  # not refused, and nothing is deleted behind the writer's back
    (saved / ".tmp").mkdir()
    (saved / ".tmp" / "0123456789ab").write_text("half")
    whole = old.read_bytes()
    main(["rename", str(saved), "red", "crimson"])
    assert not old.exists() and not (saved / ".tmp").exists() and clipcil.load(saved).classes == ["crimson"]
    fresh = saved.parent / "fresh"  # killed in the very first lesson
    fresh.mkdir()
    (fresh / old.name).write_bytes(whole)
    with hold_model(fresh):
        pass
    assert not list(fresh.glob("*.safetensors"))


def test_beside_a_damaged_model_no_weights_are_deleted(saved: Path) -> None:
    old = next(saved.glob("weights-*"))
    (saved / "previous.toml").write_text("format = ")
    with hold_model(saved):
        (saved / "weights-0123456789ab.safetensors").write_text("perhaps the previous one")
    with hold_model(saved):
        assert old.exists() and (saved / "weights-0123456789ab.safetensors").exists()


def test_a_name_that_is_no_text_is_refused_before_anything_is_replaced(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = os.fsdecode(b"caf\xe9")
    assert "not UTF-8" in refused(capsys, "rename", str(saved), "red", bad)
    assert clipcil.load(saved).classes == ["red", "blue"]
    source = week(tmp_path / "week")
    (source / "grey").rename(source / bad)
    assert "not UTF-8" in refused(capsys, "learn", str(saved), str(source))
    words = ["run", "simplecil", "--data", "folder", "--increment", "2", "--out", str(tmp_path / "run")]
    assert "not UTF-8" in refused(capsys, *words, "--data-root", str(source))
    week(tmp_path / bad)
    assert "not UTF-8" in refused(capsys, *words, "--data-root", str(tmp_path / bad))
    assert not (tmp_path / "run").exists()
    for write in (write_json, write_toml):
        with pytest.raises(UserError, match=r"'caf\\udce9' is not UTF-8"):
            write(tmp_path / "x", {"a": bad})
    with pytest.raises(UserError, match="not JSON compliant"):
        write_json(tmp_path / "x", {"a": float("nan")})
    assert not (tmp_path / "x").exists()


def test_no_link_is_followed_by_a_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("log", "stages-0000/x", "task-0001.json"):
        (tmp_path / "mine" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "mine" / name).write_text("mine")
    before = tree(tmp_path / "mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "steps.jsonl").symlink_to(tmp_path / "mine" / "log")
    (run / "checkpoint").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match=r"cannot write .*steps.jsonl"):
        StepLog(run / "steps.jsonl", print).write()
    (run / LOCK).symlink_to(tmp_path / "mine" / "log")
    with pytest.raises(UserError, match="is a symbolic link"):
        TensorStore(run / "checkpoint")
    with pytest.raises(UserError, match="is a symbolic link"), run_lock(run):
        pass
    assert tree(tmp_path / "mine") == before


def test_classes_whose_names_no_folder_can_have_are_sorted_apart(tmp_path: Path) -> None:
    (tmp_path / "8.png").write_bytes(b"picture")
    classes = ["a-b", "a/b", "A:B", "fox", "x" * 250, "x" * 251]
    for _ in range(2):  # the second time finds the same places
        sorter = Sorter(tmp_path / "S", "copy", classes)
        places = [sorter.put(tmp_path / "8.png", Prediction([name], [1.0])) for name in classes]
        assert [place.parent.name for place in places[:4] if place] == ["a-b", "a-b (2)", "A-B (3)", "fox"]
        assert len({place.parent for place in places if place}) == len(list((tmp_path / "S").iterdir())) == 6


def test_no_link_is_followed_by_sorting(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    plain("red")[0].save(tmp_path / "8.png")
    (tmp_path / "S" / "apple").mkdir(parents=True)
    for link in ("apple/.tmp", "pear"):
        (tmp_path / "S" / link).symlink_to(tmp_path / "elsewhere")
    sorter = Sorter(tmp_path / "S", "copy")
    for name in ("apple", "pear"):
        with pytest.raises(UserError, match="is a symbolic link"):
            sorter.put(tmp_path / "8.png", Prediction([name], [1.0]))
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["classes.json", "model.pt2", "model.onnx", "classifier.safetensors"])
def test_an_export_replaces_an_export_and_nothing_else(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('["mine"]')
    with pytest.raises(UserError, match="no export of clipcil"):
        claim_export(tmp_path)
    write_json(tmp_path / "classes.json", {"made_by": "clipcil 0.2.0"})
    claim_export(tmp_path)
    claim_export(tmp_path / "new")


def test_a_report_replaces_a_report_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", "simplecil", tasks=2)
    values = json.loads((run / "results.json").read_text())
    values["config"]["run"]["data"] = f"{tmp_path}/../x/y"
    write_json(run / "results.json", values)
    before = tree(tmp_path)
    assert "results.json" in refused(capsys, "report", str(run), "--out", str(run / "results.json"))
    (tmp_path / "mine.html").write_text("<title>mine</title>")
    with pytest.raises(UserError, match=r"mine\.html"):
        html.write_page(tmp_path / "mine.html", "base.html", title="clipcil: model")
    (tmp_path / "mine.html").unlink()
    (tmp_path / "page-figures").mkdir()
    (tmp_path / "page-figures" / "mine.png").write_text("mine")
    assert "page-figures" in refused(capsys, "report", str(run), "--out", str(tmp_path / "page.html"))
    for _ in range(2):
        main(["report", str(run)])
    new = set(tree(tmp_path)) - set(before) - {"page-figures/mine.png"}
    assert all(name == "run/report.html" or name.startswith("run/report-figures/") for name in new), new


def test_a_curve_replaces_a_curve_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    curve = [Curve("emoji", [("0.1", MeanStd(50.0, None), MeanStd(60.0, None))])]
    for name in ("a.png", "a.png", "a.svg", "a.svg", "a.PDF", "a.PDF"):
        save_sweep(curve, "title", "beta", tmp_path / name)
    plain("red")[0].save(tmp_path / "mine.png")
    (tmp_path / "link.png").symlink_to(tmp_path / "a.png")
    before = tree(tmp_path)
    words = ["sweep", "dmc-ot", "beta", "0.1", "--out", str(tmp_path / "runs"), "--plot"]
    assert "not a curve" in refused(capsys, *words, str(tmp_path / "mine.png"))
    assert "is a symbolic link" in refused(capsys, *words, str(tmp_path / "link.png"))
    assert "ends in .png, .svg, .pdf" in refused(capsys, *words, str(tmp_path / "a.doc"))
    assert tree(tmp_path) == before


def test_the_umask_is_respected(made: clipcil.Classifier, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        made.save(tmp_path / "m")
        write_text(tmp_path / "a" / ("鳥" * 83 + ".png"), "x")  # a name as long as names can be
    finally:
        os.umask(old)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path.is_file()]
    assert set(modes) == {0o600} and len(modes) == 4


def test_a_users_file_in_place_of_the_lock_is_kept(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("mine")
    with run_lock(tmp_path):
        pass
    assert (tmp_path / LOCK).read_text() == "mine"
