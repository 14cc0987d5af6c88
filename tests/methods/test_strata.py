"""Strata: exact lessons, exact forgetting, fewer bytes than DMC-OT, and a score for what is unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipcil.checks import Fixture, set_up
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset, open_dataset
from clipcil.data.stream import Task
from clipcil.methods.dmc import DMCOT
from clipcil.methods.strata import NOVELTY, Strata

SIZES = (4, 3, 5)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data() -> Dataset:
    data = open_dataset("emoji")
    train, test = (part.subset(torch.nonzero(part.labels < sum(SIZES)).flatten()) for part in (data.train, data.test))
    return replace(data, classes=data.classes[: sum(SIZES)], train=train, test=test)


def learnt(clip: CLIP, data: Dataset, cache: Path) -> Fixture:
    fixture = set_up(Strata, clip, data, SIZES, cache)
    fixture.learn()
    return fixture


def state(method: torch.nn.Module) -> dict[str, torch.Tensor]:
    return method.state_dict()


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    assert state(one).keys() == state(other).keys()
    for name, value in state(one).items():
        assert torch.equal(value, state(other)[name]), name


def test_two_lessons_are_one_to_the_bit(mini: CLIP, data: Dataset, cache: Path) -> None:
    whole, parts = (set_up(Strata, mini, data, SIZES, cache) for _ in range(2))
    whole.learn(tasks=1)
    stream = parts.stream.tasks()  # held, because a stream that is let go closes its task
    task = next(stream)
    even = torch.arange(len(task.pictures)) % 2 == 0
    parts.method.learn(Task(0, task.names, task.pictures[torch.nonzero(even).flatten()]))
    parts.method.learn_again(Task(0, [], task.pictures[torch.nonzero(~even).flatten()]))
    assert_same(whole.method, parts.method)


def test_a_forgotten_class_was_never_learnt(mini: CLIP, data: Dataset, cache: Path) -> None:
    fixture = learnt(mini, data, cache)
    fixture.method.forget(5)
    keep = [label for label in range(sum(SIZES)) if label != 5]
    moved = {label: place for place, label in enumerate(keep)}
    train = data.train.subset(torch.nonzero(data.train.labels != 5).flatten())
    train = replace(train, labels=torch.tensor([moved[int(label)] for label in train.labels]))
    test = data.test.subset(torch.nonzero(data.test.labels != 5).flatten())
    test = replace(test, labels=torch.tensor([moved[int(label)] for label in test.labels]))
    rest = replace(data, classes=[data.classes[label] for label in keep], train=train, test=test)
    never = set_up(Strata, mini, rest, (4, 2, 5), cache)
    never.learn()
    assert fixture.method.names == never.method.names and fixture.method.sizes == never.method.sizes
    for name, value in state(fixture.method).items():
        other = state(never.method)[name]
        if name in ("texts", "weights"):  # texts encoded in another company differ in their last bits
            torch.testing.assert_close(value, other, atol=1e-5, rtol=1e-3)
        else:
            assert torch.equal(value, other), name


def test_fewer_bytes_than_dmc_ot(mini: CLIP, data: Dataset, cache: Path) -> None:
    """The memories alone, for fewer pictures than dimensions; and the cap for more."""
    ours, theirs = learnt(mini, data, cache).method, set_up(DMCOT, mini, data, SIZES, cache)
    theirs.learn()

    def size(module: torch.nn.Module, prefix: str) -> int:
        return sum(v.numel() * v.element_size() for k, v in module.state_dict().items() if k.startswith(prefix))

    # Rows and means without the maps: DMC-OT in single precision would still take more.
    rows = theirs.method.memory.rows.numel() + theirs.method.memory.origin_means.numel()
    assert size(ours, "memory.") < 4 * rows
    assert size(ours, "") < size(theirs.method, "") / 4
    dim = mini.config.dim
    assert ours.memory.limit * (ours.memory.codes.shape[1] + 4 * len(ours.memory.sizes)) < 8 * dim * dim


def test_unknown_pictures_are_stranger(mini: CLIP, cache: Path) -> None:
    data = open_dataset("emoji")
    fixture = set_up(Strata, mini, data, (60, 40), cache)
    fixture.learn(tasks=1)
    known, unknown = (fixture.method.novelty(fixture.stream.test(i)) for i in range(2))
    assert known is not None and unknown is not None
    area = (unknown[:, None] > known).double().mean()
    assert area > 0.8
    for kind in range(len(NOVELTY)):  # either score works, and the one that was chosen is not the worse by much
        fixture.method.novelty_kind = torch.tensor(kind)
        other = [fixture.method.novelty(fixture.stream.test(i)) for i in range(2)]
        assert 0.6 < (other[1][:, None] > other[0]).double().mean() < area + 0.05
