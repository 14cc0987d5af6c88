"""DMC with thousands of classes: a softmax over some of them, and few maps in the memory."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.methods.dmc import DMCOT, DMCOTConfig
from clipcil.training import losses
from clipcil.training.augment import TowerTraining
from clipcil.training.losses import nearest_classes, sampled_classes
from clipcil.training.trainer import Training
from support.visual_stream import learnt, stream, tower

QUICK = DMCOTConfig(stage1=TowerTraining(epochs=0), stage2=Training(epochs=2, batch_size=8), prompt_length=2)


def classifier(config: DMCOTConfig) -> Tensor:
    clip = tower()
    return cast(DMCOT, learnt(DMCOT, config, clip, stream(clip))).classifier


def test_nearest_and_competing_classes() -> None:
    texts = normalize(torch.randn(50, 6, generator=torch.Generator().manual_seed(0)), dim=-1)
    near = nearest_classes(texts, 4)
    for index, row in enumerate(near):
        wanted = (texts @ texts[index]).argsort(descending=True)[:4]
        assert set(row.tolist()) == set(wanted.tolist()) and index in row.tolist()
    classes = torch.tensor([7, 3, 7, 49])
    targets, part = sampled_classes(classes, near, 53)
    assert torch.equal(part[targets], classes)
    assert part[-3:].tolist() == [50, 51, 52] and torch.equal(part, part.unique())
    assert set(near[[3, 7, 49]].flatten().tolist()) == set(part[:-3].tolist())


def test_with_all_neighbours_the_softmax_is_the_whole_one() -> None:
    whole, sampled = (classifier(replace(QUICK, softmax_classes=count)) for count in (0, 1))  # 32 are all classes
    torch.testing.assert_close(sampled, whole, atol=1e-5, rtol=1e-5)


def test_with_few_neighbours_it_trains_and_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "nearest_classes", lambda texts: nearest_classes(texts, 1))
    whole, sampled = (classifier(replace(QUICK, softmax_classes=count, max_replay=1)) for count in (0, 1))
    assert torch.isfinite(sampled).all() and not torch.allclose(sampled, whole, atol=1e-5)


@pytest.mark.parametrize(("most", "kept"), [(1, 1), (9, 2)])
def test_the_memory_keeps_few_maps(most: int, kept: int) -> None:
    clip, config = tower(), replace(QUICK, stage1=TowerTraining(epochs=1, lr=1e-3), max_spaces=most)
    assert len(cast(DMCOT, learnt(DMCOT, config, clip, stream(clip))).memory.matrices) == kept
