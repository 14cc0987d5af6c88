"""RanPAC against scikit-learn's ridge regression on the same random features."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import one_hot

from clipcil.clip import CLIP
from clipcil.data.stream import Task
from clipcil.methods.ranpac import PENALTIES, RanPAC, RanPACConfig
from clipcil.training.loop import Session


def make(clip: CLIP) -> RanPAC:
    torch.manual_seed(0)
    return RanPAC(RanPACConfig(projections=90), clip, Session())


def pictures(clip: CLIP, labels: Tensor, seed: int) -> SimpleNamespace:
    width = clip.config.vision.width
    centres = torch.randn(6, width, generator=torch.Generator().manual_seed(7))
    noise = torch.randn(len(labels), width, generator=torch.Generator().manual_seed(seed))
    return SimpleNamespace(pooled=centres[labels] + 0.7 * noise, labels=labels)


def learn(method: RanPAC, clip: CLIP) -> list[SimpleNamespace]:
    sets = [pictures(clip, torch.arange(3).repeat(20), 1), pictures(clip, torch.arange(3, 6).repeat(15), 2)]
    for index, part in enumerate(sets):
        method.learn(Task(index, [f"thing {index} {i}" for i in range(3)], part))  # type: ignore[arg-type]
    return sets


def test_equals_one_ridge_regression_on_everything(tiny_clip: CLIP) -> None:
    method = make(tiny_clip)
    sets = learn(method, tiny_clip)
    features = torch.relu(torch.cat([part.pooled for part in sets]) @ method.directions).double()
    labels = torch.cat([part.labels for part in sets])
    model = Ridge(alpha=float(method.penalty), fit_intercept=False).fit(
        features.numpy(), one_hot(labels).double().numpy()
    )
    test = pictures(tiny_clip, torch.arange(6).repeat(5), 3)
    expected = model.predict(torch.relu(test.pooled @ method.directions).double().numpy())
    ours = method.logits(test)  # type: ignore[arg-type]
    torch.testing.assert_close(ours.double(), torch.from_numpy(expected), atol=1e-3, rtol=0)
    assert (ours.argmax(1) == test.labels).double().mean() > 0.8


def test_the_penalty_is_the_best_of_plain_fits(tiny_clip: CLIP) -> None:
    method = make(tiny_clip)
    method.grow(["a", "b", "c"])
    part = pictures(tiny_clip, torch.arange(3).repeat(20), 1)
    features = method.expand(part.pooled)
    torch.manual_seed(5)
    chosen = float(method.choose_penalty(features, part.labels))
    torch.manual_seed(5)
    order = torch.randperm(60)
    fit, check, targets = order[12:], order[:12], one_hot(part.labels, 3).double().numpy()
    errors = []
    for penalty in PENALTIES:
        model = Ridge(alpha=penalty, fit_intercept=False).fit(features[fit].double().numpy(), targets[fit])
        errors.append(((model.predict(features[check].double().numpy()) - targets[check]) ** 2).mean())
    assert chosen == PENALTIES[min(range(17), key=lambda i: errors[i])]


def test_more_pictures_later_are_the_same_sums(tiny_clip: CLIP) -> None:
    parts = make(tiny_clip)
    sets = learn(parts, tiny_clip)
    penalty = parts.penalty.clone()
    more = pictures(tiny_clip, torch.arange(6), 9)
    parts.learn_again(Task(2, [], more))  # type: ignore[arg-type]
    everything = torch.cat([part.pooled for part in [*sets, more]])
    features = parts.expand(everything).double()
    torch.testing.assert_close(parts.gram, features.T @ features, rtol=1e-4, atol=1e-2)
    assert parts.penalty == penalty
