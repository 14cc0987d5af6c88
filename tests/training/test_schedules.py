"""Learning-rate schedules against PyTorch's scheduler and against the formulas of the codes that use them."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

from clipcil.errors import UserError
from clipcil.training.trainer import Training


def by_epoch(how: Training, steps: int) -> list[list[float]]:
    """The rates of every epoch's steps."""
    total = steps * how.epochs
    return [[how.rate(epoch * steps + step, total) for step in range(steps)] for epoch in range(how.epochs)]


@pytest.mark.parametrize("epochs", [1, 5, 10])
def test_cosine_epoch_is_pytorch_scheduler_stepped_once_an_epoch(epochs: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    for rates in by_epoch(Training(epochs=epochs, schedule="cosine-epoch"), steps=7):
        assert rates == pytest.approx([optimizer.param_groups[0]["lr"]] * 7, abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_quarter_cosine_has_mean_two_over_pi() -> None:
    """CODA-Prompt (GT-RIPL/CODA-Prompt at 6417d4f): cos(99 π e / (200 (K − 1))) in epoch e of K."""
    epochs = by_epoch(Training(epochs=20, schedule="quarter-cosine"), steps=3)
    for epoch, rates in enumerate(epochs):
        assert rates == pytest.approx([math.cos(99 * math.pi * epoch / (200 * 19))] * 3)
    assert sum(map(sum, epochs)) / 60 == pytest.approx(0.64, abs=0.02)
    assert by_epoch(Training(epochs=1, schedule="quarter-cosine"), steps=2) == [[1.0, 1.0]]


def test_cosine_falls_at_every_step_and_has_mean_one_half() -> None:
    rates = [rate for epoch in by_epoch(Training(epochs=5), steps=20) for rate in epoch]
    assert rates[0] == 1 and all(a > b for a, b in pairwise(rates))
    assert sum(rates) / 100 == pytest.approx(0.505, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "value"),
    [("optimizer", "SGD"), ("schedule", "Cosine"), ("epochs", 1.5), ("epochs", "three"), ("lr", None), ("epochs", -1)],
)
def test_a_training_made_in_python_is_checked_like_one_of_the_command_line(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"'{name}' is '{value}'"):
        Training(**{name: value})
    assert Training(epochs="3").epochs == 3  # type: ignore[arg-type]


def test_warm_up_rises_to_the_rate_and_never_above_it() -> None:
    for share in (0.1, 0.3, 0.5):
        how = Training(epochs=1, schedule="constant", warmup=share)
        for steps in range(1, 120):
            rates = [how.rate(step, steps) for step in range(steps)]
            assert max(rates) == 1.0 and rates == sorted(rates), (share, steps)
