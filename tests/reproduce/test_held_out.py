"""The command by which the parts of Strata were chosen reads training pictures only, and counts rightly."""

from dataclasses import replace

import pytest
import torch
from sklearn.metrics import roc_auc_score

from clipcil.clip import load_clip
from clipcil.data.dataset import open_dataset
from reproduce.held_out import Fold, auc, heads, novelty, quadratic


def test_the_area_is_scikit_learn_s() -> None:
    scores = torch.randn(200, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    positive = torch.arange(200) % 3 == 0
    assert auc(scores, positive) == pytest.approx(roc_auc_score(positive, scores), abs=1e-12)
    assert auc(torch.tensor([2.0, 1.0]), torch.tensor([True, False])) == 1


def test_every_head_is_measured_without_a_test_picture() -> None:
    data = open_dataset("emoji")
    train = data.train.subset(torch.nonzero(data.train.labels < 10).flatten())
    blind = replace(data, classes=data.classes[:10], train=train, test=train.subset(torch.arange(0)))
    held = blind.hold_out(1, 0)
    clip = load_clip("mini")
    found = dict(heads(Fold(clip, held)))
    assert {name.partition(" | ")[2] for name in found} >= {"before the projection", "all depths", "depth 1 of 5"}
    assert all(value * 10 % 100 == 0 for value in found.values())  # shares of ten pictures
    assert found["linear discriminant | all depths"] >= 60
    areas = dict(novelty(clip, held, 0))
    assert len(areas) == 5 and all(0 <= area <= 1 for area in areas.values())


def test_the_quadratic_discriminant_is_the_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(30) % 3
    train = torch.randn(30, 5, generator=generator).double() + labels[:, None]
    held = torch.randn(7, 5, generator=generator).double()
    found = quadratic(train, labels, held, 3, ridge=0.2, share=0.5)
    own = [torch.cov(train[labels == label].T) for label in range(3)]
    pooled = sum(own) / 3
    level = 0.2 * pooled.trace() / 5 * torch.eye(5, dtype=torch.float64)
    blends = [0.5 * pooled + 0.5 * each + level for each in own]
    dense = [
        torch.distributions.MultivariateNormal(train[labels == label].mean(0), blends[label]).log_prob(held)
        for label in range(3)
    ]
    gap = found - torch.stack(dense, dim=1)
    assert torch.allclose(gap, gap[:1, :1].expand_as(gap), atol=1e-10)  # the same but for a constant
