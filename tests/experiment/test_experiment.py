"""The experiment as a Python object: the loop by hand, objects of the user's own, and what a notebook does to it: cells
interrupted and run again, two experiments at a time, changed data."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.checks import some_classes
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.tasks import Task
from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.spec import read_preset
from clipcil.methods.simplecil import SimpleCIL
from clipcil.training.device import usual_torch
from support.lessons import plain, write_tree
from support.short_runs import digest, interrupt

COLOURS = {"red": ("red", "darkred"), "green": ("lime", "green"), "blue": ("blue", "navy")}


@pytest.fixture(scope="module")
def colours() -> Dataset:
    """A dataset that is not registered."""
    pictures = {name: plain(*tones) for name, tones in COLOURS.items()}
    return Dataset.from_pictures("colours", pictures, pictures)


@pytest.fixture
def given(colours: Dataset, mini: CLIP) -> dict[str, Any]:
    """Three classes in three tasks."""
    return {"data": colours, "backbone": mini, "increment": 1}


@dataclass(frozen=True)
class OwnConfig:
    power: float = 1.0
    """Exponent of the cosine."""


class Own(SimpleCIL):
    """A method that is not registered."""

    name, title, Config = "own", "Own method", OwnConfig

    def logits(self, batch: Any) -> Tensor:
        return (normalize(batch.features, dim=-1) @ normalize(self.prototypes, dim=-1).T) ** self.config.power


class Changed(SimpleCIL):
    """Another class that bears the name of a registered one."""


def test_own_method_own_dataset_and_loaded_backbone(given: dict[str, Any]) -> None:
    experiment = Experiment(Own, **given, power=2.0)
    assert len(experiment) == 3 and experiment.config.power == 2.0
    seen = []
    for task in experiment:
        experiment.learn(task)
        results = experiment.evaluate()
        seen.append((task.index, results.last))
        assert results.matrix.shape == (task.index + 1, task.index + 1)
    results = experiment.results
    assert [last for _, last in seen] == results.after and [index for index, _ in seen] == [0, 1, 2]
    assert results.last == np.mean(results.matrix[-1]) and results.average == pytest.approx(np.mean(results.after))
    assert list(results.per_class) == experiment.stream.names
    frame = results.to_pandas()
    assert list(frame.columns) == ["task 1", "task 2", "task 3", "A_k"] and frame.loc["task 3", "A_k"] == results.last
    html = results._repr_html_()
    assert html.count("<tr>") == 4 and f"{results.matrix[2, 0]:.1f}" in html and "nan" not in html
    assert repr(results) == f"Results(after 3 of 3 tasks: A_B {results.last:.2f} %, Ā {results.average:.2f} %)"


def test_a_name_that_is_too_long_is_refused_before_the_run(given: dict[str, Any], tmp_path: Path) -> None:
    given["data"] = replace(given["data"], classes=[*given["data"].classes[:-1], " ".join("x" * 100)])
    with pytest.raises(UserError, match="shorten the class name"):
        Experiment("dmc-ot", **given).run(tmp_path / "run")
    assert not (tmp_path / "run").exists(), "a run that could not begin has claimed nothing"


def test_the_loop_by_hand_and_a_run_give_the_same(given: dict[str, Any], tmp_path: Path) -> None:
    six = {"data": replace(some_classes(6), name="six"), "increment": 2}
    options = {**given, **six, "seed": 3, "stage1.epochs": 1, "stage2": {"epochs": 1, "steps": 0}}
    by_hand = Experiment("dmc-ot", **options)
    for task in by_hand:
        by_hand.learn(task)  # not evaluated here: evaluated before the next task is learnt
    whole = Experiment("dmc-ot", **options).run(tmp_path / "run")
    assert by_hand.results.as_dict() == whole.as_dict() == json.loads((tmp_path / "run/results.json").read_text())
    again = Experiment("dmc-ot", **options)
    assert again.run(tmp_path / "run").as_dict() == whole.as_dict()  # from its last checkpoint
    assert again.method.seen == 6
    with pytest.raises(UserError, match=r"holds another run \(its run.seed is 3, not 4\)"):
        Experiment("dmc-ot", **{**options, "seed": 4}).run(tmp_path / "run")
    with pytest.raises(UserError, match="has begun outside a run folder"):
        by_hand.run(tmp_path / "other")


def test_tasks_are_learnt_in_order_and_only_once(given: dict[str, Any]) -> None:
    experiment = Experiment("simplecil", **given)
    first, *_ = experiment
    with pytest.raises(UserError, match="a task that has ended"):
        experiment.learn(first)
    with pytest.raises(UserError, match="no task is learnt yet"):
        experiment.evaluate()
    first = next(iter(experiment))
    experiment.learn(first)
    with pytest.raises(UserError, match="task 1 is not the next one: 1 tasks are learnt"):
        experiment.learn(first)
    for task, index in zip(experiment, (1, 2), strict=True):  # iterating again goes on after what is learnt
        assert task.index == index
        experiment.learn(task)
    assert experiment.results.last == 100


def test_a_run_of_objects_is_continued_by_the_same_experiment(given: dict[str, Any], tmp_path: Path) -> None:
    Experiment("simplecil", **given).run(tmp_path / "run")
    with pytest.raises(UserError, match=r"SimpleCIL, not .*Changed"):  # another class of the same name
        Experiment(Changed, **given).run(tmp_path / "run")
    with pytest.raises(UserError, match="make the same Experiment again"):
        Experiment.resume(tmp_path / "run")
    assert Experiment("simplecil", **given).run(tmp_path / "run").average > 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"method": 3}, "3"),
        ({"betta": 0.1}, "'beta'"),
        ({"sed": 1}, "'seed'"),
        ({"settings": {"bet": 1}}, "'beta'"),
        ({"settings": {1: 2}}, "settings"),
        ({"data_options": {"split": 1}}, "'split'"),
    ],
)
def test_a_wrong_word_is_refused_at_once(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**options)
    assert named in str(caught.value)


def test_a_path_is_a_folder_also_where_a_dataset_is_called_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for part in ("train", "test"):
        write_tree(tmp_path / "emoji" / part, {name: plain(*tones) for name, tones in COLOURS.items()})
    (tmp_path / "mini").mkdir()
    experiment = Experiment("simplecil", data=Path("emoji"), data_options={"split_seed": 2})
    assert sorted(experiment.stream.names) == sorted(COLOURS)
    assert (experiment.spec.data, experiment.spec.data_root) == ("folder", Path("emoji"))
    assert experiment.table["run"]["data_options"]["split_seed"] == 2
    assert Experiment("simplecil", data="emoji").spec.data == "emoji"
    with pytest.raises(UserError, match="mini"):
        Experiment("simplecil", backbone=Path("mini")).stream  # noqa: B018


def test_the_default_number_of_tasks_is_ten_or_that_of_fewer_classes_and_auto_is_a_device(
    colours: Dataset, mini: CLIP
) -> None:
    experiment = Experiment("simplecil", data=colours, backbone=mini)
    assert "tasks" not in experiment.table["run"] and experiment.stream.sizes == [1] * 3
    with pytest.raises(UserError, match="tasks is 10; it must lie between 1 and the 3 classes"):
        Experiment("simplecil", data=colours, backbone=mini, tasks=10).stream  # noqa: B018
    assert experiment.table["run"]["device"] == ("cuda" if torch.cuda.is_available() else "cpu")


def test_settings_are_named_as_the_list_of_them_names_them() -> None:
    given = {"stage1.lr": 0.5, "stage2": {"lr": 0.25}, "stage2.epochs": 7}
    config = Experiment("dmc-ot", settings=given).config
    assert (config.stage1.lr, config.stage2.lr, config.stage2.epochs) == (0.5, 0.25, 7)


def test_a_preset_is_looked_for_among_the_presets_alone() -> None:
    assert read_preset("emoji", "rapf", "mini") and read_preset("nothing", "rapf", "mini") == {}
    assert read_preset("../presets/emoji", "rapf", "mini") == read_preset("x" * 300, "rapf", "mini") == {}


def test_an_evaluation_that_was_interrupted_counts_as_none(given: dict[str, Any]) -> None:
    short = {"stage1.epochs": 0, "stage2.epochs": 0, "stage2.steps": 0}
    experiment = Experiment("dmc-ot", **given, **short)
    for task in experiment:
        experiment.learn(task)
        if task.index == 1:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr("clipcil.experiment.experiment.measure_drift", interrupt)
                experiment.evaluate()
    results = experiment.evaluate()
    assert [len(results.records), len(results.drift)] == [3, 3]
    assert results.drift[0] is None and results.drift[1] is not None


class Interrupted(SimpleCIL):
    """Ctrl-C comes once, in the second task."""

    name, title = "interrupted", "Interrupted"
    pending = True

    def learn_task(self, task: Task) -> None:
        if task.index == 1 and type(self).pending:
            type(self).pending = False
            raise KeyboardInterrupt
        super().learn_task(task)


def test_an_interrupted_task_is_not_learnt(given: dict[str, Any]) -> None:
    Interrupted.pending = True
    experiment = Experiment(Interrupted, **given)
    with pytest.raises(KeyboardInterrupt):
        for task in experiment:
            experiment.learn(task)
            experiment.evaluate()
    for again in (experiment.evaluate, lambda: iter(experiment), lambda: experiment.learn(task)):
        with pytest.raises(UserError, match=r"learning task 2 was interrupted.*make a new Experiment"):
            again()
    assert len(experiment.results.records) == 1, "what was measured before is still there"
    assert "3 tasks" in repr(experiment)


def test_the_same_call_goes_on_in_the_same_process(given: dict[str, Any], tmp_path: Path) -> None:
    Interrupted.pending = True
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    experiment = Experiment(Interrupted, **given)
    with pytest.raises(KeyboardInterrupt):
        experiment.run(parts)
    assert experiment.run(parts).last == experiment.run(parts).last == 100
    Experiment(Interrupted, **given).run(whole)
    assert digest(whole) == digest(parts)


@pytest.mark.parametrize("method", ["dmc", "ranpac"])
def test_experiments_side_by_side_are_those_alone(method: str, given: dict[str, Any]) -> None:
    short = {"stage1.epochs": 2, "stage2.epochs": 2, "stage2.steps": 0} if method == "dmc" else {"projections": 64}

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


def test_a_run_tunes_the_tower_that_it_loaded_and_begins_again_with_a_fresh_one(colours: Dataset) -> None:
    short = {"stage1.epochs": 1, "stage1.lr": 1e-3, "stage2.epochs": 1, "stage2.steps": 0}
    experiment = Experiment("dmc", data=colours, increment=3, **short)

    def learnt() -> tuple[Tensor, Tensor]:
        before = experiment.method.clip.vision.visual_projection.weight.clone()
        experiment.learn(next(iter(experiment)))
        return before, experiment.method.clip.vision.visual_projection.weight.clone()

    first = learnt()
    experiment.reset()
    again = learnt()
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1]) and not torch.equal(*first)
