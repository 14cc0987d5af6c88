"""What a task costs as classes come: texts and pictures encoded, matrices kept, a softmax over some of the classes."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.methods.dmc import DMCOT, DMCOTConfig
from clipcil.methods.registry import find_method
from clipcil.training import losses
from clipcil.training.augment import TowerTraining
from clipcil.training.losses import nearest_classes, sampled_classes
from clipcil.training.trainer import Trainer, Training
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
    memory = cast(DMCOT, learnt(DMCOT, config, clip, stream(clip))).memory
    assert len(memory) == 8 and memory.matrices.shape == (kept, 24, 24)  # one of each task but the newest


@pytest.mark.parametrize("name", ["simplecil", "zero-shot", "rapf", "coop"])
def test_a_frozen_tower_sees_every_picture_once_however_often_it_is_evaluated(name: str) -> None:
    clip, stages = tower(), {"rapf": {"adapter": Training(epochs=1)}, "coop": {"train": Training(epochs=1)}}
    source = stream(clip, (1,) * 5, each=4)
    method = find_method(name)(find_method(name).Config(**stages.get(name, {})), clip, Trainer())
    for task in source.tasks():
        method.learn(task)
        with torch.no_grad():
            for seen in range(task.index + 1):
                method.logits(source.test(seen))
    train, test = len(source.dataset.train), len(source.dataset.test)
    assert source._reader.passed == test + (train if name != "zero-shot" else 0)  # it learns nothing from pictures


@pytest.mark.parametrize("train_old", [False, True])
def test_only_prompts_that_train_are_encoded(train_old: bool) -> None:
    clip, counts = tower(), list[int]()  # how many texts pass the text tower at each call
    method, tasks = DMCOT(replace(QUICK, train_old_prompts=train_old), clip, Trainer()), stream(clip, (3,) * 4).tasks()
    for _ in range(3):
        method.learn(next(tasks))
    handle = clip.text.register_forward_hook(lambda tower, given, output: counts.append(len(output)))
    method.learn(next(tasks))
    handle.remove()
    new, every = 3 + 1, 4 * (3 + 1)  # the classes and the task prompt
    assert counts[0] == 3  # the hard prompts of stage 1
    assert set(counts[1:]) == {every if train_old else new}
    with torch.no_grad():
        whole, texts = method.text_classifier(all_classes=True)
    assert torch.allclose(method.classifier[-3:], whole[-3:], atol=1e-6)
    assert torch.allclose(method.task_texts[-1:], texts[-1:], atol=1e-6)
