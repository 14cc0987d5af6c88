"""Why this answer: the heat lies where the object is, and the kept picture is the most similar one."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import clipcil
from clipcil.classifier.explain import MADE_BY
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.cli import main
from clipcil.data.pictures import thumbnail
from support.errors import one_line
from support.lessons import pictures, refused, write_tree
from support.towers import make_tiny_clip

NAMES = ["airplane", "ant", "apple", "banana", "bee", "bus", "cat", "castle"]


@pytest.fixture(scope="module", params=["simplecil", "strata"])
def taught(request: pytest.FixtureRequest) -> clipcil.Classifier:
    model = clipcil.Classifier(request.param, **({"random_features": 64} if request.param == "strata" else {}))
    model.learn(pictures(NAMES))
    return model


def collage(rng: random.Random, tests: dict[str, list[Image.Image]]) -> tuple[Image.Image, list[str]]:
    """Four pictures of four classes in the quarters of one."""
    names, page = rng.sample(NAMES, 4), Image.new("RGB", (256, 256), "white")
    for place, name in enumerate(names):
        page.paste(rng.choice(tests[name]).resize((110, 110)), (9 + 128 * (place % 2), 9 + 128 * (place // 2)))
    return page, names


def test_the_heat_of_a_class_lies_on_its_object(taught: clipcil.Classifier) -> None:
    """By chance a quarter of the heat would."""
    rng, tests, shares = random.Random(0), pictures(NAMES, test=True), []
    for _ in range(8):
        page, names = collage(rng, tests)
        for place, name in enumerate(names):
            found = taught.explain(page, name)
            assert found.name == name and found.heat.shape == (384, 384) and found.heat.min() >= 0
            quarter = found.heat[192 * (place // 2) :, 192 * (place % 2) :][:192, :192]
            shares.append(quarter.sum() / found.heat.sum())
    assert np.mean(shares) > 0.45, np.mean(shares)


def test_the_likeliest_class_is_explained_with_its_probability(taught: clipcil.Classifier) -> None:
    picture = pictures(["bee"], test=True)["bee"][0]
    guess, found = taught.predict(picture), taught.explain(picture)
    assert found.name == guess.names[0] and found.probability == pytest.approx(guess.probabilities[0], abs=1e-3)
    assert found.similar is None  # nothing is kept
    with one_line("knows no class 'dog'"):
        taught.explain(picture, "dog")


OPTIONS = {"ranpac": {"projections": 64}, "strata": {"random_features": 64}}


@pytest.mark.parametrize("method", ["simplecil", "strata", "ranpac", "discriminant", "zero-shot", "engine", "l2p"])
def test_a_plain_tower_is_explained_too(method: str) -> None:
    model = clipcil.Classifier(method, backbone=make_tiny_clip(), **OPTIONS.get(method, {}))
    model.learn(pictures(NAMES[:2]))
    wide = pictures(["bus"])["bus"][0].resize((96, 48))
    heat = model.explain(wide).heat
    assert heat.shape == (192, 384) and heat.max() > 0
    assert not heat[:, :90].any() and not heat[:, -90:].any()  # a centre crop does not look at the sides


def test_passes_of_other_threads_and_later_ones_leave_no_trace(taught: clipcil.Classifier) -> None:
    picture = pictures(["bee"], test=True)["bee"][0]
    before, first = taught.predict_proba([picture]), taught.explain(picture)
    assert np.array_equal(taught.predict_proba([picture]), before)
    assert np.array_equal(taught.explain(picture).heat, first.heat)
    trunk = taught.learner.clip.preprocess.trunk
    assert trunk is not None and not any(module._forward_hooks for module in trunk.modules())


def test_the_most_similar_kept_picture_is_shown(tmp_path: Path, taught: clipcil.Classifier) -> None:
    taught.save(tmp_path / "m")
    small, tests = SmallPictures(tmp_path / "m"), pictures(["bee", "bus"], test=True)
    small.switch(True)
    jpegs = [thumbnail(each, 96) for each in (*tests["bus"], *tests["bee"])]
    small.add("bee", [b"damaged", *jpegs])
    model = clipcil.load(tmp_path / "m")
    assert model.explain(jpegs[-1], "bee").similar == jpegs[-1]
    assert model.explain(jpegs[0], "bee").similar == jpegs[0]
    assert model.explain(jpegs[0], "bus").similar is None
    model.explain(jpegs[-1], "bee").save(tmp_path / "why.png")
    with Image.open(tmp_path / "why.png") as image:
        assert image.size == (3 * 384 + 16, 384) and image.text["Software"] == MADE_BY
    with Image.open(io.BytesIO(model.explain(jpegs[0], "bee").png)) as image:
        assert image.size == (384, 384)


def test_predict_explains_into_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    week = write_tree(tmp_path / "week", pictures(NAMES[:2]))
    main(["learn", str(tmp_path / "m"), str(week), "--method", "simplecil", "--quiet"])
    asked = write_tree(tmp_path / "asked", pictures(NAMES[:2], test=True))
    (asked / "ant" / "bad.png").write_bytes(b"no picture")
    words = ["predict", str(tmp_path / "m"), str(asked), "--explain", str(tmp_path / "why")]
    for _ in range(2):  # a second time replaces them
        with pytest.raises(SystemExit):
            main(words)
        names = sorted(path.name for path in (tmp_path / "why").iterdir())
        assert names == ["0.png-2.png", "0.png.png", "1.png-2.png", "1.png.png"]
    (asked / "ant" / "bad.png").unlink()
    (tmp_path / "why" / "0.png.png").write_bytes(b"mine")
    capsys.readouterr()
    assert "0.png.png" in refused(capsys, *words)
    assert "--explain" in refused(capsys, *words, "--on", "ray", "--out", str(tmp_path / "o"))


def test_gradients_stay_off_elsewhere(taught: clipcil.Classifier) -> None:
    taught.explain(pictures(["bee"], test=True)["bee"][0])
    assert not any(each.requires_grad for each in taught.learner.clip.parameters())
    assert not any(each.grad is not None for each in taught.learner.clip.parameters())
    assert torch.is_grad_enabled()
