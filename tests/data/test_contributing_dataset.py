"""The example in CONTRIBUTING is a whole dataset: it is found by its name and can be learnt."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clipcil.clip import CLIP
from clipcil.data import dataset
from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_dataset_of_the_page_is_found_and_learnt(
    mini: CLIP, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[1]
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path))
    others = {name: kept for name, kept in dataset.datasets().items() if name != "shapes"}  # not a copy of it
    monkeypatch.setattr(dataset, "REGISTRY", others)
    module = ModuleType("shapes_example")
    monkeypatch.setitem(sys.modules, "shapes_example", module)
    exec(code, vars(module))
    experiment = Experiment("simplecil", data="shapes", backbone=mini, data_options={"size": 48}, tasks=4)
    for task in experiment:
        experiment.learn(task)
    assert len(experiment.stream.names) == 8 and experiment.results.last > 50
    with pytest.raises(UserError, match="'size' is '4'"):
        Experiment("simplecil", data="shapes", data_options={"size": 4})


def test_only_the_same_function_replaces_a_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "REGISTRY", dict(dataset.datasets()))
    kept = dataset.REGISTRY["emoji"]

    def stranger() -> Any: ...

    stranger.__qualname__ = kept.open.__qualname__
    with pytest.raises(ValueError, match="'emoji'"):
        dataset.register("emoji", "another", "nothing")(stranger)
    assert dataset.REGISTRY["emoji"] is kept
    stranger.__module__ = kept.open.__module__  # as a cell of a notebook run again
    dataset.register("emoji", "another", "nothing")(stranger)
    assert dataset.REGISTRY["emoji"].open is stranger
