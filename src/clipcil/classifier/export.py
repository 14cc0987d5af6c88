"""Export of a model to one file that runs without clipcil: pictures in, logits and features out.

`forward(pictures (B, 3, height, width), resized and normalised) → logits (B, C), features (B, dim)`. The preprocessing
trunk, where the backbone has one, the vision tower and the classifier are inside. Beside it: `classes.json` with the
names, the preprocessing, the temperature and the threshold; where the logits are cosines of the features with one
vector for each class, times a constant, `classifier.safetensors` with these vectors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
from clipcil.storage import read_json, refuse_links, write_bytes, write_json

Format = Literal["pt2", "onnx"]
CLASSES, VECTORS_FILE = "classes.json", "classifier.safetensors"
VECTORS = ("classifier", "texts", "prototypes")
"""Where methods that score by cosine keep one vector for each class. Others may use the names for something else."""


class Exported(nn.Module):
    """Trunk, tower and classifier of a model in one."""

    def __init__(self, model: Classifier) -> None:
        super().__init__()
        self.method = model.learner.method
        self.tower = model.learner.method.clip.vision  # a frozen tower is no submodule of its method
        self.trunk = model.learner.method.clip.preprocess.trunk

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, height, width) → logits (B, C), features (B, dim)."""
        # The trunk's own forward cuts the batch into pieces that suit a CPU's cache: how many, a graph cannot hold.
        pixels = pictures if self.trunk is None else self.trunk.whole(pictures)
        batch = TensorBatch(self.method.clip, pixels)
        return self.method.logits(batch), batch.features


def export(model: Classifier, out: Path, form: Format = "pt2") -> Path:
    """Write `model` to the folder `out`; returns the file of the network."""
    if not model.classes:
        raise UserError("the model has learnt nothing yet; teach it first")
    _refuse_others_files(out)
    network = Exported(model).eval().cpu()
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    steps = model.learner.method.clip.preprocess.steps
    example = torch.zeros(2, 3, *steps.crop)
    file = out / f"model.{form}"
    with torch.no_grad(), _without_logging():
        program = _to_onnx(network, example) if form == "onnx" else _trace(network, example)
    files = {file.name: _onnx_bytes(program) if form == "onnx" else _pt2_bytes(program)}
    vectors = class_vectors(network, steps.crop)
    if vectors is not None:
        files[VECTORS_FILE] = save({"class_vectors": vectors.contiguous()})
    facts = {
        "made_by": f"clipcil {clipcil.__version__}",
        "classes": model.classes,
        "temperature": model.calibration.temperature,
        "threshold": model.calibration.threshold,
        "preprocess": {**dataclasses.asdict(steps), "filter": Image.Resampling(steps.resample).name.lower()},
        "inputs": "pictures (B, 3, height, width): RGB, resized, × rescale, − mean, ÷ std",
        "outputs": "logits (B, classes), features (B, dim); probabilities are softmax(temperature × logits)",
        "unknown": "none of the classes where the highest probability < threshold"
        + (
            "; clipcil itself uses a distance that is not exported, so its verdicts can differ"
            if model.calibration.novelty is not None
            else ""
        ),
        "sha256": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    with uninterrupted():
        write_json(out / CLASSES, facts)  # first: it says that the folder is ours, and which files belong to it
        for name, data in files.items():
            write_bytes(out / name, data)
        if vectors is None:
            (out / VECTORS_FILE).unlink(missing_ok=True)  # of an earlier export, of another model
    return file


@torch.no_grad()
def class_vectors(network: Exported, size: tuple[int, int]) -> Tensor | None:
    """(C, dim) unit vectors whose cosines with the features are the logits up to a constant factor; None if there are
    no such vectors. This is tested with pictures of noise, not assumed from an attribute's name."""
    noise = torch.randn(8, 3, *size, generator=torch.Generator().manual_seed(0))
    logits, features = network(noise)
    for name in VECTORS:
        vectors = getattr(network.method, name, None)
        if not isinstance(vectors, Tensor) or vectors.shape != (logits.shape[1], features.shape[1]):
            continue
        unit = nn.functional.normalize(vectors.detach().float().cpu(), dim=-1)
        cosines = nn.functional.normalize(features, dim=-1) @ unit.T
        factor = (logits * cosines).sum() / cosines.square().sum()
        if torch.allclose(factor * cosines, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max())):
            return unit
    return None


@contextmanager
def _without_logging() -> Iterator[None]:
    """The tracer writes a traceback to stderr for every step that it cannot take; what it raises says the same."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _pt2_bytes(program: Any) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _onnx_bytes(program: Any) -> bytes:
    with tempfile.TemporaryDirectory(prefix="clipcil-") as folder:
        program.save(str(Path(folder) / "model.onnx"))
        return (Path(folder) / "model.onnx").read_bytes()


def _refuse_others_files(out: Path) -> None:
    """An export replaces an earlier one. Files of the same names that no export wrote belong to the user."""
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; name a folder for the export")
    there = [name for name in (CLASSES, VECTORS_FILE, "model.pt2", "model.onnx") if os.path.lexists(out / name)]
    refuse_links(*(out / name for name in there))
    if not there:
        return
    try:
        facts = read_json(out / CLASSES)
        ours = isinstance(facts, dict) and {"classes", "temperature", "preprocess", "outputs"} <= set(facts)
    except UserError:
        ours = False
    if not ours:
        raise UserError(f"{out / there[0]} exists and is not an export of clipcil; name another folder with --out")


def _trace(network: nn.Module, example: Tensor) -> Any:
    batch = torch.export.Dim("batch", min=1, max=65536)
    try:
        return torch.export.export(network, (example,), dynamic_shapes=({0: batch},))
    except Exception as error:  # the tracer raises many kinds of errors
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(f"torch {torch.__version__} cannot export this method ({why})") from error


def _to_onnx(network: nn.Module, example: Tensor) -> Any:
    if find_spec("onnx") is None or find_spec("onnxscript") is None:
        raise UserError("ONNX needs an extra: pip install 'clipcil[onnx]'; --format pt2 needs nothing more")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            _trace(network, example), input_names=["pictures"], output_names=["logits", "features"], verbose=False
        )
    return program
