"""The contract can fail: each of these methods breaks one promise, and `check_method` says which."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from clipcil import checks
from clipcil.clip import CLIP
from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.methods.base import Method


class Means(Method):
    """The nearest class mean, which keeps every promise."""

    name, title = "means", "Means"
    means: Tensor

    def build(self) -> None:
        self.growing_buffer("means", self.dim)

    def learn_task(self, task: Task) -> None:
        for label in self.new_labels:
            self.means[label] = task.pictures.features[task.pictures.labels == label].mean(0)

    def logits(self, batch: Batch) -> Tensor:
        return normalize(batch.features, dim=-1) @ normalize(self.means, dim=-1).T


class Vote(Means):
    """A batch votes on its task: a batch of one task, such as those of a test set, agrees with itself."""

    def logits(self, batch: Batch) -> Tensor:
        scores = super().logits(batch)
        tasks = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))
        return scores - (tasks != tasks[scores.argmax(1)].mode().values).float()


class Labels(Means):
    """The labels of the test pictures are read where there are any."""

    def logits(self, batch: Batch) -> Tensor:
        scores = super().logits(batch)
        return scores + one_hot(batch.labels, self.seen) if hasattr(batch, "labels") else scores


class Hidden(Means):
    """What a later task needs is not in the checkpoint."""

    def build(self) -> None:
        super().build()
        self.kept: list[Tensor] = []

    def learn_task(self, task: Task) -> None:
        super().learn_task(task)
        self.kept.append(task.pictures.features.mean(0))
        self.means[self.old :] -= torch.stack(self.kept).mean(0)


class Untouched(Means):
    """The tower moves, and is not marked as changed."""

    tunes_tower = True

    def build(self) -> None:
        super().build()
        self.tower = self.clip.vision

    def learn_task(self, task: Task) -> None:
        with torch.no_grad():
            self.tower.visual_projection.weight.mul_(1.01)
        super().learn_task(task)


def leaving(change: Callable[[], object]) -> type[Method]:
    """A method that learns and then changes a setting of torch."""

    class Leaving(Means):
        def learn_task(self, task: Task) -> None:
            super().learn_task(task)
            change()

    return Leaving


class Drawing(Means):
    def logits(self, batch: Batch) -> Tensor:
        torch.rand(1)
        return super().logits(batch)


class Rereading(Means):
    """The pictures of the first task are read in the second."""

    def learn_task(self, task: Task) -> None:
        self.first = getattr(self, "first", task.pictures)
        self.first.features.mean()
        super().learn_task(task)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Vote, "a batch of all tasks gives other scores"),
        (Labels, "a batch of all tasks gives other scores"),
        (Hidden, "saved and loaded, it learns the next task otherwise"),
        (Untouched, "was not marked by clip.touch"),
        (leaving(lambda: torch.set_default_dtype(torch.float64)), "learning changed the default dtype"),
        (leaving(lambda: torch.set_grad_enabled(False)), "learning changed whether gradients are computed"),
        (leaving(lambda: torch.manual_seed(0)), "learning changed the seed"),
        (Drawing, "scoring changes the state of torch's random numbers"),
    ],
)
def test_a_method_that_breaks_it_is_caught(kind: type[Method], said: str, mini: CLIP) -> None:
    with pytest.raises(AssertionError, match=said):
        checks.check_method(kind, mini)
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()  # the next check is not spoilt


def test_pictures_of_an_earlier_task_cannot_be_read(mini: CLIP) -> None:
    with pytest.raises(UserError, match="a task that has ended"):
        checks.check_method(Rereading, mini)
