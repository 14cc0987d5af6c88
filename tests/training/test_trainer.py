"""Learning-rate schedules against PyTorch's and the codes that use them; the scaled loss of 16-mixed."""

import math
from typing import Any

import pytest
import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.precision import MixedPrecision
from torch import nn

from clipcil.training import trainer
from clipcil.training.augment import TowerTraining
from clipcil.training.trainer import Trainer, Training
from support.errors import one_line


def by_epoch(how: Training, steps: int) -> list[list[float]]:
    """The rates of every epoch's steps."""
    total = steps * how.epochs
    return [[how.rate(epoch * steps + step, total) for step in range(steps)] for epoch in range(how.epochs)]


@pytest.mark.parametrize("epochs", [1, 5, 10])
@pytest.mark.parametrize(("schedule", "every"), [("cosine", 1), ("cosine-epoch", 7)])
def test_cosines_are_pytorch_scheduler_stepped_at_every_step_or_epoch(schedule: Any, every: int, epochs: int) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
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
    assert Training(epochs="3").epochs == 3


def test_warm_up_rises_to_the_rate_and_never_above_it() -> None:
    for share in (0.1, 0.3, 0.5):
        how = Training(epochs=1, schedule="constant", warmup=share)
        for steps in range(1, 120):
            rates = [how.rate(step, steps) for step in range(steps)]
            assert max(rates) == 1.0 and rates == sorted(rates), (share, steps)


def test_a_stage_ends_at_its_maximum_of_steps() -> None:
    """Three epochs of four steps: all of them, at most five, and at most twenty."""
    for most, wanted in ((0, 12), (5, 5), (20, 12)):
        weight, steps = nn.Parameter(torch.ones(())), []
        how = Training(
            epochs=3, batch_size=2, lr=0.1, optimizer="sgd", momentum=0, schedule="constant", most_steps=most
        )

        def loss(rows: torch.Tensor, weight: nn.Parameter = weight, steps: list[int] = steps) -> torch.Tensor:
            steps.append(len(rows))
            return weight * 1.0

        Trainer().fit("train", [weight], 8, loss, how)
        assert len(steps) == wanted and float(weight) == pytest.approx(1 - 0.1 * wanted, abs=1e-3), most


def test_a_schedule_ends_with_the_maximum_of_steps() -> None:
    assert fitted(*[1.0] * 9, trainer=Trainer(), optimizer="sgd", schedule="cosine", most_steps=4) == pytest.approx(
        1 - 0.1 * sum(0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4))
    )


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


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_the_fast_step_of_many_numbers_differs_by_rounding(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> torch.Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.linspace(-1, 1, 5000))
        how = Training(epochs=30, lr=0.01, weight_decay=0.1, optimizer=kind)
        Trainer().fit("stage", [weight], 4, lambda rows: (weight.sin() * (1 + rows.sum())).square().sum(), how)
        return weight.detach()

    expected = trained()
    monkeypatch.setattr(trainer, "LARGE", 1000)
    found = trained()
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
