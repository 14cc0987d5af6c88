"""Export of a model to one file that runs without clipcil: pictures in, logits and features out.

`forward(pictures (B, 3, height, width), resized and normalised) → logits (B, C), features (B, dim)`. The preprocessing
trunk, where the backbone has one, the vision tower and the classifier are inside. Beside it: `classes.json` with the
names, the preprocessing, the temperature and the threshold; where the logits are cosines of the features with one
vector for each class, times a constant, `classifier.safetensors` with these vectors.
"""

import dataclasses
import hashlib
import io
import logging
import tempfile
import warnings
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

import clipcil
from clipcil.classifier.classifier import Classifier
from clipcil.data.reader import TensorBatch
from clipcil.errors import UserError
from clipcil.signals import uninterrupted
from clipcil.storage import claim, run_lock, whole_file, write_json

Format = Literal["pt2", "onnx"]
CLASSES, VECTORS_FILE = "classes.json", "classifier.safetensors"


class ExportedNetwork(nn.Module):
    """Trunk, tower and classifier of a model in one."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.method = model.learner.method
        self.tower = self.method.clip.vision  # a method does not register a frozen tower
        self.trunk = self.method.clip.preprocess.trunk

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, height, width) → logits (B, C), features (B, dim)."""
        # `Preprocess.finish` splits the batch to suit a CPU's cache; a graph cannot hold a varying number of parts.
        pixels = pictures if self.trunk is None else self.trunk(pictures)
        batch = TensorBatch(self.method.clip, pixels)
        return self.method.logits(batch), batch.features


def export(model: Classifier, out: Path, form: Format = "pt2") -> Path:
    """Write a model for other programs; returns the file of the network.

    `out` must be new, empty or hold an export, which is replaced.
    """
    if not model.classes:
        raise UserError("the model has learnt nothing yet; teach it first")
    claim_export(out)
    network = ExportedNetwork(model).eval().cpu().requires_grad_(False)
    steps = model.learner.clip.preprocess.steps
    with torch.no_grad():
        files = {f"model.{form}": _trace(network, torch.zeros(2, 3, *steps.crop), form)}
    if network.method.class_vectors:
        vectors = getattr(network.method, network.method.class_vectors).float()
        files[VECTORS_FILE] = save({"class_vectors": nn.functional.normalize(vectors, dim=-1).contiguous()})
    verdict = "none of the classes where the highest probability < threshold"
    if model.calibration.novelty is not None:
        verdict += "; clipcil itself uses a distance that is not exported, so its verdicts can differ"
    facts = {
        "made_by": f"clipcil {clipcil.__version__}",
        "classes": model.classes,
        "temperature": model.calibration.temperature,
        "threshold": model.calibration.threshold,
        "preprocess": {**dataclasses.asdict(steps), "filter": Image.Resampling(steps.resample).name.lower()},
        "inputs": "pictures (B, 3, height, width): RGB, resized, × rescale, − mean, ÷ std",
        "outputs": "logits (B, classes), features (B, dim); probabilities are softmax(temperature × logits)",
        "unknown": verdict,
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    with run_lock(out), uninterrupted():
        with ExitStack() as renames:  # after all are written: a full disk leaves everything as it was
            for name, data in files.items():
                renames.enter_context(whole_file(out / name)).write_bytes(data)
            write_json(out / CLASSES, facts)  # first: it says that the folder is ours, and which files belong to it
        if VECTORS_FILE not in files:
            (out / VECTORS_FILE).unlink(missing_ok=True)  # of an earlier export, of another model
    return out / f"model.{form}"


def claim_export(out: Path) -> None:
    """Refuse a folder that holds anything but an export."""
    claim(out, CLASSES, "export")
    claim(out / CLASSES, '"made_by": "clipcil ', "export")


def _trace(network: nn.Module, example: Tensor, form: Format) -> bytes:
    """The network as the contents of a file, for any number of pictures."""
    if form == "onnx" and (find_spec("onnx") is None or find_spec("onnxscript") is None):
        raise UserError("ONNX needs an extra: pip install 'clipcil[onnx]'; --format pt2 needs nothing more")
    shapes = ({0: torch.export.Dim("batch", min=1, max=65536)},)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the tracer logs the traceback of every error that it raises
    try:
        program: Any = torch.export.export(network, (example,), dynamic_shapes=shapes)
        if form == "pt2":
            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            return buffer.getvalue()
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="clipcil-") as folder:
            warnings.simplefilter("ignore")
            names: Any = {"input_names": ["pictures"], "output_names": ["logits", "features"]}
            torch.onnx.export(program, verbose=False, **names).save(f"{folder}/model.onnx")  # type: ignore[union-attr]
            return Path(folder, "model.onnx").read_bytes()
    except Exception as error:  # the tracer raises many kinds of errors
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(f"torch {torch.__version__} cannot export this method ({why})") from error
    finally:
        logging.disable(before)
