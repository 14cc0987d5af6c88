"""Learning-rate schedules against PyTorch's scheduler and against the formulas of the codes that use them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from clipcil.training.augment import TowerTraining
from clipcil.training.trainer import Training
from support.errors import one_line


def by_epoch(how: Training, steps: int) -> list[list[float]]:
    """The rates of every epoch's steps."""
    total = steps * how.epochs
    return [[how.rate(epoch * steps + step, total) for step in range(steps)] for epoch in range(how.epochs)]


@pytest.mark.parametrize("epochs", [1, 5, 10])
@pytest.mark.parametrize(("schedule", "every"), [("cosine", 1), ("cosine-epoch", 7)])
def test_cosines_are_pytorch_scheduler_stepped_at_every_step_or_epoch(schedule: Any, every: int, epochs: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7 * epochs // every)
    how = Training(epochs=epochs, schedule=schedule)
    for place in range(7 * epochs):
        assert how.rate(place, 7 * epochs) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12)
        if (place + 1) % every == 0:
            optimizer.step()
            scheduler.step()


def test_quarter_cosine_has_mean_two_over_pi() -> None:
    """CODA-Prompt (GT-RIPL/CODA-Prompt at 6417d4f): cos(99 π e / (200 (K − 1))) in epoch e of K."""
    epochs = by_epoch(Training(epochs=20, schedule="quarter-cosine"), steps=3)
    for epoch, rates in enumerate(epochs):
        assert rates == pytest.approx([math.cos(99 * math.pi * epoch / (200 * 19))] * 3)
    assert sum(map(sum, epochs)) / 60 == pytest.approx(0.64, abs=0.02)
    assert by_epoch(Training(epochs=1, schedule="quarter-cosine"), steps=2) == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "value"), [("optimizer", "SGD"), ("epochs", 1.5), ("lr", None), ("epochs", -1), ("augment", "rotate")]
)
def test_a_training_made_in_python_is_checked_like_one_of_the_command_line(name: str, value: Any) -> None:
    with one_line(f"'{name}' is '{value}'"):
        TowerTraining(**{name: value})
    assert Training(epochs="3").epochs == 3  # type: ignore[arg-type]


def test_warm_up_rises_to_the_rate_and_never_above_it() -> None:
    for share in (0.1, 0.3, 0.5):
        how = Training(epochs=1, schedule="constant", warmup=share)
        for steps in range(1, 120):
            rates = [how.rate(step, steps) for step in range(steps)]
            assert max(rates) == 1.0 and rates == sorted(rates), (share, steps)
