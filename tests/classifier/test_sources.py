"""Folders at the wrong level, pictures taught twice, and one picture or many."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import clipcil
from clipcil.classifier import sources as layout
from clipcil.classifier.sources import as_list, check_layout, describe_skipped, expand, read_source, skipped_files
from clipcil.data import pictures as data_pictures
from clipcil.data import sources as data_sources
from clipcil.data.datasets.folder import read_tree
from clipcil.data.pictures import decode
from clipcil.data.sources import SUFFIXES
from support.errors import one_line
from support.lessons import pictures


def tree(root: Path, *files: str) -> Path:
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes(b"")
    return root


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["lesson1/crab/a.jpg", "lesson1/ant/b.jpg", "lesson2/bee/c.jpg"], "{root}/lesson1, {root}/lesson2"),
        (["photos/crab/a.jpg", "photos/ant/b.jpg"], "{root}/photos holds folders of pictures (ant, crab)"),
        (["train/crab/a.jpg", "test/crab/b.jpg"], "{root}/test, {root}/train"),
        (["train/a.jpg", "val/b.jpg"], "parts of a dataset"),
        (["Train/crab/a.jpg", "ant/b.jpg"], "name {root}/Train"),
        (["animals/crab/a.jpg", "bus/b.jpg"], "--subfolders"),
        (["a.jpg", "b.jpg"], "'photos' is the class"),
        (["model.toml", "crab/a.jpg"], "{root} is a model"),
        # Of an empty class folder it is said to put pictures there or to remove it, which would cost the model.
        (["model/model.toml", "crab/a.jpg"], "{root}/model is a model"),
    ],
)
def test_wrong_levels_are_refused_with_what_was_meant(files: list[str], named: str, tmp_path: Path) -> None:
    root = tree(tmp_path / "photos", *files)
    with one_line(named.format(root=root)):
        check_layout(root)


@pytest.mark.parametrize(
    "files",
    [
        ["crab/1.jpg", "ant/2.jpg", "ant/more/3.jpg"],
        ["animals/crab/1.jpg", "bus/2.jpg"],
        ["test/1.jpg", "exam/2.jpg"],  # a class may be called so
    ],
)
def test_right_levels_are_accepted(files: list[str], tmp_path: Path) -> None:
    check_layout(tree(tmp_path, *files), subfolders="animals/crab/1.jpg" in files)
    assert not skipped_files(tmp_path)


def test_what_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SUFFIXES", SUFFIXES - {".heic"})  # as without the extra
    root = tree(tmp_path / "w", "ant/1.jpg", "ant/2.HEIC", "ant/b/film.mp4", "loose.png", "notes", ".hidden", "ant/.x")
    found = skipped_files(root)
    assert [path.name for path in found] == ["loose.png", "notes", "2.HEIC", "film.mp4"]
    told = describe_skipped(found)
    assert "1 .heic (pip install 'clipcil[heic]'" in told and "1 .mp4" in told and "1 file without an ending" in told
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "ant").symlink_to(root / "ant")  # what lies behind a link is learnt, so it is looked at
    assert [path.name for path in skipped_files(tmp_path / "linked")] == ["2.HEIC", "film.mp4"]


def test_pictures_of_a_phone_without_the_extra_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody whose every picture is of this kind is not told that there are no pictures."""
    without = SUFFIXES - {".heic", ".heif"}
    monkeypatch.setattr(data_sources, "SUFFIXES", without)
    for finds in (data_sources.list_files, read_tree):
        monkeypatch.setattr(finds, "__defaults__", (without,))
    monkeypatch.setattr(data_pictures, "readable_formats", lambda: ["JPEG", "PNG"])
    root = tree(tmp_path / "photos", "ant/1.heic", "bee/2.HEIC")
    (root / "ant" / "1.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0")
    for action in (
        lambda: read_source(root),
        lambda: expand([root / "bee"]),
        lambda: decode(root / "ant" / "1.heic", "1.heic"),
        lambda: decode((root / "ant" / "1.heic").read_bytes(), "1.heic"),
    ):
        with one_line("clipcil[heic]"):
            action()
    with one_line("texts", "no pictures"):
        expand([tree(tmp_path / "texts", "notes.txt")])
    with one_line("notes.txt"):
        decode(b"no picture", "notes.txt")


def test_pictures_of_a_phone(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    for name, images in pictures(["ant", "bee"]).items():
        (tmp_path / name).mkdir()
        for place, image in enumerate(images):
            decode(image, name).save(tmp_path / name / f"{place}.HEIC", quality=95)
    model = clipcil.Classifier("simplecil")
    assert model.learn(tmp_path).new == {"ant": 6, "bee": 6} and not skipped_files(tmp_path)
    assert model.predict(tmp_path / "bee" / "0.HEIC").name == "bee"
    (tmp_path / "ant" / "cut.heic").write_bytes((tmp_path / "ant" / "0.HEIC").read_bytes()[:300])
    with one_line("cut.heic"):
        model.predict(tmp_path / "ant" / "cut.heic")


def test_pictures_are_taught_once(tmp_path: Path) -> None:
    data, model = pictures(["ant", "bee"]), clipcil.Classifier()
    first = model.learn({"ant": data["ant"][:4] + data["ant"][:1], "bee": data["bee"]})
    assert first.new == {"ant": 4, "bee": 6} and len(first.repeated) == 1
    model.save(tmp_path / "m")
    model = clipcil.load(tmp_path / "m")
    before = model.facts()
    with one_line("10 pictures"):
        model.learn({"ant": data["ant"][:4], "bee": data["bee"]})
    assert model.facts() == before
    again = model.learn({"ant": data["ant"], "bee": data["bee"]})  # bee has nothing new
    assert again.again == {"ant": 2} and len(again.repeated) == 10
    assert [known.pictures for known in model.class_facts] == [6, 6]
    whole = clipcil.Classifier()
    whole.learn(data)
    asked = pictures(["ant"], test=True)["ant"]
    # A batch of two pictures is rounded otherwise than one of six, and the search for the weights of the heads stops
    # at another place of a flat minimum.
    np.testing.assert_allclose(model.predict_proba(asked), whole.predict_proba(asked), atol=5e-3)
    other = model.learn({"bus": [*pictures(["bus"])["bus"], data["ant"][0]]})
    assert other.new == {"bus": 7} and "is taught as 'bus' and as 'ant'" in other.warnings[0]
    model.forget("ant")
    assert model.learn({"ant": data["ant"]}).new == {"ant": 6}  # forgotten, so it can be taught again


def test_one_picture_or_many() -> None:
    image = Image.new("RGB", (8, 6), "red")
    array = np.asarray(image)
    for one in (image, "a.png", Path("a.png"), b"bytes", array, array[..., 0], torch.from_numpy(array.copy())):
        assert as_list(one) == ([one], True) or as_list(one)[1]
    many, single = as_list(np.stack([array] * 5))
    assert len(many) == 5 and not single
    for shape in ((3, 224, 224), (5, 28, 28), (2, 3, 4, 5, 3), (7,)):
        with one_line(str(shape)):
            as_list(np.zeros(shape, dtype=np.uint8))


def test_python_conveniences(tmp_path: Path) -> None:
    data = pictures(["ant", "bee", "bus"])
    model = clipcil.Classifier(seed=1)
    assert repr(model) == "Classifier('strata', 'mini'): 0 classes"
    model.learn(data)
    one, many = model.predict(data["ant"][0]), model.predict(data["ant"][:2])
    assert isinstance(one, clipcil.Prediction) and one.name == "ant" and many[0].names == one.names
    proba = model.predict_proba(data["ant"][:2])
    assert proba.shape == (2, 3) and np.allclose(proba.sum(1), 1)
    assert proba[0].max() == pytest.approx(many[0].probabilities[0])
    assert model.score(data) == model.test(data).accuracy == 1.0
    assert "3 classes from 1 lesson, accuracy" in repr(model) and "<td>" in model._repr_html_()
    shared = clipcil.Classifier("simplecil", model.learner.clip)  # a CLIP that is loaded already
    shared.learn(data)
    shared.save(tmp_path / "m")
    assert clipcil.load(tmp_path / "m").classes == model.classes


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda model, data: model.learn({1: data["ant"]}), "int"),
        (lambda model, data: model.learn({"ant": None}), "'ant'"),
        (lambda model, data: model.learn({"ant": iter(data["ant"])}), "'ant'"),
        (lambda model, data: model.learn(data["ant"]), "list"),
        (lambda model, data: model.forget(3), "int"),
        (lambda model, data: model.predict(None), "NoneType"),
        (lambda model, data: model.predict(data["ant"], top="2"), "top is '2'"),
        (lambda model, data: model.predict(data["ant"], top=1.5), "top is 1.5"),
        (lambda model, data: clipcil.Classifier(seed="zero"), "'zero'"),
        (lambda model, data: clipcil.Classifier(seed=1.5), "'1.5'"),
        (lambda model, data: clipcil.Classifier(clipcil.methods()["simplecil"]), "name of a method"),
        (lambda model, data: clipcil.Classifier("simplecil", 3), "int"),
        (lambda model, data: clipcil.load_clip(None), "NoneType"),
        (lambda model, data: clipcil.Experiment("simplecil", data=data), "dict"),
        (lambda model, data: clipcil.Experiment("dmc", settings=["beta"]), "settings"),
    ],
)
def test_likely_mistakes_in_python_are_one_line(taught: Any, call: Callable[[Any, Any], object], value: str) -> None:
    with one_line(value):
        call(*taught)


@pytest.fixture(scope="module")
def taught() -> Any:
    data = pictures(["ant", "bee"])
    model = clipcil.Classifier("simplecil")
    model.learn(data)
    return model, data


def test_forgetting_the_only_measured_class_forgets_its_threshold() -> None:
    many = [Image.new("RGB", (64, 64), (200 + shade, 0, shade)) for shade in range(25)]
    two = {name: [Image.new("RGB", (64, 64), name)] for name in ("blue", "green")}
    model, fresh = clipcil.Classifier("discriminant"), clipcil.Classifier("discriminant")
    model.learn({"red": many, **two})
    assert model.calibration.threshold is not None
    model.forget("red")
    fresh.learn(two)
    assert model.calibration == fresh.calibration and model.calibration.threshold is None
