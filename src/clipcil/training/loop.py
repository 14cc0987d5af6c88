"""How one stage is trained: epochs, optimizer, learning rate and its schedule."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat

from clipcil.settings import Share, options


@options
class Training:
    """How one stage is trained.

    Example:
        >>> import clipcil
        >>> clipcil.Training(epochs=3, lr=1e-5).batch_size
        32
        >>> clipcil.Experiment("dmc-ot", stage1=clipcil.Training(epochs=1)).config.stage1.epochs
        1
    """

    epochs: Annotated[int, Field(ge=0, le=10**6)] = 5
    """Passes over the training pictures of the task."""
    steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    """Minimum number of steps: epochs are added until it is reached. A task of few pictures has few steps per epoch."""
    lr: NonNegativeFloat = 1e-3
    """Peak learning rate."""
    batch_size: Annotated[int, Field(ge=1, le=10**9)] = 32
    """Training pictures per step."""
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    weight_decay: NonNegativeFloat = 1e-4
    momentum: Share = 0.9
    """Momentum; used by sgd only."""
    schedule: Literal["cosine", "cosine-epoch", "quarter-cosine", "constant", "multistep"] = "cosine"
    """cosine: towards 0 after the last step; cosine-epoch: the same curve, but lowered once an epoch (PROOF, ENGINE);
    quarter-cosine: cos(0.99 π/2 · e/(E − 1)) in epoch e of E (CODA-Prompt); multistep: ×0.1 after each milestone."""
    milestones: tuple[int, ...] = ()
    """Epochs after which multistep lowers the learning rate."""
    warmup: Share = 0.0
    """Share of the steps over which the learning rate rises from 0."""
    clip_norm: NonNegativeFloat = 0.0
    """Maximum gradient norm for clipping; 0 disables clipping."""

    def rate(self, step: int, steps: int) -> float:
        """Learning rate at `step` of `steps`, as a share of `lr`."""
        ramp = self.warmup * steps
        if step < ramp:
            return min(1.0, (step + 1) / ramp)
        epoch = step * self.epochs // max(1, steps)
        if self.schedule == "cosine":
            return 0.5 * (1 + math.cos(math.pi * (step - ramp) / max(1.0, steps - ramp)))
        if self.schedule == "cosine-epoch":
            return 0.5 * (1 + math.cos(math.pi * epoch / max(1, self.epochs)))
        if self.schedule == "quarter-cosine":
            return math.cos(0.99 * math.pi / 2 * epoch / max(1, self.epochs - 1))
        if self.schedule == "multistep":
            return float(0.1 ** sum(epoch >= milestone for milestone in self.milestones))
        return 1.0
