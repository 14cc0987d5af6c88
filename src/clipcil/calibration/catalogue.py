"""The calibrations by name. Each is a function `calibrate(memory, before, after)` in a file of its own.

`before` and `after` hold the unit features (n_c, d) of each class of the new task, by the tower before and after its
change; `memory` holds the Gaussians of the old classes in the space before, and is transported into the space after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from clipcil.calibration import none, optimal_transport, pairs, per_class, sdc
from clipcil.memory.gaussians import GaussianMemory

CalibrationName = Literal["none", "task", "class", "pairs", "sdc"]

CALIBRATIONS: dict[CalibrationName, Callable[[GaussianMemory, Sequence[Tensor], Sequence[Tensor]], None]] = {
    "none": none.calibrate,
    "task": optimal_transport.calibrate,
    "class": per_class.calibrate,
    "pairs": pairs.calibrate,
    "sdc": sdc.calibrate,
}
