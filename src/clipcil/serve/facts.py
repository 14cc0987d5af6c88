"""What the page and the API say of the model."""

from __future__ import annotations

from typing import Any

from clipcil.serve.keeper import Keeper
from clipcil.serve.limits import Limits
from clipcil.serve.small_pictures import SmallPictures


def model_json(keeper: Keeper, small: SmallPictures, limits: Limits) -> dict[str, Any]:
    """The model, or what is known before the first lesson."""
    about = {
        "name": keeper.folder.resolve().name,
        "folder": str(keeper.folder.resolve()),
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
        return (
            about
            | {"exists": False, "method": None, "classes": [], "lessons": [], "can_undo": False}
            | {"accuracy": None, "held_out": 0, "threshold": None}
        )
    facts = keeper.model.facts()
    classes = [
        {
            "name": known.name,
            "learnt": known.learnt,
            "newest": known.newest,
            "pictures": known.pictures,
            "accuracy": None,
            "held_out": 0,
            "small_pictures": len(small.of(known.name)) if small.on else 0,
        }
        for known in facts.known
    ]
    return about | {
        "exists": True,
        "method": facts.method,
        "classes": classes,
        "lessons": [],
        "accuracy": None,
        "held_out": 0,
        "threshold": facts.calibration.threshold,
        "can_undo": False,
    }
