"""Live logs: every number of a run once, also where the run was stopped and continued."""

import csv
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tomli_w

import clipcil
from clipcil.data.dataset import Dataset
from clipcil.experiment.loggers import open_loggers
from support.errors import one_line
from support.lessons import FAST, plain, refused
from support.short_runs import Killed, stop_after

COLOURS = {"red": plain("red", "darkred"), "blue": plain("blue", "navy"), "green": plain("green", "lime")}
DATA = Dataset.from_pictures("colours", COLOURS, COLOURS)


class Seen(clipcil.Callback):
    """Everything that a callback of one's own is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin_run(self, experiment: Any, folder: Path) -> None:
        self.told = [("begin", folder.name, len(experiment))]

    def step(self, stage: str, epoch: int, step: int, loss: Any, rate: float) -> None:
        self.told.append((stage, epoch, step, round(float(loss), 5), rate))

    def end_task(self, results: Any) -> None:
        self.told.append((len(results.records), results.last))

    def end_run(self) -> None:
        self.told.append("end")


def learn(folder: Path, *callbacks: Any) -> clipcil.Results:
    experiment = clipcil.Experiment("dmc-ot", data=DATA, tasks=3, settings=FAST)
    return experiment.run(folder, callbacks=callbacks)


def numbers(path: Path) -> dict[tuple[str, int, str], float]:
    rows = list(csv.DictReader(path.open()))
    found = {(row["group"], int(row["step"]), row["name"]): float(row["value"]) for row in rows}
    assert len(found) == len(rows), "a number is there twice"
    return found


def test_callbacks_are_told_everything_also_after_a_stop(tmp_path: Path) -> None:
    whole, stopped = Seen(), Seen()
    results = learn(tmp_path / "run", whole, *open_loggers(["csv"]))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 5)
        learn(tmp_path / "other" / "run", stopped, *open_loggers(["csv"]))
    assert stopped.told[-1] == "end" and 3 not in [told[0] for told in stopped.told]
    learn(tmp_path / "other" / "run", stopped, *open_loggers(["csv"]))
    assert stopped.told == whole.told and whole.told[0] == ("begin", "run", 3) and whole.told[-1] == "end"
    found = numbers(tmp_path / "run" / "log.csv")
    assert found == numbers(tmp_path / "other" / "run" / "log.csv")
    assert [found["accuracy", task, "A_k"] for task in (1, 2, 3)] == results.after
    losses = [told[3] for told in whole.told if told[0] == "stage1"]
    assert [round(found["stage1", step, "loss"], 5) for step in range(1, len(losses) + 1)] == losses


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # the second run is complete: its log is written anew
        results = learn(tmp_path / "run", *open_loggers(["tensorboard", "csv"]))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    shown = {
        (*tag.split("/")[:1], event.step, tag.split("/")[1]): event.value
        for tag in events.Tags()["scalars"]
        for event in events.Scalars(tag)
    }
    found = numbers(tmp_path / "run" / "log.csv")
    assert shown.keys() == found.keys() and len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1
    assert all(math.isclose(shown[key], found[key], rel_tol=1e-6) for key in found)
    assert [event.value for event in events.Scalars("accuracy/A_k")] == pytest.approx(results.after)


def test_wandb_gets_each_number_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, list[tuple[int, dict[str, float]]]] = {}
    asked: list[dict[str, Any]] = []

    def init(**options: Any) -> Any:
        asked.append(options)
        rows = logged.setdefault(options["id"], [])
        return SimpleNamespace(
            step=len(rows),
            define_metric=lambda name, step_metric: None,
            log=lambda values, step: rows.append((step, values)),
            finish=lambda: None,
        )

    module = ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    results = learn(tmp_path / "whole", *open_loggers(["wandb"]))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        stop_after(patch, 5)
        learn(tmp_path / "run", *open_loggers(["wandb"]))
    learn(tmp_path / "run", *open_loggers(["wandb"]))
    whole, run = logged.values()
    assert run == whole and [step for step, _ in run] == list(range(len(run)))
    assert [values["accuracy/A_k"] for _, values in run if "accuracy/A_k" in values] == results.after
    assert asked[1] == asked[2] and asked[0]["config"]["run"]["tasks"] == 3


def test_what_cannot_be_logged_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    for name in ("wandb", "tensorboard"):
        assert f"pip install 'clipcil[{name}]'" in refused(capsys, "run", "--log", "csv", name)
    assert "nothing" in (line := refused(capsys, "run", "--log", "nothing")) and "tensorboard" in line
    assert not list(tmp_path.iterdir())
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_bytes(
        tomli_w.dumps(clipcil.Experiment("simplecil", tasks=5).table).encode()
    )
    (tmp_path / "run" / "log.csv").write_text("a list of the user's own")
    with one_line("log.csv"):
        clipcil.Experiment("simplecil", tasks=5).run("run", callbacks=open_loggers(["csv"]))
