"""A change to a saved model, under its lock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clipcil.classifier.classifier import Classifier, load
from clipcil.classifier.model_folder import hold_model, read_model


def change(folder: Path, backbone: str | None, do: Callable[[Classifier], None]) -> None:
    """Load the model, `do` something to it, write it back."""
    read_model(folder)  # says what is wrong before a lock is made in a folder that holds no model
    with hold_model(folder):
        model = load(folder, backbone=backbone)
        do(model)
        model.write(folder)
