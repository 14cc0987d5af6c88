"""A model on disk: `model.toml` (readable), the weights (safetensors), `README.md` (a model card).

The weights go into a file named after their checksum; then `model.toml`, which names that file, is replaced in one
step; only then is the old file deleted. So whoever looks sees the old model or the new one, and a process killed at any
moment leaves one of the two whole. Nothing is ever unpickled.
"""

from __future__ import annotations

import datetime
import tomllib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import tomli_w
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import clipcil
from clipcil.classifier.card import model_card
from clipcil.classifier.lesson import LessonRecord
from clipcil.classifier.unknown import Calibration
from clipcil.errors import UserError
from clipcil.files import sha256, uninterrupted, whole_file, write_text

FORMAT = "1.1"
"""Version of the folder. A later minor one only adds; a later major one cannot be read by this program."""
_COPY = "bring back the folder from a copy"
MODEL, CARD, LOCK = "model.toml", "README.md", ".lock"


@dataclass
class Known:
    """A class the model knows."""

    name: str
    """What it is called."""
    text: str
    """The name it was taught under: the text inside its prompt. Renaming changes `name` alone, so no score moves."""
    learnt: str
    """The day of its first pictures."""
    pictures: int
    """Pictures it was trained on, all lessons together."""
    newest: str
    """The day of its newest pictures."""
    held_out: int = 0
    """Held-out pictures of it, all lessons together."""
    right: int = 0
    """Those of them that the model told right after its last lesson."""


@dataclass
class Facts:
    """All of a model but its weights."""

    method: str
    settings: dict[str, Any]
    backbone: str
    fingerprint: str
    """Of the backbone's weights and of its preprocessing."""
    seed: int
    templates: tuple[str, ...]
    lessons: int = 0
    """How often it was taught; the seed of a lesson follows from it."""
    sizes: list[int] = field(default_factory=list)
    """Classes of each task."""
    known: list[Known] = field(default_factory=list)
    calibration: Calibration = field(default_factory=Calibration)
    history: list[LessonRecord] = field(default_factory=list)
    """What each lesson brought, the oldest first."""
    weights: str = ""
    sha256: str = ""


def today() -> str:
    return datetime.date.today().isoformat()


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def write_model(folder: Path, facts: Facts, tensors: dict[str, Tensor]) -> None:
    """Replace the model in `folder`, or make the folder. The caller holds the lock."""
    _refuse_other_folders(folder)
    with uninterrupted():
        part = folder / "weights.safetensors"
        with whole_file(part) as path:
            save_file({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()}, path)
        facts.sha256 = sha256(part)
        facts.weights = f"weights-{facts.sha256[:12]}.safetensors"
        part.replace(folder / facts.weights)
        write_text(folder / MODEL, to_toml(facts))
        write_text(folder / CARD, model_card(facts))
        for old in folder.glob("weights-*.safetensors"):
            if old.name != facts.weights:
                old.unlink(missing_ok=True)


def read_model(folder: Path) -> Facts:
    """What `model.toml` says; a UserError where it cannot be used by this program."""
    path = folder / MODEL
    if not path.is_file():
        raise UserError(f"{folder} holds no model (no {MODEL} in it); make one with: clipcil learn {folder} FOLDER")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        major = int(str(table["format"]).split(".")[0])
        if major > int(FORMAT.split(".")[0]):
            raise UserError(
                f"{path} has format {table['format']}, written by clipcil {table.get('clipcil', '?')}; this is clipcil"
                f" {clipcil.__version__}, which reads up to {FORMAT.split('.')[0]}.x: install a newer one"
            )
        classes = [Known(**_own(Known, row)) for row in table["classes"]]
        unknown = {key: table["unknown"].get(key) for key in Calibration.__dataclass_fields__}
        return Facts(
            method=str(table["method"]),
            settings=dict(table["settings"]),
            backbone=str(table["backbone"]),
            fingerprint=str(table["fingerprint"]),
            seed=int(table["seed"]),
            templates=tuple(table["templates"]),
            lessons=int(table["lessons"]),
            sizes=[int(size) for size in table["sizes"]],
            known=classes,
            calibration=Calibration(**unknown),
            history=[LessonRecord(**_own(LessonRecord, row)) for row in table.get("history", [])],
            weights=str(table["weights"]),
            sha256=str(table["sha256"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}); {_COPY}") from error


def _own(kind: type, row: dict[str, Any]) -> dict[str, Any]:
    """The entries of `row` that the dataclass `kind` has; a later version may have added others."""
    return {key: row[key] for key in (entry.name for entry in fields(kind)) if key in row}


def read_weights(folder: Path, facts: Facts) -> dict[str, Tensor]:
    path = folder / Path(facts.weights).name  # never outside the folder, whatever the file says
    try:
        if sha256(path) != facts.sha256:
            raise UserError(f"{path} does not match its checksum in {MODEL}; {_COPY}")
        return load_file(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path} is damaged or missing ({type(error).__name__}); {_COPY}") from error


def to_toml(facts: Facts) -> str:
    task_of = [task for task, size in enumerate(facts.sizes) for _ in range(size)]
    table = {
        "format": FORMAT,
        "clipcil": clipcil.__version__,
        "method": facts.method,
        "backbone": facts.backbone,
        "fingerprint": facts.fingerprint,
        "seed": facts.seed,
        "templates": list(facts.templates),
        "lessons": facts.lessons,
        "sizes": facts.sizes,
        "weights": facts.weights,
        "sha256": facts.sha256,
        "settings": facts.settings,
        "unknown": {key: value for key, value in asdict(facts.calibration).items() if value is not None},
        "history": [asdict(lesson) for lesson in facts.history],
        "classes": [{**asdict(known), "task": task} for known, task in zip(facts.known, task_of, strict=True)],
    }
    return tomli_w.dumps(table)


def size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _refuse_other_folders(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the model")
    if not folder.is_dir() or (folder / MODEL).exists():
        return
    others = [path.name for path in folder.iterdir() if not path.name.startswith((".", "weights"))]
    if others:
        raise UserError(f"{folder} holds other things ({sorted(others)[0]}) and no model; name a new folder")
