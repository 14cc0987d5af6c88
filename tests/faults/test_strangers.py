"""Files and folders of strangers are used, or refused in one line."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from PIL import Image
from safetensors.torch import save

import clipcil
from clipcil.classifier.folder import load_model, read_model, write_model
from clipcil.classifier.state import ModelState
from clipcil.data.sources import list_files
from clipcil.descriptions.file import read_descriptions
from clipcil.errors import UserError
from clipcil.report.runs import find_runs, read_run
from clipcil.storage import open_regular, read_bytes, read_json, read_toml, sha256
from clipcil.tensor_store import read_entry
from support.finished_runs import write_run
from support.lessons import plain, refused

DEEP = "[" * 100_000


REFUSED = {
    "JSON": ["{", DEEP, "[" * 40 + "]" * 40, '{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', '"\\ud800"', "9" * 30],
    "TOML": ["a = ", f"a = {DEEP}", "a = nan", "a = +inf", "a = 2020-01-01", ".".join("a" * 50) + " = 1"],
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in REFUSED.items() for text in texts])
def test_text_that_is_refused(kind: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(UserError, match=f"x cannot be read as {kind}"):
        (read_json if kind == "JSON" else read_toml)(tmp_path / "x")


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "link", "is a symbolic link"),
        (tmp_path / "none", "is missing"),
    ):
        with pytest.raises(UserError, match=said):
            open_regular(path)
    assert read_json(tmp_path / "link", links=True) == {}
    with pytest.raises(UserError, match="larger than"):
        read_bytes(tmp_path / "file", 1)
    with pytest.raises(UserError, match="regular file"):
        read_descriptions(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not a whole safetensors"),
        (save({"a": torch.tensor([1.0, float("nan")])}), "holds a NaN"),
        (save({"a": torch.tensor(float("inf"), dtype=torch.float16)}), "holds a NaN"),
        (save({"a": torch.zeros(2).to(torch.float8_e4m3fn)}), "not used here"),
        (save({"a": torch.zeros(9)})[:-1], "not a whole safetensors"),
    ],
)
def test_tensors_that_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(UserError, match=said):
        read_entry(tmp_path / "w", sha256(tmp_path / "w"))


VALUES: list[Any] = ["x", "", -1, 0, 10**12, 2**63, 1.5, True, [], {}, [[]], [1], {"a": 1}, "\x1b[2J", "a" * 20_000]


def mutations(value: Any) -> Iterator[Any]:
    """Copies of a table, each with one entry replaced by another kind of value, or taken out."""

    def places(item: Any) -> Iterator[tuple[Any, Any]]:
        for key in list(item) if isinstance(item, dict) else range(min(2, len(item))) if isinstance(item, list) else []:
            yield item, key
            yield from places(item[key])

    for number in range(len(list(places(value)))):
        for new in [*VALUES, None]:
            changed = json.loads(json.dumps(value))
            item, key = list(places(changed))[number]
            if new is None:
                del item[key]
            else:
                item[key] = new
            yield changed


def test_a_mutated_model_is_used_or_refused_in_one_line(saved: Path) -> None:
    facts, _ = load_model(saved)
    table = clipcil.storage.read_toml(saved / "model.toml")
    refusals = 0
    for number, changed in enumerate(mutations(table)):
        (saved / "model.toml").write_text(tomli_w.dumps(changed))
        try:
            read_model(saved)
            if number % 40 == 0:  # loading takes longer than reading
                clipcil.load(saved)
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 300 and facts.sizes == [2]
    for name in ("nan", "inf", "[[[[]]]]", "10e5000"):
        (saved / "model.toml").write_text(tomli_w.dumps(table).replace("temperature = ", f"temperature = {name} #"))
        with pytest.raises(UserError, match="is damaged"):
            clipcil.load(saved)


def test_weights_that_do_not_fit_are_refused_in_one_line(saved: Path) -> None:
    facts, tensors = load_model(saved)
    for key, value in tensors.items():
        for other in (value[:1], torch.zeros(7), torch.zeros(()), value.new_zeros(0), value.to(torch.int8)):
            if other.shape != value.shape or other.dtype != value.dtype:
                write_model(saved, ModelState(facts, {**tensors, key: other}))
                with contextlib.suppress(UserError):  # used, where the method does not need it, or refused
                    clipcil.load(saved).predict(plain("red"))


def test_weights_that_fit_the_scores_but_not_the_statistics_are_refused(tmp_path: Path) -> None:
    """What predicting does not need, and the next lesson does: rows that are not those of the classes."""
    model = clipcil.Classifier("discriminant")
    model.learn({"red": plain("red", "darkred"), "blue": plain("blue", "navy")})
    model.save(tmp_path / "m")
    facts, tensors = load_model(tmp_path / "m")
    rows, ranks = tensors["rows"], tensors["ranks"]
    wrong = [("rows", rows[:1]), ("rows", rows[0, 0]), ("rows", torch.cat([rows, rows])), ("rows", rows.flatten())]
    for key, value in [*wrong, ("ranks", ranks.flip(0) + torch.tensor([9, -9])), ("ranks", ranks * 2**40)]:
        write_model(tmp_path / "m", ModelState(facts, {**tensors, key: value.contiguous()}))
        with pytest.raises(UserError, match="does not fit discriminant"):
            clipcil.load(tmp_path / "m")
    write_model(tmp_path / "m", ModelState(facts, {**tensors, "counts": torch.zeros_like(tensors["counts"])}))
    with pytest.raises(UserError, match="does not fit discriminant: a class of no picture"):
        clipcil.load(tmp_path / "m")


@pytest.mark.parametrize("score", ["logits", "novelty"])
def test_weights_whose_scores_are_not_finite_are_refused(
    score: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(clipcil.load(saved).learner.method)
    before = getattr(kind, score)
    wrong = {"logits": lambda self, batch: before(self, batch) / 0, "novelty": lambda *_: torch.tensor([1e999])}
    monkeypatch.setattr(kind, score, wrong[score])
    with pytest.raises(UserError, match="do not fit its model"):
        clipcil.load(saved)


def test_mutated_results_are_used_or_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", "dmc-ot", tasks=2)
    values = json.loads((run / "results.json").read_text())
    values["config"]["method"] = {"beta": 0.1}
    refusals, taken = 0, 0
    for changed in mutations(values):
        (run / "results.json").write_text(json.dumps(changed))
        try:
            found = read_run(run)
            _ = (found.method, found.data, found.seed, found.seconds, found.key, found.stream)
            taken += 1
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 500 and taken > 50
    (run / "results.json").write_text(DEEP)
    assert "cannot be read" in refused(capsys, "report", str(run))


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder 1,200 folders down. Python's own functions cannot delete it: they recurse."""
    folder = tmp_path
    for _ in range(1200):
        folder = folder / "d"
        folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_runs_and_pictures_are_looked_for_at_any_depth(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        find_runs([tmp_path])
    Image.new("RGB", (4, 4)).save(deep / "a.png")
    assert list_files(tmp_path) == [deep / "a.png"]


def test_folders_that_link_to_each_other_end_and_count_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        plain("red")[0].save(tmp_path / name / f"{name}.png")
        for other in ("a", "b", "c"):
            (tmp_path / name / f"to {other}").symlink_to(tmp_path / other)
    assert [path.name for path in list_files(tmp_path)] == ["a.png", "b.png", "c.png"]
    assert len(list_files(tmp_path / "a")) == 3
