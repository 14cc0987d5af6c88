"""DMC with thousands of classes: a softmax over some of them, and few maps in the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.methods.dmc import DMCOT, DMCOTConfig
from clipcil.training import losses
from clipcil.training.augment import TowerTraining
from clipcil.training.losses import nearest_classes, sampled_classes
from clipcil.training.trainer import Trainer, Training
from support.features import learn_all, make_tasks

QUICK = DMCOTConfig(stage1=TowerTraining(epochs=0), stage2=Training(epochs=2, batch_size=8), prompt_length=2)


def learnt(clip: CLIP, config: DMCOTConfig) -> DMCOT:
    own = clip.with_own_vision_tower()
    torch.manual_seed(0)
    method = DMCOT(config, own, Trainer())
    learn_all(method, make_tasks(own, [3, 2, 3]))
    return method


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


def test_with_all_neighbours_the_softmax_is_the_whole_one(tiny_clip: CLIP) -> None:
    whole = learnt(tiny_clip, replace(QUICK, softmax_classes=0))
    sampled = learnt(tiny_clip, replace(QUICK, softmax_classes=1))  # 32 neighbours are more than there are classes
    torch.testing.assert_close(sampled.classifier, whole.classifier, atol=1e-5, rtol=1e-5)


def test_with_few_neighbours_it_trains_and_differs(tiny_clip: CLIP, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "nearest_classes", lambda texts: nearest_classes(texts, 1))
    whole, sampled = (learnt(tiny_clip, replace(QUICK, softmax_classes=count, max_replay=1)) for count in (0, 1))
    assert torch.isfinite(sampled.classifier).all()
    assert not torch.allclose(sampled.classifier, whole.classifier, atol=1e-5)


def test_the_memory_keeps_few_maps(tiny_clip: CLIP) -> None:
    config = replace(QUICK, stage1=TowerTraining(epochs=1, lr=1e-3), max_spaces=1)
    kept: list[Tensor] = [
        learnt_with_tower(tiny_clip, each).memory.matrices for each in (config, replace(config, max_spaces=9))
    ]
    assert len(kept[0]) == 1 and len(kept[1]) == 2


def learnt_with_tower(clip: CLIP, config: DMCOTConfig) -> DMCOT:
    from support.visual_stream import stream

    own = clip.with_own_vision_tower()
    torch.manual_seed(0)
    method = DMCOT(config, own, Trainer())
    for task in stream(own).tasks():
        method.learn(task)
    return method
