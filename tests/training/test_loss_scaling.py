"""16-mixed scales the loss for the backward pass; what the optimizer reads is not scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from torch import Tensor, nn

from clipcil.training.loop import Session, Training


def fitted(loss_at: float, **how: Any) -> tuple[float, float]:
    """A weight that began at 1 after two steps on the loss `loss_at` · weight, and the scale after them."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    # On a CPU Fabric takes bf16 for 16-mixed, which needs no scale; the scaler itself works there.
    fabric = Fabric(accelerator="cpu", plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    weight = nn.Parameter(torch.ones(()))
    factors = iter([loss_at, 1.0])

    def loss(rows: Tensor) -> Tensor:
        return next(factors) * weight

    training = Training(epochs=2, batch_size=4, lr=0.1, weight_decay=0, momentum=0, schedule="constant", **how)
    Session(fabric).fit("train", [weight], 4, loss, training)
    return float(weight), float(scaler.get_scale())


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_are_those_of_the_unscaled_loss(optimizer: str) -> None:
    assert fitted(1.0, optimizer=optimizer)[0] == pytest.approx(0.8, abs=1e-4)


def test_gradients_are_clipped_at_their_own_length() -> None:
    assert fitted(0.5, optimizer="sgd", clip_norm=0.75)[0] == pytest.approx(1 - 0.05 - 0.075, abs=1e-5)


def test_a_step_whose_scaled_gradient_overflows_is_left_out_and_lowers_the_scale() -> None:
    weight, scale = fitted(1e35, optimizer="sgd")
    assert weight == pytest.approx(0.9, abs=1e-5) and scale == 2.0**15
