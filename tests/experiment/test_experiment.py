"""The experiment as a Python object: the loop by hand, objects of the user's own, and the same results as a run."""

from __future__ import annotations

import json
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
from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.spec import RunSpec, read_preset
from clipcil.methods.simplecil import SimpleCIL
from support.short_runs import interrupt


@pytest.fixture(scope="module")
def data() -> Dataset:
    """A dataset that nobody registered."""
    return replace(some_classes(6), name="six")


@pytest.fixture
def given(data: Dataset, mini: CLIP) -> dict[str, Any]:
    """Six classes in three tasks."""
    return {"data": data, "backbone": mini, "increment": 2}


@dataclass(frozen=True)
class OwnConfig:
    power: float = 1.0
    """Exponent of the cosine."""


class Own(SimpleCIL):
    """A method that nobody registered."""

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
    options = {**given, "seed": 3, "stage1.epochs": 1, "stage2": {"epochs": 1, "steps": 0}}
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
    with pytest.raises(UserError, match="no task is learnt yet"):
        experiment.evaluate()
    first = next(iter(experiment))
    experiment.learn(first)
    with pytest.raises(UserError, match="task 1 is not the next one: 1 tasks are learnt"):
        experiment.learn(first)
    assert [task.index for task in experiment] == [1, 2]  # iterating again goes on after what is learnt


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
        ({"method": "dmc-ott"}, "'dmc-ot'"),
        ({"method": 3}, "3"),
        ({"data": "emojii"}, "'emoji'"),
        ({"betta": 0.1}, "'beta'"),
        ({"sed": 1}, "'seed'"),
        ({"stage1.lrr": 0.1}, "'lr'"),
        ({"tasks": "many"}, "'many'"),
        ({"settings": {"bet": 1}}, "'beta'"),
        ({"settings": {1: 2}}, "settings"),
        ({"data_options": {"split": 1}}, "'split'"),
    ],
)
def test_a_wrong_word_is_refused_at_once(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError) as caught:
        Experiment(**options)
    assert named in str(caught.value)


def test_a_folder_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    experiment = Experiment("simplecil", data=tmp_path / "pictures", data_options={"split_seed": 2})
    assert (experiment.spec.data, experiment.spec.data_root) == ("folder", tmp_path / "pictures")
    assert experiment.table["run"]["data_options"]["split_seed"] == 2


def test_the_default_number_of_tasks_is_ten_and_auto_is_a_device() -> None:
    assert RunSpec(tasks=10) == RunSpec() and RunSpec(increment=5).tasks is None
    table = Experiment("simplecil").table["run"]
    assert table["tasks"] == 10 and table["device"] == ("cuda" if torch.cuda.is_available() else table["device"])
    assert table["device"] in ("cpu", "cuda")


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


def test_fewer_classes_than_the_default_number_of_tasks(data: Dataset, mini: CLIP) -> None:
    assert Experiment("simplecil", data=data, backbone=mini).stream.sizes == [1] * 6
