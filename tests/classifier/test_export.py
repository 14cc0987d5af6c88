"""An exported model gives the scores of the model it was made from."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import normalize

import clipcil
from clipcil.classifier.export import export
from clipcil.classifier.predict import stream_scores
from clipcil.data.reader import TensorBatch
from clipcil.errors import UserError
from support.lessons import FAST, flat, pictures

HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))


@pytest.fixture(scope="module", params=["simplecil", "dmc-ot"])
def model(request: pytest.FixtureRequest) -> clipcil.Classifier:
    made = clipcil.Classifier(request.param, **(FAST if request.param == "dmc-ot" else {}))
    made.learn(pictures(["airplane", "ant", "apple"]))
    return made


def expected(model: clipcil.Classifier, images: list) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[type-arg]
    pixels = torch.stack([model.learner.clip.preprocess.picture(image) for image in images])
    return pixels, torch.stack([scores.logits for _, scores in stream_scores(images, model.learner.method)])


def test_torch_export(model: clipcil.Classifier, tmp_path: Path) -> None:
    images = flat(pictures(["airplane", "ant"], test=True))
    file = export(model, tmp_path / "out")
    network = torch.export.load(file).module()
    pixels, wanted = expected(model, images)
    for count in (1, len(images)):  # any number of pictures
        logits, features = network(pixels[:count])
        # The model rounds trunk outputs to half precision on their way through the cache; the exported one does not.
        torch.testing.assert_close(logits, wanted[:count], atol=2e-2, rtol=2e-3)
        assert torch.equal(logits.argmax(1), wanted[:count].argmax(1))
    vectors = load_file(tmp_path / "out" / "classifier.safetensors")["class_vectors"]
    cosines = normalize(features, dim=-1) @ vectors.T
    scale = float(model.learner.clip.scale) if model.facts().method == "dmc-ot" else 1.0
    torch.testing.assert_close(scale * cosines, logits, atol=1e-4, rtol=1e-4)
    facts = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert facts["classes"] == model.classes and facts["threshold"] == model.calibration.threshold


@pytest.mark.skipif(HAS_ONNX, reason="the onnx extra is installed")
def test_onnx_absent_is_one_line(model: clipcil.Classifier, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pip install 'clipcil\[onnx\]'"):
        export(model, tmp_path / "out", "onnx")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(not HAS_ONNX, reason="needs the onnx extra")
def test_onnx(model: clipcil.Classifier, tmp_path: Path) -> None:
    import onnxruntime

    images = flat(pictures(["airplane", "ant"], test=True))
    file = export(model, tmp_path / "out", "onnx")
    session = onnxruntime.InferenceSession(str(file))
    pixels, wanted = expected(model, images)
    logits, _ = session.run(None, {"pictures": pixels.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), wanted, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("method", ["discriminant", "strata"])
def test_what_learn_makes_by_default_can_be_exported(method: str, tmp_path: Path) -> None:
    model = clipcil.Classifier(method)
    model.learn(pictures(["airplane", "ant"]))
    images = flat(pictures(["airplane", "ant"], test=True))
    network = torch.export.load(export(model, tmp_path / "out")).module()
    pixels, wanted = expected(model, images)
    for count in (1, len(images)):
        assert torch.equal(network(pixels[:count])[0].argmax(1), wanted[:count].argmax(1))


@pytest.mark.parametrize("method", ["simplecil", "zero-shot", "coop", "dmc-ot"])
def test_declared_class_vectors_make_the_logits(method: str) -> None:
    settings = {"coop": {"train": {"epochs": 1}}, "dmc-ot": FAST}.get(method, {})
    made = clipcil.Classifier(method, **settings)
    made.learn(pictures(["airplane", "ant"]))
    kind = made.learner.method
    batch = TensorBatch(kind.clip, torch.randn(8, *kind.clip.preprocess.shape))
    with torch.no_grad():
        cosines = normalize(batch.features, dim=-1) @ normalize(getattr(kind, kind.class_vectors), dim=-1).T
        scale = 1.0 if kind.scores == "cosine" else float(kind.clip.scale)
        torch.testing.assert_close(kind.logits(batch), scale * cosines, atol=1e-4, rtol=1e-4)


def test_class_vectors_of_an_earlier_export_do_not_stay(model: clipcil.Classifier, tmp_path: Path) -> None:
    export(model, tmp_path)
    other = clipcil.Classifier("strata")  # it has texts, but its logits are not cosines with them
    other.learn(pictures(["airplane", "ant"]))
    export(other, tmp_path)
    assert not (tmp_path / "classifier.safetensors").exists()


def test_the_example_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "people.md").read_text(encoding="utf-8")
    code = page.split("## An exported model")[1].split("```python\n")[1].split("```")[0]
    model = clipcil.Classifier()
    model.learn(pictures(["airplane", "ant", "apple"]))
    export(model, tmp_path / "things-export")
    monkeypatch.chdir(tmp_path)
    for image in flat(pictures(["airplane", "ant"], test=True)):
        image.save("a.jpg", quality=95)
        exec(compile(code, "people.md", "exec"), {})
        name, probability = capsys.readouterr().out.rsplit(maxsplit=1)
        wanted = model.predict("a.jpg")
        assert float(probability) == pytest.approx(wanted.probabilities[0], abs=0.02)
        assert name in ("none of these", wanted.names[0])
