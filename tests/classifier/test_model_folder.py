"""The folder a model lives in: readable, whole or not at all, refused when it cannot be right."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import clipcil
from clipcil.classifier import folder as model_folder
from clipcil.classifier.folder import read_model
from clipcil.classifier.load import summarise
from clipcil.clip.loading import MINI_1
from clipcil.errors import UserError
from support.errors import one_line
from support.lessons import pictures


@pytest.fixture(scope="module")
def model() -> clipcil.Classifier:
    made = clipcil.Classifier("simplecil", seed=3)
    made.learn(pictures(["airplane", "ant"]))
    return made


def edit(folder: Path, old: str, new: str) -> None:
    path = folder / "model.toml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_lies_there(model: clipcil.Classifier, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    model.save(folder)
    table = tomllib.loads((folder / "model.toml").read_text())
    assert table["method"] == "simplecil" and table["backbone"] == "mini" and table["seed"] == 3
    assert [row["name"] for row in table["classes"]] == ["airplane", "ant"]
    assert all(row["pictures"] == 5 and row["task"] == 0 for row in table["classes"])  # one of six is held out
    assert sorted(path.suffix for path in folder.iterdir()) == [".md", ".safetensors", ".toml"]
    assert "| airplane |" in (folder / "README.md").read_text()
    told = summarise(folder)
    assert told["exemplars_kept"] == 0 and told["bytes"] == sum(p.stat().st_size for p in folder.iterdir())


def test_the_features_that_a_model_is_made_of_are_told(tmp_path: Path) -> None:
    model = clipcil.Classifier("strata", random_features=64)
    model.learn(pictures(["airplane", "ant"]), hold_out=False)
    model.save(tmp_path)
    assert summarise(tmp_path)["exemplars_kept"] == 12
    assert "features of training pictures" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("step", ["weights-", "README.md", "model.toml"])
@pytest.mark.parametrize("moment", ["written", "renamed"])
def test_a_write_that_fails_leaves_the_old_model(
    model: clipcil.Classifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, moment: str
) -> None:
    model.save(tmp_path / "m")
    before = clipcil.load(tmp_path / "m")
    more = clipcil.load(tmp_path / "m")
    more.learn(pictures(["apple"]))
    kept = {path.name for path in (tmp_path / "m").iterdir()}
    whole_file = model_folder.whole_file

    @contextmanager
    def fail(path: Path) -> Iterator[Path]:
        with whole_file(path) as part:
            if path.name.startswith(step) and moment == "written":
                raise OSError(28, "No space left on device")
            yield part
            if path.name.startswith(step):
                raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "whole_file", fail)
        with pytest.raises((OSError, UserError)):
            more.save(tmp_path / "m")
    assert {path.name for path in (tmp_path / "m").iterdir()} == kept
    after = clipcil.load(tmp_path / "m")
    assert after.classes == before.classes
    image = pictures(["ant"])["ant"][0]
    assert after.predict([image]) == before.predict([image])
    more.save(tmp_path / "m")  # and the next attempt goes through
    assert len(clipcil.load(tmp_path / "m").classes) == 3


def test_refusals(model: clipcil.Classifier, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    model.save(folder)
    edit(folder, 'format = "1.1"', 'format = "1.7"')
    assert clipcil.load(folder).classes == ["airplane", "ant"]  # a newer minor version only adds
    found = read_model(folder)
    for old, new, words in (
        ('format = "1.7"', 'format = "2.0"', ("format 2.0", "install a newer")),
        (found.fingerprint, "0" * 12, ("fingerprint",)),
        (found.fingerprint, MINI_1, ("version 1 of the backbone mini", "0.1")),
        (found.weights, f"../{found.weights}", ("../weights",)),
    ):
        edit(folder, old, new)
        (tmp_path / found.weights).write_bytes((folder / found.weights).read_bytes())
        with one_line(*words):
            clipcil.load(folder)
        edit(folder, new, old)
    weights = folder / found.weights
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with one_line("checksum"):
        clipcil.load(folder)
    weights.unlink()
    with one_line(found.weights, "missing"):
        clipcil.load(folder)
    (folder / "model.toml").write_text("format = ")
    for place in (folder, tmp_path / "none"):
        with one_line(str(place)):
            clipcil.load(place)
