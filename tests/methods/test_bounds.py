"""Fine-tuning forgets, joint training does not: the bounds between which other methods lie."""

from dataclasses import replace

import pytest
import torch

from clipcil.data.tasks import TaskStream
from clipcil.methods.finetune import Finetune, FinetuneConfig
from clipcil.methods.joint import Joint
from support.errors import one_line
from support.visual_stream import FAST, all_tests, learnt, stream, tower

HOW = FinetuneConfig(train=replace(FAST, epochs=12))


def joint_stream() -> tuple[Joint, TaskStream]:
    clip = tower()
    plain = stream(clip)
    source = TaskStream(plain.dataset, plain._reader, range(8), plain.sizes, joint=True)
    method = learnt(Joint, HOW, clip, source)
    assert isinstance(method, Joint)
    return method, source


@torch.no_grad()
def accuracies(method: Finetune, source: TaskStream) -> list[float]:
    """Of the pictures of each task, the share that is recognised among all classes."""
    pictures = all_tests(source)
    right = (method.eval().logits(pictures).argmax(1) == pictures.labels).float()
    return [float(part.mean()) for part in right.split([9 * size for size in source.sizes])]


def test_joint_training_knows_all_tasks_and_fine_tuning_its_last_by_itself() -> None:
    upper = accuracies(*joint_stream())
    clip = tower()
    source = stream(clip)
    method = learnt(Finetune, HOW, clip, source)
    assert isinstance(method, Finetune)
    assert min(upper) > 0.6 and sum(upper) > sum(accuracies(method, source)) + 0.5
    last = source.test(2)
    with torch.no_grad():
        among_its_own = method.logits(last)[:, 5:].argmax(1) + 5
    assert float((among_its_own == last.labels).float().mean()) > 0.6


def test_joint_training_starts_anew_at_every_task() -> None:
    """What it learns last does not depend on what it learnt before."""
    method, source = joint_stream()
    *_, last = source.tasks()
    wanted = method.head.weights[0].clone()
    with torch.no_grad():
        for value in (*method.tower.parameters(), *method.head.parameters()):
            value.add_(0.1)
    method.restart()
    assert all(map(torch.equal, method.tower.parameters(), tower().vision.parameters()))
    assert not any(bool(rows.any()) for rows in method.head.parameters()) and bool(wanted.any())
    assert len(torch.unique(last.pictures.labels)) == 8


def test_joint_training_needs_all_pictures() -> None:
    clip = tower()
    with one_line("joint", "clipcil run"):
        learnt(Joint, HOW, clip, stream(clip))


@pytest.mark.parametrize(("kind", "word"), [(Finetune, "lower bound"), (Joint, "upper bound")])
def test_reports_are_told_that_it_is_a_bound(kind: type[Finetune], word: str) -> None:
    assert kind.bound == word.split()[0]
    method = joint_stream()[0] if kind is Joint else learnt(Finetune, HOW, clip := tower(), stream(clip))
    assert any(word in note for note in method.notes())
