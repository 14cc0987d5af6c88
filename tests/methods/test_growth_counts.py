"""What a task costs as classes come, in counts: texts and pictures encoded, matrices multiplied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.p4_tower_passes import count_passes
from benchmarks.p7_growth import Growth
from benchmarks.shapes import SMALL_TEXT, SMALL_VISION, random_clip
from clipcil.clip import CLIP
from clipcil.experiment.spec import RunSpec

FROZEN = {"simplecil": {}, "zero-shot": {}, "rapf": {"adapter": {"epochs": 1}}, "coop": {"train": {"epochs": 1}}}


@pytest.mark.parametrize("method", FROZEN)
def test_a_frozen_tower_sees_every_picture_once_in_ten_tasks(method: str, tiny_clip: CLIP, tmp_path: Path) -> None:
    spec = RunSpec(method=method, tasks=10, backbone="tiny")
    encoded, train, test, peers = count_passes(spec, tmp_path, FROZEN[method], tiny_clip)
    used = train if method != "zero-shot" else 0  # nothing is learnt from pictures there
    assert encoded == test + used
    assert peers == 1100  # 20 test pictures a task, all seen so far after each of ten tasks


def texts_encoded(growth: Growth, train_old: bool) -> list[int]:
    """How many texts pass the text tower at each call while the next task is learnt."""
    counts: list[int] = []
    text = growth.method.clip.text
    handle = text.register_forward_hook(lambda tower, given, output: counts.append(len(output)))
    try:
        method = growth.method
        method.config = replace(method.config, train_old_prompts=train_old)
        method.learn(growth.task())
    finally:
        handle.remove()
    return counts


@pytest.mark.parametrize("train_old", [False, True])
def test_only_prompts_that_train_are_encoded(train_old: bool) -> None:
    growth = Growth(dim=16, classes=3, count=4, clip=random_clip(SMALL_VISION, SMALL_TEXT, 16))
    for _ in range(4):
        growth.skip()
    counts = texts_encoded(growth, train_old)
    new, every = 3 + 1, 5 * (3 + 1)  # the classes and the task prompt
    assert counts[0] == 3  # the hard prompts of stage 1
    assert set(counts[1:]) == {every if train_old else new}
    method = growth.method
    with torch.no_grad():
        whole, tasks = method.text_classifier(all_classes=True)
    assert torch.allclose(method.classifier[-3:], whole[-3:], atol=1e-6)
    assert torch.allclose(method.task_texts[-1:], tasks[-1:], atol=1e-6)


def test_a_task_leaves_one_matrix_however_many_classes_it_has() -> None:
    for classes in (2, 9):
        growth = Growth(dim=16, classes=classes, count=4, clip=random_clip(SMALL_VISION, SMALL_TEXT, 16))
        for _ in range(4):
            growth.skip()
        assert growth.method.memory.matrices.shape == (3, 16, 16)
        assert len(growth.method.memory) == 4 * classes
