"""The description of the model that the page and the API show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from clipcil.classifier.facts import KnownClass
from clipcil.classifier.small_pictures import SmallPictures
from clipcil.errors import printable
from clipcil.serve.keeper import Keeper
from clipcil.serve.limits import Limits


def model_json(keeper: Keeper, small: SmallPictures, limits: Limits) -> dict[str, Any]:
    """The model, or what is known before the first lesson."""
    folder = keeper.folder.resolve()
    about = {
        "name": printable(folder.name),  # a name that is not UTF-8 cannot be sent as it is
        "folder": printable(folder),
        "backbone": keeper.backbone,
        "revision": keeper.revision,
        "keep_small_pictures": small.on,
        "limits": {
            "picture_bytes": limits.picture_bytes,
            "request_bytes": limits.request_bytes,
            "request_pictures": limits.request_pictures,
        },
    }
    if keeper.model is None:
        about |= {"exists": False, "method": None, "classes": [], "lessons": [], "threshold": None}
        return about | {"accuracy": None, "held_out": 0, "previous": None}
    facts = keeper.model.facts()
    previous = keeper.previous()
    several = len(facts.known) > 1  # one class is always right, which says nothing
    held_out, right = sum(known.held_out for known in facts.known), sum(known.right for known in facts.known)
    return about | {
        "exists": True,
        "method": facts.method,
        "classes": [_class_json(known, small, several) for known in facts.known],
        "lessons": [
            asdict(record) | {"accuracy": record.accuracy if record.classes > 1 else None} for record in facts.history
        ],
        "accuracy": right / held_out if held_out and several else None,
        "held_out": held_out,
        "threshold": facts.calibration.threshold,
        "previous": previous and {"lessons": previous.lessons, "classes": len(previous.known)},
    }


def _class_json(known: KnownClass, small: SmallPictures, several: bool) -> dict[str, Any]:
    return {
        "name": known.name,
        "learnt": known.learnt,
        "newest": known.newest,
        "pictures": known.pictures,
        "accuracy": known.right / known.held_out if known.held_out and several else None,
        "held_out": known.held_out,
        "small_pictures": len(small.of(known.name)) if small.on else 0,
    }
