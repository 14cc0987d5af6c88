"""Commands: whatever is wrong is one line that names the value, with exit code 2; and what the lists show."""

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest

from clipcil.cli import main
from clipcil.data.dataset import datasets
from clipcil.experiment.experiment import Experiment
from clipcil.methods.registry import methods
from support.lessons import plain, refused, write_tree

FAST = ("stage1.epochs=0", "stage2.epochs=0", "stage2.steps=0")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("rnu", ["'rnu'", "'run'"]),
        ("run dmc-to", ["'dmc-to'", "'dmc-ot'"]),
        ("run --data emojis", ["'emojis'", "'emoji'"]),
        ("run --sed 1", ["--sed"]),
        ("run --seed x", ["'seed'", "'x'"]),
        ("run --shots 0", ["'shots'", "'0'"]),
        ("run simplecil --hold-out 6", ["6"]),
        ("run simplecil --tasks 101", ["tasks", "101", "1 and the 100 classes"]),
        ("run simplecil --tasks 10 --increment 1", ["tasks", "increment", "not both"]),
        ("run simplecil --data=", ["dataset ''"]),
        ("run simplecil --data folder --data-root=", ["'data_root'", "''"]),
        (f"run simplecil --order seed:{'1' * 5000}", ["seed:N"]),
        ("run simplecil --device gpu9", ["'gpu9'"]),
        ("run simplecil --precision bf16-true", ["'precision'", "'bf16-true'", "bf16-mixed"]),
        ("run simplecil --backbone nothing", ["'nothing'"]),
        ("run simplecil --data-options split=x", ["'split'"]),
        ("run --set stage1.lrr=1", ["'stage1.lrr'", "'lr'"]),
        ("run --set stage1.lr=fast", ["'stage1.lr'", "'fast'"]),
        ("run --set=beta=-1 --set ortho=0.2", ["'beta'", "'-1'"]),
        ("run --set stage1.optimizer=adamx", ["'adam"]),
        ("run --set stage1=3", ["stage1"]),
        ("run --set stage1.lr=1 stage1=2", ["stage1"]),
        ("run --resume nothing --out other", ["--out", "--resume"]),
        ("run --resume nothing --config other", ["--config", "--resume"]),
        ("run --config nothing", ["nothing", "missing"]),
        ("run --resume nothing", ["nothing", "config.toml"]),
        ("learn a b --metod x", ["--metod", "--method", "clipcil learn --help"]),
        ("learn a", ["FOLDER"]),
        ("learn a b c", ["c", "clipcil learn --help"]),
        ("predict m p --top", ["--top"]),
        ("predict m p --by steal", ["--by", "steal", "link", "copy"]),
        ("serve m --port x", ["--port", "x"]),
        ("describe emoji --endpoint e --model m --out o --jobs 65", ["--jobs", "65", "64"]),
        ("bench --seed 1", ["--seed", "--seeds"]),
        ("bench --kept both", ["both"]),
        ("-x", ["-x"]),
        ("predict model pictures --out answers", ["--out", "--on ray"]),
        ("predict model pictures --on ray --out answers --csv", ["--csv", "--on ray"]),
    ],
)
def test_a_wrong_word_is_named(
    words: str, named: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, *words.split())
    assert all(each in line for each in named), line
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "[run]"),
        ("[run]\nmethod = 'rapf'\n", "[method]"),
        ("[run\n", "TOML"),
        ("[run]\nsede = 1\n[method]\n", "'sede'"),
        ("[run]\nmethod = 'rapf'\n[method]\nx = 1\n", "'x'"),
        ("[run]\ndata_options = 3\n[method]\n", "data_options"),
        ("[run]\nmethod = 7\n[method]\n", "'7'"),
    ],
)
def test_damaged_settings_are_named(text: str, named: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert named in refused(capsys, "run", "--resume", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_finished_run_that_is_resumed_says_so_and_prints_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "run")
    main(["run", "zero-shot", "--tasks", "2", "--seed", "1", "--out", out, "--quiet"])
    first = capsys.readouterr().out
    shutil.rmtree(tmp_path / "run" / "checkpoint")  # not needed any more
    monkeypatch.setattr(Experiment, "run", None)  # nothing is to be run again
    main(["run", "--resume", out])
    assert capsys.readouterr().out == f"{out} is complete; nothing is left to do\n{first}"
    main(["run", "zero-shot", "--resume", out, "--seed", "1", "--tasks", "2"])
    capsys.readouterr()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    (tmp_path / "run" / "results.json").write_text(json.dumps({**results, "drift": [None, {"cosine_before": 0.1}]}))
    main(["run", "--resume", out])  # as another version may have written it
    assert capsys.readouterr().out.endswith(first)
    # What is given is told apart from what is left out, also where it is the default.
    assert "its run.seed is 1, not 0" in refused(capsys, "run", "--resume", out, "--seed", "0")
    assert "its run.method is zero-shot, not dmc-ot" in refused(capsys, "run", "dmc-ot", "--resume", out)
    assert "its run.tasks is 2, not 10" in refused(capsys, "run", "--resume", out, "--tasks", "10")
    assert "its run.increment is None, not 50" in refused(capsys, "run", "--resume", out, "--increment", "50")


def test_an_option_of_a_grid_that_is_given_twice_adds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--methods", "simplecil", "--out", str(tmp_path / "out"), "--methods=zero-shot", "--dry-run"]
    main(["bench", *words, "--only", "simple*", "--orders", "seed:1", "--only", "zero*", "--orders", "seed:2"])
    printed = capsys.readouterr().out
    assert "SimpleCIL" in printed and "Zero-shot CLIP" in printed and "0 of 4 runs" in printed


def test_the_version_and_the_wait_policy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    main(["--version"])
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"clipcil {project['version']}\n"
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    main(["--version"])
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE", "what the user has set stays"


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), SystemExit),
        (RuntimeError("could not create a primitive"), SystemExit),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 8.00 GiB"), SystemExit),
        (RuntimeError("a bug"), RuntimeError),
    ],
)
def test_too_little_memory_is_one_line(
    error: Exception, raised: type, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(words: list[str]) -> None:
        raise error

    monkeypatch.setattr("clipcil.cli._dispatch", fails)
    with pytest.raises(raised):
        main(["predict"])
    said = "clipcil: there is not enough memory for this\n" if raised is SystemExit else ""
    assert capsys.readouterr().err == said


def test_a_run_is_resumed_from_another_folder_with_the_place_of_its_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split, colours in (("train", ("red", "green")), ("test", ("blue", "white"))):
        write_tree(tmp_path / "data" / split, {"cat": plain(colours[0]), "dog": plain(colours[1])})
    shutil.copytree(tmp_path / "data", tmp_path / "copies")
    monkeypatch.chdir(tmp_path)
    words = ["run", "zero-shot", "--data", "folder", "--data-root", "data", "--tasks", "2", "--quiet"]
    main([*words, "--out", "run"])
    kept, results = (tmp_path / "run" / "config.toml").read_bytes(), tmp_path / "run" / "results.json"
    whole = results.read_bytes()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    results.unlink()
    assert " data" in refused(capsys, "run", "--resume", "../run")
    assert "belongs to another run" in refused(capsys, "run", "--resume", "../run", "--data-root", "../copies")
    main(["run", "--resume", "../run", "--data-root", "../data", "--quiet"])
    assert results.read_bytes() == whole and (tmp_path / "run" / "config.toml").read_bytes() == kept


def test_a_config_file_makes_the_same_run_and_words_take_precedence(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    main(["run", "dmc-ot", "--tasks", "5", "--set", "beta=0.3", *FAST, "--out", "first", "--quiet"])
    kept = Path("first", "config.toml")
    main(["run", "--config", str(kept), "--out", "second", "--quiet"])
    assert Path("second", "config.toml").read_bytes() == kept.read_bytes()
    words = ["zero-shot", "--increment", "50", "--order", "natural", "--quiet", "--out"]
    Path("mine.toml").write_text("[run]\ntasks = 5\nseed = 4\norder = 'seed:2'\n")
    main(["run", *words, "third", "--config", "mine.toml"])
    run = tomllib.loads(Path("third", "config.toml").read_text())["run"]
    assert (run["method"], run["seed"], run["order"], run["increment"]) == ("zero-shot", 4, "natural", 50)
    assert "tasks" not in run
    for text, named in (
        ("tasks = 5", "'tasks'"),
        ("[run]\nsede = 5", "'seed'"),
        ("[run]\npreset = 1", "'preset'"),
        ("[other]\na = 1", "'other'"),
    ):
        Path("mine.toml").write_text(text)
        assert named in refused(capsys, "run", "--config", "mine.toml")


def test_ten_tasks_are_a_default_that_fits_and_a_number_that_is_refused(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "zero-shot", "--data", str(pictures), "--quiet", "--out", str(tmp_path / "run")]
    for tasks in ("7", "10"):
        assert f"tasks is {tasks}; it must lie between 1 and the 6 classes" in refused(capsys, *words, "--tasks", tasks)
    main(words)
    assert len(json.loads((tmp_path / "run" / "results.json").read_text())["sizes"]) == 6
    assert "tasks" not in tomllib.loads((tmp_path / "run" / "config.toml").read_text())["run"]
    main(["run", "--config", str(tmp_path / "run" / "config.toml"), "--out", str(tmp_path / "again"), "--quiet"])


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """The lines on a wide terminal by their first words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "250")
        main(words)
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}


def test_every_method_says_what_it_keeps_and_its_values_are_those_of_the_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = rows(capsys, "methods")
    for name, kind in methods().items():
        assert kind.title in found[name] and kind.keeps in found[name]
    assert methods()["zero-shot"].keeps == "nothing" and "statistics" not in found["l2p"]
    for name, said in (("simplecil", "no preset for emoji"), ("rapf", "with the preset for emoji")):
        main(["methods", name, "--data", "emoji"])
        assert said in capsys.readouterr().out.splitlines()[0]
    words, large = ("methods", "dmc-ot", "--data", "cifar100"), ("--backbone", "openai/clip-vit-base-patch16")
    assert "3e-05" in rows(capsys, *words)["stage1.lr"]
    assert "1e-05" in rows(capsys, *words, *large)["stage1.lr"]


def test_options_of_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a folder for each class" in rows(capsys, "datasets")["folder"]
    assert list(datasets()) == sorted(datasets())
    assert "0.2" in rows(capsys, "datasets", "folder")["test_share"]
