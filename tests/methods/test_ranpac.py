"""RanPAC against scikit-learn's ridge regression on the same random features, and its first phase."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from clipcil.checks import some_classes
from clipcil.clip import CLIP
from clipcil.data.reader import Reader
from clipcil.data.tasks import Task, TaskStream
from clipcil.errors import UserError
from clipcil.heads.stacked import spreads
from clipcil.methods.ranpac import PENALTIES, SHARPNESS, RanPAC, RanPACAdapted, RanPACAdaptedConfig, RanPACConfig
from clipcil.training.trainer import Callback, Trainer
from clipcil.training.tuning import Tuned
from support.features import FeaturePictures


def make(clip: CLIP) -> RanPAC:
    torch.manual_seed(0)
    return RanPAC(RanPACConfig(projections=90), clip, Trainer())


def pictures(clip: CLIP, labels: Tensor, seed: int) -> FeaturePictures:
    width = clip.config.vision.width
    centres = torch.randn(6, width, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(len(labels), width, generator=torch.Generator().manual_seed(seed))
    return FeaturePictures(centres[labels] + 0.7 * noise, labels)


def test_tasks_and_more_pictures_of_known_classes_equal_one_ridge_regression_on_everything(tiny_clip: CLIP) -> None:
    method = make(tiny_clip)
    labels = (torch.arange(3).repeat(20), torch.arange(3, 6).repeat(15), torch.arange(6))
    sets = [pictures(tiny_clip, each, seed) for each, seed in zip(labels, (1, 2, 9), strict=True)]
    for index in range(2):
        method.learn(Task(index, [f"thing {index} {i}" for i in range(3)], sets[index]))
    penalty = float(method.penalty)
    method.learn_again(Task(2, [], sets[-1]))
    assert method.penalty == penalty  # one picture of a class chooses nothing
    features = torch.relu(torch.cat([part.pooled for part in sets]) @ method.directions).double()
    targets = one_hot(torch.cat([part.labels for part in sets])).double()
    model = Ridge(alpha=penalty, fit_intercept=False).fit(features.numpy(), targets.numpy())
    test = pictures(tiny_clip, torch.arange(6).repeat(5), 3)
    expected = model.predict(torch.relu(test.pooled @ method.directions).double().numpy())
    ours = method.logits(test)
    torch.testing.assert_close(ours.double(), torch.from_numpy(expected), atol=1e-3, rtol=0)
    assert (ours.argmax(1) == test.labels).double().mean() > 0.8


@pytest.mark.parametrize("count", [2, 4])
def test_a_small_task_is_never_held_out_whole(tiny_clip: CLIP, count: int) -> None:
    torch.manual_seed(0)
    method = RanPAC(RanPACConfig(projections=90, held_out=0.9), tiny_clip, Trainer())
    method.grow(["a", "b"])
    features = torch.rand(1, 90).expand(count, -1)  # one picture over and over, so that its class can be foretold
    penalty, sharpness = method.choose_penalty(features, torch.zeros(count, dtype=torch.int64))
    kernel = float(features[0].double().square().sum())
    errors = [(kernel / (kernel + choice) - 1) ** 2 for choice in PENALTIES]
    assert errors[PENALTIES.index(float(penalty))] == min(errors)
    assert 1 <= float(sharpness) <= 1000


def test_one_picture_of_every_class_chooses_nothing_and_more_of_them_do(tiny_clip: CLIP) -> None:
    """What is held out is then never foretold, and the largest λ would always be the best."""
    method, first = make(tiny_clip), pictures(tiny_clip, torch.arange(3), 1)
    method.learn(Task(0, list("abc"), first))
    assert float(method.penalty) == 1 and float(method.sharpness) == SHARPNESS
    more = pictures(tiny_clip, torch.arange(3).repeat(20), 2)
    method.learn_again(Task(1, [], more))
    assert float(method.penalty) != 1 and float(method.sharpness) != SHARPNESS


def test_the_penalty_is_the_best_of_plain_fits(tiny_clip: CLIP) -> None:
    method = make(tiny_clip)
    method.grow(["a", "b", "c"])
    part = pictures(tiny_clip, torch.arange(3).repeat(20), 1)
    features = method.expand(part.pooled)
    torch.manual_seed(5)
    chosen, sharpness = map(float, method.choose_penalty(features, part.labels))
    torch.manual_seed(5)
    order = torch.randperm(60)
    fit, check, targets = order[12:], order[:12], one_hot(part.labels, 3).double().numpy()
    errors, guesses = [], []
    for penalty in PENALTIES:
        model = Ridge(alpha=penalty, fit_intercept=False).fit(features[fit].double().numpy(), targets[fit])
        guess = model.predict(features[check].double().numpy())
        errors.append(((guess - targets[check]) ** 2).mean())
        guesses.append(guess)
    best = min(range(17), key=lambda i: errors[i])
    assert chosen == PENALTIES[best]

    def cost(factor: float) -> float:  # the pull of `mix` towards 0 is in units of the scores' spread
        scores = torch.from_numpy(guesses[best])
        return float(cross_entropy(factor * scores, part.labels[check]) + 1e-3 * (factor * spreads([scores])[0]) ** 2)

    assert cost(sharpness) < min(cost(0.9 * sharpness), cost(1.1 * sharpness))


def adapted(clip: CLIP, cache: Path, **options: Any) -> tuple[RanPACAdapted, TaskStream]:
    own, config = clip.with_own_vision_tower(), RanPACAdaptedConfig(projections=50, **options)
    return RanPACAdapted(config, own, Trainer()), TaskStream(some_classes(9), Reader(own, cache), range(9), (4, 3, 2))


def weights(clip: CLIP) -> Tensor:
    return torch.cat([value.flatten() for value in clip.vision.state_dict().values()])


@pytest.mark.parametrize("kind", ["lora", "norms"])
def test_the_tower_is_adapted_to_the_first_task_alone(mini: CLIP, tmp_path: Path, kind: Tuned) -> None:
    method, stream = adapted(mini, tmp_path, tuned=kind)
    towers, sums = [weights(mini)], torch.zeros(50, 50, dtype=torch.float64)
    for task in stream.tasks():
        method.learn(task)
        towers.append(weights(method.clip))
        features = method.expand(task.pictures.pooled).double()  # by the adapted tower, also those of the first task
        sums = sums + features.T @ features
    assert not torch.equal(towers[0], towers[1])
    assert torch.equal(towers[1], towers[2]) and torch.equal(towers[1], towers[3])
    torch.testing.assert_close(method.gram, sums)


def test_a_last_step_that_ruins_the_tower_is_one_line(mini: CLIP, tmp_path: Path) -> None:
    """No loss is read after it, and each of the weights is finite: it shows in the features alone."""
    ruin = replace(RanPACAdaptedConfig().phase1, epochs=1, lr=1e30, batch_size=99)
    method, stream = adapted(mini, tmp_path, phase1=ruin, tuned="tower")
    with pytest.raises(UserError, match=r"training diverged: .* phase1\.lr"):
        for task in stream.tasks():
            method.learn(task)


def test_phase_one_is_the_cross_entropy_of_a_cosine_head(mini: CLIP, tmp_path: Path) -> None:
    """At a rate of zero every step of whole batches has the loss of the head as it was drawn, at temperature 1."""
    still = replace(RanPACAdaptedConfig().phase1, epochs=2, lr=0, batch_size=99)
    method, stream = adapted(mini, tmp_path, phase1=still)
    tasks = stream.tasks()  # held, because a stream that is let go closes its task
    task, losses = next(tasks), []

    class Losses(Callback):
        def step(self, stage: str, epoch: int, step: int, loss: Tensor, rate: float) -> None:
            losses.append(float(loss))

    method.trainer.callbacks.append(Losses())
    method.grow(task.names)
    pooled, labels = normalize(task.pictures.pooled, dim=-1), task.pictures.labels
    torch.manual_seed(3)
    method.adapt(task)
    torch.manual_seed(3)
    head = normalize((2 * torch.rand(4, pooled.shape[1]) - 1) * pooled.shape[1] ** -0.5, dim=-1)
    wanted = float(cross_entropy(pooled @ head.T, labels))
    assert losses == pytest.approx([wanted, wanted], abs=1e-5)
