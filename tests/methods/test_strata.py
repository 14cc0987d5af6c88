"""Strata: exact lessons, exact forgetting, fewer bytes than DMC-OT, and a score for what is unknown."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from clipcil.checks import Fixture, some_classes
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.tasks import Task
from clipcil.experiment.experiment import Experiment
from clipcil.heads.stacked import fit_ridge
from clipcil.methods.dmc import DMCOT
from clipcil.methods.strata import Strata, StrataConfig
from clipcil.training.trainer import Trainer

SIZES = (4, 3, 5)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data() -> Dataset:
    return some_classes(sum(SIZES))


def learnt(clip: CLIP, data: Dataset, cache: Path) -> Fixture:
    fixture = Fixture(Strata, clip, data, SIZES, cache)
    fixture.learn()
    return fixture


def test_two_lessons_are_one_to_the_bit(mini: CLIP, data: Dataset, cache: Path) -> None:
    whole, parts = (Fixture(Strata, mini, data, SIZES, cache) for _ in range(2))
    whole.learn(end=1)
    stream = parts.stream.tasks()  # held, because a stream that is let go closes its task
    task = next(stream)
    even = torch.arange(len(task.pictures)) % 2 == 0
    parts.method.learn(Task(0, task.names, task.pictures[torch.nonzero(even).flatten()]))
    parts.method.learn_again(Task(0, [], task.pictures[torch.nonzero(~even).flatten()]))
    for name, value in whole.method.state_dict().items():
        assert torch.equal(value, parts.method.state_dict()[name]), name


def made_up(clip: CLIP, labels: list[int], moved: list[int]) -> SimpleNamespace:
    """Pictures of classes `labels`, five each, called `moved`; a class looks the same by any name."""
    count = sum(clip.vision.level_sizes)
    levels = [torch.randn(5, count, generator=torch.Generator().manual_seed(label)) + label for label in labels]
    return SimpleNamespace(levels=torch.cat(levels), labels=torch.tensor(moved).repeat_interleave(5))


def test_a_forgotten_class_was_never_learnt(tiny_clip: CLIP) -> None:
    method, never = (Strata(StrataConfig(random_features=50), tiny_clip, Trainer()) for _ in range(2))
    names = ["dog", "cat", "tree", "boat", "house", "key"]
    for first in (0, 3):
        labels = list(range(first, first + 3))
        method.learn(Task(0, names[first : first + 3], made_up(tiny_clip, labels, labels)))  # type: ignore[arg-type]
    method.forget(4)
    never.learn(Task(0, names[:3], made_up(tiny_clip, [0, 1, 2], [0, 1, 2])))  # type: ignore[arg-type]
    never.learn(Task(1, ["boat", "key"], made_up(tiny_clip, [3, 5], [3, 4])))  # type: ignore[arg-type]
    assert method.names == never.names and method.sizes == never.sizes
    for name, value in method.state_dict().items():
        other = never.state_dict()[name]
        if name in ("texts", "weights"):  # texts encoded in another company differ in their last bits
            torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-3)
        else:
            assert torch.equal(value, other), name
    for index in range(5):  # down to nothing
        method.forget(0)
        assert method.seen == 4 - index and len(method.memory) == 5 * method.seen
        if method.seen == 1:  # nothing of the other classes is left, not even how their scores were weighed
            alone = Strata(StrataConfig(random_features=50), tiny_clip, Trainer())
            alone.learn(Task(0, ["key"], made_up(tiny_clip, [5], [0])))  # type: ignore[arg-type]
            for name, value in alone.state_dict().items():
                torch.testing.assert_close(method.state_dict()[name], value, atol=1e-5, rtol=1e-3)


def test_left_out_is_as_if_a_picture_had_not_been_learnt(mini: CLIP, data: Dataset, cache: Path) -> None:
    """Against a method that was literally taught without it, with the penalties, weights and scales held fixed."""
    fixture = learnt(mini, data, cache)
    method = fixture.method
    assert isinstance(method, Strata)
    with fixture.stream.trained(1, 99) as pictures:
        labels = pictures.labels
        found, _ = method.leave_one_out(pictures, labels)
        plain = method.logits(pictures)
        picked = 7
        place = int(method.memory.find(pictures.levels, labels)[picked])
    keep = torch.arange(len(method.memory)) != place
    rows, own = method.memory.rows() - method.centre, method.memory.labels
    ridge = method.penalties[1] * _level(method.expand(rows), own) / _level(method.expand(rows)[keep], own[keep])
    head = fit_ridge(method.expand(rows)[keep], own[keep], method.seen, torch.arange(0), [float(ridge)])
    expected = method.expand(rows[place : place + 1]).double() @ head.weight + head.bias
    one = fit_ridge(method.expand(rows), own, method.seen, torch.tensor([place]), [float(method.penalties[1])])
    torch.testing.assert_close(one.left_out, expected, atol=0.02, rtol=0)  # class weights change by one picture in six
    assert not torch.allclose(found, plain)
    right = lambda scores: (scores.argmax(1) == labels).double().mean()  # noqa: E731
    assert right(found) < right(plain) == 1  # pictures that were learnt are known by heart


def _level(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    weights = len(labels) / (12 * torch.bincount(labels, minlength=12).double())[labels]
    centre = (weights[:, None] * features).sum(0) / weights.sum()
    return (weights[:, None] * (features - centre).square()).sum()


def test_fewer_bytes_than_dmc_ot(mini: CLIP, data: Dataset, cache: Path) -> None:
    """The memories alone, for fewer pictures than dimensions; and the cap for more."""
    ours, theirs = learnt(mini, data, cache).method, Fixture(DMCOT, mini, data, SIZES, cache)
    theirs.learn()

    def size(module: torch.nn.Module, prefix: str) -> int:
        return sum(v.numel() * v.element_size() for k, v in module.state_dict().items() if k.startswith(prefix))

    # Rows and means without the maps: DMC-OT in single precision would still take more.
    rows = theirs.method.memory.rows.numel() + theirs.method.memory.origin_means.numel()
    assert size(ours, "memory.") < 4 * rows
    assert size(ours, "") < size(theirs.method, "") / 4
    dim = mini.config.dim
    assert ours.memory.limit * (ours.memory.codes.shape[1] + 4 * len(ours.memory.sizes)) < 8 * dim * dim


def test_with_one_picture_a_class_every_head_has_its_say(cache: Path) -> None:
    """No picture can be left out then; with weights of 1 the texts, whose logits are the largest, decided alone."""
    last = {}
    for name in ("strata", "simplecil", "zero-shot"):
        experiment = Experiment(name, data="emoji", tasks=1, shots=1)
        experiment.learn(next(iter(experiment)))
        last[name] = experiment.evaluate().last
    assert last["strata"] > last["simplecil"] > last["zero-shot"] + 10


def test_unknown_pictures_are_stranger(mini: CLIP, cache: Path) -> None:
    data = open_dataset("emoji")
    fixture = Fixture(Strata, mini, data, (60, 40), cache)
    fixture.learn(end=1)
    known, unknown = (fixture.method.novelty(fixture.stream.test(i)) for i in range(2))
    assert known is not None and unknown is not None
    area = (unknown[:, None] > known).double().mean()
    assert area > 0.8
    with fixture.stream.trained(0, 99) as pictures:
        assert isinstance(fixture.method, Strata)
        _, left_out = fixture.method.leave_one_out(pictures, pictures.labels)
        plain = fixture.method.novelty(pictures)
    assert (left_out > plain).double().mean() > 0.9, "a picture that was learnt is no stranger, unless it is left out"
    alarms = (known > left_out.quantile(0.95)).double().mean()
    assert alarms < 0.15, "a threshold that 5 % of the learnt pictures would pass holds for new ones"
