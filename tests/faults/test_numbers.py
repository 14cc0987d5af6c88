"""Streams with too little to learn from: no NaN, no singular map, no crash, for every method."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipcil.checks import some_classes
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.errors import UserError
from clipcil.experiment import experiment as experiments
from clipcil.experiment.experiment import Experiment
from clipcil.methods.registry import methods
from clipcil.tensor_store import TensorStore, read_entry
from clipcil.training.trainer import Trainer, Training
from support.short_runs import Runner


def poor(data: Dataset) -> Dataset:
    """Class 0: six times the same picture; class 1: one picture; class 2: two; the rest as they are."""
    rows = [torch.nonzero(data.train.labels == label).flatten() for label in range(len(data.classes))]
    rows[0], rows[1], rows[2] = rows[0][:1].repeat(6), rows[1][:1], rows[2][:2]
    return replace(data, train=data.train.subset(torch.cat(rows)))


@pytest.fixture(scope="module")
def poor_runner(mini: CLIP) -> Runner:
    return Runner(mini, poor(some_classes(4)), epochs=1)


def check(out: Path, tasks: int) -> None:
    results = json.loads((out / "results.json").read_text())
    matrix = [value for row in results["matrix"] for value in row if value is not None]
    assert len(results["sizes"]) == tasks
    assert all(0 <= number <= 100 for number in (results["last"], results["average"], *results["after"], *matrix))
    tensors, _ = read_entry(TensorStore(out / "checkpoint").paths(f"task-{tasks:04d}")[0])
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values() if value.is_floating_point())


@pytest.mark.parametrize(("tasks", "precision"), [(4, "32-true"), (1, "bf16-mixed")])
@pytest.mark.parametrize("name", sorted(methods()))
def test_few_or_equal_pictures(name: str, tasks: int, precision: str, poor_runner: Runner, out: Path) -> None:
    """One class a task, and one task in half precision."""
    poor_runner.run(name, out, order="natural", increment=None, tasks=tasks, precision=precision)
    check(out, tasks)


@pytest.mark.parametrize("name", ["dmc-ot", "rapf", "simplecil"])
def test_features_that_are_constant_in_a_dimension(name: str, mini: CLIP, out: Path) -> None:
    """Half of the joint space is cut off: covariances and maps are singular there."""
    flat = mini.with_own_vision_tower()
    with torch.no_grad():
        flat.vision.visual_projection.weight[128:] = 0
    flat.freeze()
    Runner(flat, some_classes(4), epochs=1).run(name, out)
    check(out, 2)


def diverged(runner: Runner, name: str, out: Path, **hot: Training) -> str:
    """The line of a run that diverges with some stages replaced."""
    spec, config = runner.settings(name)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as caught:
        patch.setattr(experiments, "open_dataset", lambda *_: runner.data)
        Experiment.of(spec, replace(config, **hot), runner.shared()).run(out)
    assert not (out / "results.json").exists()
    return str(caught.value)


@pytest.mark.parametrize("name", ["dmc-ot", "coop", "proof"])
def test_a_diverging_stage_stops_with_the_stage_and_what_to_try(name: str, poor_runner: Runner, out: Path) -> None:
    _, config = poor_runner.settings(name)
    stages = {key: value for key, value in vars(config).items() if isinstance(value, Training)}
    hot = {key: replace(how, lr=1e30, epochs=4, steps=0, optimizer="sgd") for key, how in stages.items()}
    line = diverged(poor_runner, name, out, **hot)
    assert line.startswith("training diverged: ")
    assert any(f"try a lower {stage}.lr, or {stage}.clip_norm=1" in line for stage in stages)
    assert "epoch" in line and "(learning rate 1e+30)" in line


def test_a_tower_that_was_broken_is_not_blamed_on_the_stage_after_it(poor_runner: Runner, out: Path) -> None:
    """At this rate the tower's weights stay finite; the first loss to break is one of stage 2."""
    _, config = poor_runner.settings("dmc-ot")
    line = diverged(poor_runner, "dmc-ot", out, stage1=replace(config.stage1, lr=1e9))
    assert "diverged before stage 'stage2'" in line and "for the stage before it" in line


@pytest.mark.parametrize(("after", "step"), [(0, 1), (3, 4), (70, 71)])
def test_the_guard_names_the_step_at_which_the_loss_broke(after: int, step: int) -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    taken = 0

    def loss(rows: torch.Tensor) -> torch.Tensor:
        nonlocal taken
        taken += 1
        return weight * (math.nan if taken > after else 1.0)

    how = Training(epochs=1, batch_size=1, lr=0.1)
    said = rf"in stage 'train' the loss is nan at epoch 1, step {step} \(learning rate 0.1\)"
    with pytest.raises(UserError, match=said if after else "diverged before stage 'train': its first loss is nan"):
        Trainer().fit("train", [weight], 80, loss, how)


def test_parameters_broken_by_the_last_step_are_not_kept() -> None:
    weight = torch.nn.Parameter(torch.ones(()))
    how = Training(epochs=1, batch_size=4, lr=1e38, optimizer="sgd", schedule="constant")
    with pytest.raises(UserError, match="a parameter is NaN or infinite at epoch 1, step 1"):
        Trainer().fit("train", [weight], 4, lambda rows: 1e30 * weight, how)
