"""No calibration: stored Gaussians stay as they are, as in DMC."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from clipcil.memory.gaussians import GaussianMemory


def calibrate(memory: GaussianMemory, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Do nothing."""
