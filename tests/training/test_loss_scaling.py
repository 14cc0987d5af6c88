"""16-mixed scales the loss for the backward pass; the optimizer reads unscaled gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from torch import nn

from clipcil.training.trainer import Trainer, Training


def scaled_trainer() -> Trainer:
    """A trainer in 16-mixed. On a CPU Fabric takes bf16 for it, which needs no scale; the scaler itself works there."""
    return Trainer(Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu")]))


def fitted(*factors: float, trainer: Trainer | None = None, **how: Any) -> float:
    """A weight that began at 1 after a step of rate 0.1 on each of the losses factor · weight."""
    weight, left = nn.Parameter(torch.ones(())), iter(factors)
    plain = {"weight_decay": 0, "momentum": 0, "schedule": "constant"}
    training = Training(epochs=len(factors), batch_size=4, lr=0.1, **{**plain, **how})
    (trainer or scaled_trainer()).fit("train", [weight], 4, lambda rows: next(left) * weight, training)
    return float(weight)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_are_those_of_the_unscaled_loss(optimizer: str) -> None:
    assert fitted(1, 1, optimizer=optimizer) == pytest.approx(0.8, abs=1e-4)


def test_gradients_are_clipped_at_their_own_length() -> None:
    assert fitted(0.5, 1, optimizer="sgd", clip_norm=0.75) == pytest.approx(1 - 0.05 - 0.075, abs=1e-5)


def test_a_step_whose_scaled_gradient_overflows_is_left_out_and_lowers_the_scale() -> None:
    assert fitted(1e35, 1, optimizer="sgd") == pytest.approx(0.9, abs=1e-5)
    # 8e33 overflows at the first scale, 65,536, and not at half of it
    assert fitted(1e34, 8e33, optimizer="sgd", clip_norm=1) == pytest.approx(0.9, abs=1e-5)


def test_the_scale_of_a_stage_does_not_depend_on_the_stages_before_it() -> None:
    """A run that is resumed after a task begins the next one with a new scaler."""
    trainer = scaled_trainer()
    how = {"optimizer": "sgd", "clip_norm": 1, "schedule": "cosine"}
    ends = [fitted(1e34, 1, 8e33, 1, trainer=each, **how) for each in (scaled_trainer(), trainer, trainer)]
    assert ends[0] == ends[1] == ends[2]
