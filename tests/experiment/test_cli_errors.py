"""Whatever is wrong with a command: exit code 2 and one line that names the value and what to do."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from clipcil.cli import COMMANDS, main
from clipcil.clip.loading import MINI
from clipcil.commands.types import Words


def fail(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("clipcil: ")
    return lines[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("rnu",), "there is no command 'rnu'; did you mean 'run'?"),
        (("run", "dmc-to"), "there is no method 'dmc-to'; did you mean 'dmc-ot'?"),
        (("run", "--data", "emojis"), "there is no dataset 'emojis'; did you mean 'emoji'?"),
        (("run", "--sed", "1"), "--sed"),
        (("run", "--seed", "x"), "setting 'seed' is 'x'"),
        (("run", "--seed", "-1"), "setting 'seed' is '-1'"),
        (("run", "--shots", "0"), "setting 'shots' is '0'"),
        (("run", "simplecil", "--tasks", "101"), "tasks is 101; it must lie between 1 and the 100 classes"),
        (("run", "simplecil", "--tasks", "5", "--increment", "5"), "the number of tasks or the increment, not both"),
        (("run", "simplecil", "--tasks", "10", "--increment", "1"), "the number of tasks or the increment, not both"),
        (("bench", "--tasks", "10", "--increment", "1"), "the number of tasks or the increment, not both"),
        (("run", "simplecil", "--data", ""), "there is no dataset ''"),
        (("run", "simplecil", "--data", "folder", "--data-root", ""), "setting 'data_root' is ''; it must be a path"),
        (("run", "simplecil", "--order", f"seed:{'1' * 5000}"), "write seed:N with a whole number N below 2^32"),
        (("run", "simplecil", "--order", "seed:x"), "class order 'seed:x': write seed:N"),
        (("run", "simplecil", "--order", "nothing.txt"), "'nothing.txt' is neither natural"),
        (("run", "simplecil", "--device", "gpu9"), "device 'gpu9'"),
        (("run", "simplecil", "--precision", "8"), "setting 'precision' is '8'"),
        (("run", "simplecil", "--backbone", "nothing"), "no backbone 'nothing'"),
        (("run", "simplecil", "--data-options", "split=x"), "there is no setting 'split'"),
        (("run", "--set", "stage1.lrr=1"), "there is no setting 'stage1.lrr'; did you mean 'lr'?"),
        (("run", "--set", "stage1.lr=fast"), "setting 'stage1.lr' is 'fast'"),
        (("run", "--set", "stage1.lr=nan"), "setting 'stage1.lr' is 'nan'"),
        (("run", "--set", "stage1.clip_norm=1e400"), "setting 'stage1.clip_norm' is '1e400'"),
        (("run", "--set=beta=-1", "--set", "ortho=0.2"), "setting 'beta' is '-1'"),
        (("run", "--set", "stage1.epochs=1.5"), "setting 'stage1.epochs' is '1.5'"),
        (
            ("run", "--set", "stage1.batch_size=99999999999"),
            "setting 'stage1.batch_size' is '99999999999'",
        ),
        (("run", "--set", "stage1.optimizer=adamx"), "did you mean 'adam"),
        (("run", "--set", "stage1=3"), "stage1"),
        (("run", "--set", "stage1.lr=1", "stage1=2"), "stage1"),
        (("run", "--resume", "nothing", "--out", "other"), "give --out for a new run or --resume to go on with one"),
        (("run", "--resume", "nothing"), "nothing holds no run (there is no config.toml in it)"),
    ],
)
def test_a_wrong_word_is_named(
    words: tuple[str, ...],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in fail(capsys, *words)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []  # a refused command leaves nothing behind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "it has no table [run]"),
        ("run = 3\n", "it has no table [run]"),
        ("[run]\nmethod = 'rapf'\n", "it has no table [method]"),
        ("[run\n", "cannot be read as TOML"),
        ("[run]\nsede = 1\n[method]\n", "there is no setting 'sede'; did you mean 'seed'?"),
        ("[run]\nmethod = 'rapf'\n[method]\nx = 1\n", "there is no setting 'x'"),
        ("[run]\ndata_options = 3\n[method]\n", "data_options"),
        ("[run]\nmethod = 7\n[method]\n", "there is no method '7'"),
    ],
)
def test_damaged_settings_of_a_run_are_named(
    text: str, expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert expected in fail(capsys, "run", "--resume", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in load_file(MINI / "model.safetensors").items() if key != name}


KEY = "visual_projection.weight"
WEIGHTS = {
    "missing": (lambda path: save_file(without(KEY), path), KEY),
    "shape": (lambda path: save_file({**without(KEY), KEY: torch.zeros(3, 3)}, path), "(3, 3)"),
    "nan": (lambda path: save_file({**without(KEY), KEY: torch.full((384, 384), torch.nan)}, path), "NaN"),
    "cut": (lambda path: path.write_bytes((MINI / "model.safetensors").read_bytes()[:9000]), "model.safetensors"),
    "pickle": (lambda path: path.write_bytes(b"\x80\x02}q\x00."), "model.safetensors"),
}


@pytest.mark.parametrize("damage", WEIGHTS)
def test_damaged_weights_are_named(damage: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "backbone"
    shutil.copytree(MINI, folder)
    make, expected = WEIGHTS[damage]
    make(folder / "model.safetensors")
    line = fail(capsys, "run", "simplecil", "--backbone", str(folder), "--out", str(tmp_path / "out"))
    assert expected in line
    assert not (tmp_path / "out").exists()


def test_a_finished_run_that_is_resumed_says_so_and_prints_its_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from clipcil.experiment.experiment import Experiment

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
    for drift in (None, [None, {"cosine_before": 0.1}]):  # as another version may have written it
        changed = {**results, "drift": drift} if drift else {k: v for k, v in results.items() if k != "drift"}
        (tmp_path / "run" / "results.json").write_text(json.dumps(changed))
        main(["run", "--resume", out])
        assert capsys.readouterr().out == f"{out} is complete; nothing is left to do\n{first}"
    # What is given is told apart from what is left out, also where it is the default.
    assert "its run.seed is 1, not 0" in fail(capsys, "run", "--resume", out, "--seed", "0")
    assert "its run.method is zero-shot, not dmc-ot" in fail(capsys, "run", "dmc-ot", "--resume", out)
    assert "its run.tasks is 2, not 10" in fail(capsys, "run", "--resume", out, "--tasks", "10")
    assert "its run.increment is None, not 50" in fail(capsys, "run", "--resume", out, "--increment", "50")


@pytest.mark.parametrize(
    "words",
    ["--set a=1 b=2", "--set a=1 --set b=2", "--set=a=1 --set b=2", "--set=a=1 --set=b=2", "--seed 3 --set a=1 b=2"],
)
def test_settings_add_up_however_they_are_given(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    def run(*, set: Words = (), seed: int = 0) -> None:
        found.extend(set)

    monkeypatch.setitem(COMMANDS, "run", run)
    main(["run", *words.split()])
    assert found == ["a=1", "b=2"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("learn a b --metod x", ["--metod", "--method", "clipcil learn --help"]),
        ("learn a b --metod=x", ["--metod", "--method"]),
        ("learn --model=a b", ["--model"]),
        ("learn a", ["FOLDER"]),
        ("learn a b c", ["c", "clipcil learn --help"]),
        ("learn a b --seed x", ["--seed", "x"]),
        ("predict m p --top", ["--top"]),
        ("predict m p --top 0", ["--top", "0", "1"]),
        ("predict m p --by steal", ["--by", "steal", "link", "copy"]),
        ("serve m --port x", ["--port", "x"]),
        ("describe emoji --endpoint e --model m --out o --jobs 65", ["--jobs", "65", "64"]),
        ("bench --seed 1", ["--seed", "--seeds"]),
        ("-x", ["-x"]),
        ("lern a b", ["there is no command 'lern'; did you mean 'learn'?"]),
    ],
)
def test_a_word_that_the_command_does_not_take_is_named(
    words: str, named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = fail(capsys, *words.split())
    assert all(each in line for each in named)


def test_an_option_of_a_grid_that_is_given_twice_adds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--methods", "simplecil", "--out", str(tmp_path / "out"), "--methods=zero-shot", "--dry-run"]
    main(["bench", *words, "--only", "simple*", "--orders", "seed:1", "--only", "zero*", "--orders", "seed:2"])
    printed = capsys.readouterr().out
    assert "SimpleCIL" in printed and "Zero-shot CLIP" in printed and "0 of 4 runs" in printed
    assert "there is no method 'nothing'" in fail(capsys, "bench", "--methods", "nothing", "--methods", "zero-shot")
    assert "both is not a folder" in fail(capsys, "bench", "--kept", "both", "--kept", str(tmp_path), *words[2:])


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
    "error",
    [
        MemoryError(),
        RuntimeError("could not create a primitive"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 8.00 GiB"),
        RuntimeError("a bug"),
    ],
)
def test_too_little_memory_is_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(words: list[str]) -> None:
        raise error

    monkeypatch.setattr("clipcil.cli._dispatch", fails)
    if str(error) == "a bug":
        with pytest.raises(RuntimeError, match="a bug"):
            main(["predict"])
    else:
        with pytest.raises(SystemExit):
            main(["predict"])
        assert capsys.readouterr().err == "clipcil: there is not enough memory for this\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--out", "answers"), "--out is for --on ray"),
        (("--address", "auto"), "--address is for --on ray"),
        (
            ("--on", "ray", "--out", "answers", "--csv"),
            "--csv cannot be given with --on ray; answers are parquet files",
        ),
        (("--on", "ray", "--out", "answers", "--watch"), "--watch cannot be given with --on ray"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    assert said in fail(capsys, "predict", "model", "pictures", *words)


def test_a_run_is_resumed_from_another_folder_with_the_place_of_its_pictures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (split, name) in enumerate((s, n) for s in ("train", "test") for n in ("cat", "dog")):
        (tmp_path / "data" / split / name).mkdir(parents=True)
        Image.new("RGB", (32, 32), (60 * number, 90, 30)).save(tmp_path / "data" / split / name / "a.png")
    shutil.copytree(tmp_path / "data", tmp_path / "copies")
    monkeypatch.chdir(tmp_path)
    words = ["run", "zero-shot", "--data", "folder", "--data-root", "data", "--tasks", "2", "--quiet"]
    main([*words, "--out", "run"])
    kept, results = (tmp_path / "run" / "config.toml").read_bytes(), tmp_path / "run" / "results.json"
    whole = results.read_bytes()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    results.unlink()
    assert "there is no folder data; name the right one with --data-root" in fail(capsys, "run", "--resume", "../run")
    assert "belongs to another run" in fail(capsys, "run", "--resume", "../run", "--data-root", "../copies")
    main(["run", "--resume", "../run", "--data-root", "../data", "--quiet"])
    assert results.read_bytes() == whole and (tmp_path / "run" / "config.toml").read_bytes() == kept
