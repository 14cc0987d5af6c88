"""An exported model gives the scores of the model it was made from."""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

import clipcil
from clipcil.classifier.export import export
from clipcil.classifier.predict import stream_scores
from support.errors import one_line
from support.lessons import FAST, flat, pictures

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
Taught = Callable[[str], clipcil.Classifier]
COSINE = ("simplecil", "dmc-ot", "zero-shot", "coop")
"""Methods whose logits are cosines of the features and one vector of each class, times a scale."""
OTHERS = ("strata", "ranpac", "discriminant")
"""Strata has texts, RanPAC a classifier of random features: no vectors give their logits."""


@pytest.fixture(scope="module")
def taught() -> Taught:
    @cache
    def model(method: str) -> clipcil.Classifier:
        made = clipcil.Classifier(method, **{"dmc-ot": FAST, "coop": {"train": {"epochs": 1}}}.get(method, {}))
        made.learn(pictures(["airplane", "ant", "apple"]))
        return made

    return model


def expected(model: clipcil.Classifier, images: list) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[type-arg]
    pixels = torch.stack([model.learner.clip.preprocess.picture(image) for image in images])
    return pixels, torch.stack([scores[0] for _, scores in stream_scores(images, model.learner.method)])


@pytest.mark.parametrize("method", [*COSINE, *OTHERS])
def test_torch_export(method: str, taught: Taught, tmp_path: Path) -> None:
    if method in OTHERS:
        export(taught("simplecil"), tmp_path)  # an earlier export into the same folder, whose vectors must go
    model, images = taught(method), flat(pictures(["airplane", "ant"], test=True))
    network = torch.export.load(export(model, tmp_path)).module()
    pixels, wanted = expected(model, images)
    for count in (1, len(images)):  # any number of pictures
        logits, features = network(pixels[:count])
        assert torch.equal(logits.argmax(1), wanted[:count].argmax(1))
        if method in COSINE:
            # The model's trunk outputs are rounded to half precision in the cache; those of the export are not.
            torch.testing.assert_close(logits, wanted[:count], atol=2e-2, rtol=2e-3)
    facts = json.loads((tmp_path / "classes.json").read_text())
    assert facts["classes"] == model.classes and facts["threshold"] == model.calibration.threshold
    assert (tmp_path / "classifier.safetensors").exists() == (method in COSINE)
    if method in COSINE:
        vectors = load_file(tmp_path / "classifier.safetensors")["class_vectors"]
        scale = 1.0 if model.learner.method.scores == "cosine" else float(model.learner.clip.scale)
        torch.testing.assert_close(scale * normalize(features, dim=-1) @ vectors.T, logits, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(HAS_ONNX, reason="the onnx extra is installed")
def test_onnx_absent_is_one_line(taught: Taught, tmp_path: Path) -> None:
    with one_line("clipcil[onnx]"):
        export(taught("simplecil"), tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not HAS_ONNX, reason="needs the onnx extra")
@pytest.mark.parametrize("method", ["simplecil", "dmc-ot"])
def test_onnx(method: str, taught: Taught, tmp_path: Path) -> None:
    import onnxruntime

    model, images = taught(method), flat(pictures(["airplane", "ant"], test=True))
    session = onnxruntime.InferenceSession(str(export(model, tmp_path / "out", "onnx")))
    pixels, wanted = expected(model, images)
    logits, _ = session.run(None, {"pictures": pixels.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-2, rtol=2e-3)


def test_the_example_of_the_documentation(
    taught: Taught,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "people.md").read_text(encoding="utf-8")
    code = page.split("## An exported model")[1].split("```python\n")[1].split("```")[0]
    model = taught("strata")
    export(model, tmp_path / "things-export")
    monkeypatch.chdir(tmp_path)
    for image in flat(pictures(["airplane", "ant"], test=True)):
        image.save("a.jpg", quality=95)
        exec(compile(code, "people.md", "exec"), {})
        name, probability = capsys.readouterr().out.rsplit(maxsplit=1)
        wanted = model.predict("a.jpg")
        assert float(probability) == pytest.approx(wanted.probabilities[0], abs=0.02)
        assert name in ("none of these", wanted.names[0])
