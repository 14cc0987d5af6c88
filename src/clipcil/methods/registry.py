"""Every method by name, found by looking into this folder: a new file is all it takes."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from clipcil.errors import UserError, nearest
from clipcil.methods.base import Method

REGISTRY: dict[str, type[Method]] = {}


def register(kind: type[Method]) -> type[Method]:
    """Class decorator: make a method known by its `name`."""
    other = REGISTRY.get(kind.name)
    if other is not None and other.__qualname__ != kind.__qualname__:
        raise ValueError(f"two methods are called '{kind.name}': {other.__qualname__} and {kind.__qualname__}")
    REGISTRY[kind.name] = kind
    return kind


def methods() -> dict[str, type[Method]]:
    """All methods by name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"clipcil.methods.{module.name}")
    return dict(REGISTRY)


def find_method(name: str) -> type[Method]:
    known = methods()
    if name not in known:
        raise UserError(f"there is no method '{name}'{nearest(name, known)}")
    return known[name]
