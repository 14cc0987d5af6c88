"""One lesson: what was handed over, what was held out, what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from clipcil.classifier.unknown import Calibration

FEWEST = 5
"""Pictures from which on a class has some held out: below that every one of them is needed."""


@dataclass
class Lesson:
    """What became of it."""

    new: dict[str, int] = field(default_factory=dict)
    """Pictures of each class that was new, held-out ones included."""
    again: dict[str, int] = field(default_factory=dict)
    """Pictures of each class that was known."""
    left_out: list[str] = field(default_factory=list)
    """A line for each picture that could not be read."""
    held_out: int = 0
    """Pictures the model did not train on."""
    accuracy: float | None = None
    """Share of them that it tells right among all classes it knows; None where there are none."""
    calibration: Calibration = field(default_factory=Calibration)


def split_held_out(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows held out: a tenth of each class, at least one, spread evenly over its pictures.

    Nothing of a class with fewer than five pictures.
    """
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        rows = torch.nonzero(labels == label).flatten()
        count = max(1, len(rows) // 10) if len(rows) >= FEWEST else 0
        held[rows[[(2 * i + 1) * len(rows) // (2 * count) for i in range(count)]]] = True
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()
