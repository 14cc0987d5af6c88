"""16-mixed scales the loss for the backward pass; what the optimizer reads is not scaled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn

from clipcil.training.trainer import Trainer, Training


def scaled_trainer() -> Trainer:
    """A trainer in 16-mixed, with a scale that begins at 65,536."""
    # On a CPU Fabric takes bf16 for 16-mixed, which needs no scale; the scaler itself works there.
    scaler = torch.amp.GradScaler("cpu")
    return Trainer(Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)]))


def fitted(loss_at: float, **how: Any) -> tuple[float, float]:
    """A weight that began at 1 after two steps on the loss `loss_at` · weight, and the scale after them."""
    trainer = scaled_trainer()
    weight = nn.Parameter(torch.ones(()))
    factors = iter([loss_at, 1.0])

    def loss(rows: Tensor) -> Tensor:
        return next(factors) * weight

    training = Training(epochs=2, batch_size=4, lr=0.1, weight_decay=0, momentum=0, schedule="constant", **how)
    trainer.fit("train", [weight], 4, loss, training)
    return float(weight), trainer.fabric._precision.scaler.get_scale()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_are_those_of_the_unscaled_loss(optimizer: str) -> None:
    assert fitted(1.0, optimizer=optimizer)[0] == pytest.approx(0.8, abs=1e-4)


def test_gradients_are_clipped_at_their_own_length() -> None:
    assert fitted(0.5, optimizer="sgd", clip_norm=0.75)[0] == pytest.approx(1 - 0.05 - 0.075, abs=1e-5)


def test_a_step_whose_scaled_gradient_overflows_is_left_out_and_lowers_the_scale() -> None:
    weight, scale = fitted(1e35, optimizer="sgd")
    assert weight == pytest.approx(0.9, abs=1e-5) and scale == 2.0**15


HOW = Training(epochs=4, batch_size=4, lr=0.1, optimizer="sgd", momentum=0, weight_decay=0, clip_norm=1)


def steep(weight: nn.Parameter) -> Callable[[Tensor], Tensor]:
    """A loss whose first gradient overflows at the scale it begins with, and whose third only at that one."""
    factors = iter([1e34, 1.0, 8e33, 1.0])
    return lambda rows: next(factors) * weight


def test_the_scale_of_a_stage_does_not_depend_on_the_stages_before_it() -> None:
    """A run that is resumed after a task begins the next one with a new scaler."""
    trainer, alone, second = scaled_trainer(), nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    scaled_trainer().fit("second", [alone], 4, steep(alone), HOW)
    first = nn.Parameter(torch.ones(()))
    trainer.fit("first", [first], 4, steep(first), HOW)
    trainer.fit("second", [second], 4, steep(second), HOW)
    assert torch.equal(second, alone)
