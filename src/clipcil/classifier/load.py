"""Loading a model from its folder, and a summary of it that needs no backbone."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.folder import MODEL, RESTORE_ADVICE, load_model, size_on_disk
from clipcil.classifier.learner import HeldOut
from clipcil.classifier.predict import score
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.clip import load_clip
from clipcil.clip.loading import MINI_1
from clipcil.data.reader import TensorBatch
from clipcil.errors import UserError
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.registry import find_method
from clipcil.network import allow_downloads, on_behalf_of_a_folder
from clipcil.settings import override


def load(
    folder: str | Path, *, backbone: str | None = None, device: str = "cpu", allow_download: bool = False
) -> Classifier:
    """Load the model saved in `folder`.

    Args:
        folder: Where it was saved.
        backbone: Path of the model's backbone on this machine, if it has moved.
        device: cpu, cuda or auto.
        allow_download: Allow downloading the backbone that the folder names; one given as `backbone` needs no such
            permission.

    Raises:
        UserError: There is no model, it is damaged, or it was taught with another backbone.

    Examples:
        >>> import clipcil, tempfile
        >>> from PIL import Image
        >>> model = clipcil.Classifier("simplecil")
        >>> lesson = model.learn({name: [Image.new("RGB", (64, 64), name)] for name in ("red", "blue")})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(f"{folder}/model")
        ...     clipcil.load(f"{folder}/model").classes
        ['red', 'blue']
    """
    folder = Path(folder)
    state = load_model(folder)  # first: the model could be replaced while the backbone is loaded
    facts = state.facts
    with allow_downloads(allow_download), on_behalf_of_a_folder(named=backbone is not None):
        clip = load_clip(backbone or facts.backbone)
    if facts.fingerprint == MINI_1:
        raise UserError(f"{folder} was taught with version 1 of the backbone mini, of clipcil 0.1; teach it again")
    found = f"{clip.fingerprint}/{clip.preprocess.fingerprint}"
    if found != facts.fingerprint:
        raise UserError(
            f"{folder} was taught with another backbone (fingerprint {facts.fingerprint}) than '{clip.name}' ({found});"
            " leave out --backbone, or give the path of its own"
        )
    try:
        override(find_method(facts.method).Config(), facts.settings)
    except UserError as error:
        raise UserError(
            f"the settings in {folder / MODEL} do not fit this clipcil ({error}); correct them, or teach it again"
        ) from error
    model = Classifier(backbone=clip, device=device, state=state)
    _check(model, folder)
    model.saved = (folder.resolve(), facts)
    return model


def _check(model: Classifier, folder: Path) -> None:
    """Refuse weights that can be loaded but do not give a picture finite scores and a finite novelty."""
    method, fault = model.learner.method, ""
    try:
        pixels = torch.zeros(1, *method.clip.preprocess.shape, device=method.device)
        [(logits, novelty)] = score(method, TensorBatch(method.clip, pixels))
        fits = logits.shape == (len(model.classes),) and bool(logits.isfinite().all()) and math.isfinite(novelty or 0)
    except Exception as error:  # untrusted weights can break any step of any method
        fits, fault = False, f" ({type(error).__name__})"
    if not fits:
        raise UserError(f"the weights in {folder} do not fit its model{fault}; {RESTORE_ADVICE}")


def load_or_new(
    folder: Path,
    *,
    method: str | None = None,
    seed: int | None = None,
    settings: Mapping[str, Any] | None = None,
    backbone: str | None = None,
    device: str = "cpu",
) -> Classifier:
    """The model saved in `folder`; where there is none, a new one, which is not saved yet.

    An existing model must have the method and the seed, where these are given, and takes no settings.
    """
    given = {key: value for key, value in {"method": method, "seed": seed}.items() if value is not None}
    if not (folder / MODEL).exists():
        return Classifier(backbone=backbone or "mini", device=device, **given, **(settings or {}))  # type: ignore[arg-type]
    if settings:
        raise UserError(f"{folder} has its settings already; --set is for a new model")
    model = load(folder, backbone=backbone, device=device)
    for key, value in given.items():
        found = getattr(model.learner.facts, key)
        if found != value:
            raise UserError(f"{folder} has {key} '{found}', not '{value}'; leave --{key} out")
    return model


def summarise(folder: Path) -> dict[str, Any]:
    """What a model knows and keeps, as values that JSON can hold; the backbone is not loaded."""
    facts, tensors = load_model(folder)
    rows = ("memory.labels", "memory.codes")  # of `ExemplarMemory` and of `FeatureRows`
    try:
        exemplars = [len(value) for key, value in tensors.items() if key.endswith(rows)]
        kept = {
            "exemplars_kept": sum(exemplars) if find_method(facts.method).keeps_exemplars else 0,
            "features_kept": len(tensors.get(f"{HeldOut.prefix}labels", ())),
            "features_transported": int(tensors.get(f"{HeldOut.prefix}carried", torch.zeros(0)).sum()),
        }
        moved: Sequence[float | None] = mean_shifts(tensors) or [None] * len(facts.known)
        known = list(zip(facts.known, facts.task_of, moved, strict=True))
    except Exception as error:  # untrusted weights can be of any shape, under any name
        why = f"the weights in {folder} do not fit its model ({type(error).__name__})"
        raise UserError(f"{why}; {RESTORE_ADVICE}") from error
    right, measured = facts.right
    same, how = ("method", "backbone", "fingerprint", "seed", "lessons"), facts.calibration
    names = {"text": "taught_as", "held_out": "measured_on"}
    return {
        **{key: getattr(facts, key) for key in same},
        "tasks": len(facts.sizes),
        "bytes": size_on_disk(folder),
        "pictures_kept": SmallPictures(folder).count,
        **kept,
        "accuracy": right / measured if measured else None,
        "history": [asdict(lesson) for lesson in facts.history],
        "threshold": how.threshold,
        "novelty": how.novelty,
        "false_alarms": how.false_alarms,
        "held_out": how.pictures,
        "classes": [
            {names.get(key, key): value for key, value in asdict(each).items()} | {"task": task + 1, "moved": shift}
            for each, task, shift in known
        ],
    }


def mean_shifts(tensors: dict[str, Tensor]) -> list[float]:
    """How far each class's mean was transported since it was learnt, 1 − cosine; empty without a Gaussian memory.

    The true drift cannot be known without the old pictures; this is the part of it that calibration has followed.
    """
    own = {key[7:]: value for key, value in tensors.items() if key.startswith("memory.")}
    memory = GaussianMemory()
    if set(own) != set(memory.state_dict()):
        return []
    memory.load_state_dict(own)
    shifts = (1 - cosine_similarity(memory.origin_means, memory.means(), dim=1)).clamp_min(0)
    if not bool(shifts.isfinite().all()):
        raise ValueError("a mean without a direction")
    return [round(value, 6) for value in shifts.tolist()]
