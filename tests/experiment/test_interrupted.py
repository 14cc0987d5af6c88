"""What a notebook does to an experiment: cells interrupted and run again, two experiments at a time, changed data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.methods.simplecil import SimpleCIL
from clipcil.training.device import usual_torch
from support.lessons import plain, write_tree
from support.short_runs import digest

COLOURS = {"red": ("red", "darkred"), "green": ("lime", "green"), "blue": ("blue", "navy")}


@pytest.fixture(scope="module")
def colours() -> Dataset:
    pictures = {name: plain(*tones) for name, tones in COLOURS.items()}
    return Dataset.from_pictures("colours", pictures, pictures)


@pytest.fixture
def given(colours: Dataset, mini: CLIP) -> dict[str, Any]:
    """Three classes in three tasks."""
    return {"data": colours, "backbone": mini, "increment": 1}


class Interrupted(SimpleCIL):
    """Ctrl-C comes once, in the second task."""

    name, title = "interrupted", "Interrupted"
    pending = True

    def learn_task(self, task: Task) -> None:
        if task.index == 1 and type(self).pending:
            type(self).pending = False
            raise KeyboardInterrupt
        super().learn_task(task)


@pytest.fixture
def interrupted() -> Iterator[type[Interrupted]]:
    Interrupted.pending = True
    yield Interrupted


def test_an_interrupted_task_is_not_learnt(given: dict[str, Any], interrupted: type[Interrupted]) -> None:
    experiment = Experiment(interrupted, **given)
    with pytest.raises(KeyboardInterrupt):
        for task in experiment:
            experiment.learn(task)
            experiment.evaluate()
    for again in (experiment.evaluate, lambda: iter(experiment), lambda: experiment.learn(task)):
        with pytest.raises(UserError, match=r"learning task 2 was interrupted.*make a new Experiment"):
            again()
    assert len(experiment.results.records) == 1, "what was measured before is still there"
    assert "3 tasks" in repr(experiment)


def test_a_task_that_has_ended_is_refused_and_nothing_is_lost(given: dict[str, Any]) -> None:
    experiment = Experiment("simplecil", **given)
    first, *_ = experiment
    with pytest.raises(UserError, match="a task that has ended"):
        experiment.learn(first)
    with pytest.raises(UserError, match="no task is learnt yet"):
        experiment.evaluate()
    for task in experiment:
        experiment.learn(task)
    assert experiment.results.last == 100


def test_the_same_call_goes_on_in_the_same_process(
    given: dict[str, Any], interrupted: type[Interrupted], tmp_path: Path
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    experiment = Experiment(interrupted, **given)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(parts)
    assert experiment.run(parts).last == experiment.run(parts).last == 100
    Experiment(interrupted, **given).run(whole)
    assert digest(whole) == digest(parts)


@pytest.mark.parametrize("method", ["dmc", "ranpac"])
def test_experiments_side_by_side_are_those_alone(method: str, given: dict[str, Any]) -> None:
    short = {"stage1.epochs": 2, "stage2.epochs": 2, "stage2.steps": 0} if method == "dmc" else {}

    def make(seed: int) -> Experiment:
        return Experiment(method, **given, seed=seed, **short)

    def state(experiment: Experiment) -> dict[str, torch.Tensor]:
        return dict(experiment.method.state_dict())

    alone = make(0)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    for task in alone:
        alone.learn(task)
    assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are its own"
    first, second = make(0), make(1)
    for task, other in zip(first, second, strict=True):
        torch.rand(7)
        first.learn(task)
        second.learn(other)
    assert all(torch.equal(value, state(first)[name]) for name, value in state(alone).items())
    assert any(not torch.equal(value, state(second)[name]) for name, value in state(alone).items())


def test_a_task_of_another_experiment_is_refused(given: dict[str, Any]) -> None:
    """Its pictures would be encoded by the tower of the other one, which may be tuned."""
    options = {**given, "cache": LoadCache()}
    first, second = Experiment("simplecil", **options), Experiment("simplecil", **options, shots=1)
    task = next(iter(first))
    for _ in range(2):
        with pytest.raises(UserError, match="this task is of another experiment"):
            second.learn(task)
        next(iter(second))
    first.learn(replace(task, pictures=task.pictures[:1]))  # a part of its own
    for own in second:
        second.learn(own)
    assert first.results.last == second.results.last == 100


@contextmanager
def in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64, "the caller's setting is the caller's"
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "setting",
    [in_double_precision, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
)
def test_what_a_notebook_has_set_changes_nothing(
    setting: Callable[[], AbstractContextManager[None]], colours: Dataset, tiny_clip: CLIP
) -> None:
    def learn() -> tuple[dict[str, torch.Tensor], object]:
        short = {"stage1.epochs": 1, "stage2.epochs": 1, "stage2.steps": 0}
        experiment = Experiment("dmc-ot", data=colours, backbone=tiny_clip, increment=2, **short)
        for task in experiment:
            experiment.learn(task)
        return dict(experiment.method.state_dict()), experiment.results.as_dict()

    weights, numbers = learn()
    with setting():
        again, same = learn()
    assert same == numbers and all(torch.equal(value, again[name]) for name, value in weights.items())


@pytest.mark.parametrize("in_a_notebook", [False, True])
def test_mixed_precision_sees_the_weights_of_every_step(in_a_notebook: bool) -> None:
    """Torch keeps what it has cast until the outermost block of mixed precision ends."""
    weight, seen = torch.nn.Parameter(torch.ones(4, 4)), []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=True) if in_a_notebook else nullcontext():
        with usual_torch(torch.device("cpu")):
            assert (torch.ones(4, 4) @ weight).dtype == torch.float32
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    seen.append(float((torch.ones(4, 4) @ weight)[0, 0].detach()))
                with torch.no_grad():
                    weight.add_(1)
        half = (torch.ones(4, 4) @ weight).dtype == torch.bfloat16
    assert seen == [4, 8] and half is in_a_notebook and torch.is_autocast_cache_enabled()


def test_the_features_of_a_task_that_has_ended_are_dropped(given: dict[str, Any], colours: Dataset) -> None:
    given["data"] = replace(colours, test=colours.test.subset(torch.tensor([0, 2, 4])))  # no set that is a task's too
    for shared, kept in ((None, 0), (LoadCache(), 3)):
        experiment = Experiment("simplecil", **given, cache=shared)
        for task in experiment:
            experiment.learn(task)
        reader = experiment._open_reader(experiment.method)
        train = {experiment.stream._train[index].key for index in range(3)}
        assert len(train & reader._tables.keys()) == kept and experiment.results.last == 100


def test_a_folder_belongs_to_its_labels_templates_and_descriptions(given: dict[str, Any], tmp_path: Path) -> None:
    def run(name: str, data: Dataset, method: str = "simplecil", **settings: object) -> None:
        Experiment(method, **{**given, "data": data}, **settings).run(tmp_path / name)

    colours = given["data"]
    run("run", colours)
    old = colours.train
    train = PictureSet(old.name, old.pictures, old.labels.flip(0), old.identity)
    for other in (replace(colours, train=train), replace(colours, templates=("art of a {}.",))):
        with pytest.raises(UserError, match="checkpoint"):
            run("run", other)
    file = tmp_path / "descriptions.json"
    for line in ("warm", "cold"):
        pairs = {one: {two: [f"{one} looks {line}"] for two in COLOURS if two != one} for one in COLOURS}
        file.write_text(json.dumps(pairs), encoding="utf-8")
        with nullcontext() if line == "warm" else pytest.raises(UserError, match="checkpoint"):
            run("descriptions", colours, "engine", descriptions=file)


def test_an_own_dataset_or_backbone_does_not_take_the_place_of_one_by_name(colours: Dataset, mini: CLIP) -> None:
    shared = LoadCache(backbones={"mini": mini})
    assert len(Experiment("simplecil", data=replace(colours, name="emoji"), cache=shared).stream.names) == 3
    assert len(Experiment("simplecil", data="emoji", cache=shared).stream.names) == 100
    other = mini.with_own_vision_tower()  # of the same name
    given = Experiment("simplecil", data=colours, backbone=other, cache=shared)
    named = Experiment("simplecil", data=colours, backbone="mini", cache=shared)
    assert given.method.clip is other and named.method.clip is mini


def test_a_path_called_like_a_dataset_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        write_tree(tmp_path / "emoji" / part, {name: plain(*tones) for name, tones in COLOURS.items()})
    (tmp_path / "mini").mkdir()
    assert sorted(Experiment("simplecil", data=Path("emoji")).stream.names) == sorted(COLOURS)
    assert Experiment("simplecil", data="emoji").spec.data == "emoji"
    with pytest.raises(UserError, match="mini"):
        Experiment("simplecil", backbone=Path("mini")).stream  # noqa: B018
