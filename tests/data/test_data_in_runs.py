"""How a run carries the choices about its data."""

from __future__ import annotations

from pathlib import Path

import pytest

from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.monitor import Display
from clipcil.experiment.spec import RunSpec, as_table, method_settings, resolved
from clipcil.settings import build
from clipcil.storage import read_toml
from support.made_up import class_tree


class Told(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def shared() -> LoadCache:
    return LoadCache()


def spec_for(root: Path, **more: object) -> RunSpec:
    values = {"method": "zero-shot", "data": "folder", "data_root": root, "tasks": 2, **more}
    return build(RunSpec, values)


def test_a_broken_picture_stops_a_run_or_is_left_out(tmp_path: Path, shared: LoadCache) -> None:
    root = class_tree(tmp_path / "mine", {"cat": 4, "dog": 4})
    broken = root / "dog" / "broken.png"
    broken.write_bytes(b"no picture")
    spec = spec_for(root, data_options={"test_share": "0.5", "split_seed": "1"})
    config = method_settings(spec, {})
    with pytest.raises(UserError, match=r"broken\.png is not a picture"):
        for seed in range(4):  # in one of these splits it is a test picture, which zero-shot reads
            again = spec_for(root, data_options={"test_share": "0.5", "split_seed": str(seed)})
            Experiment.of(again, config, shared).run(tmp_path / f"stops{seed}")
    told = Told()
    spec = spec_for(root, data_options={"test_share": "0.5"}, skip_broken=True)
    results = Experiment.of(spec, config, shared).run(tmp_path / "goes on", display=told)
    assert [line for line in told.lines if line.startswith("left out: ") and str(broken) in line]
    assert sum(results.records[-1].total) in (3, 4)
    table = read_toml(tmp_path / "goes on" / "config.toml")["run"]
    assert table["skip_broken"] is True
    assert table["data_options"] == {"test_share": 0.5, "split_seed": 0, "template": "a photo of a {}."}


def test_options_come_back_from_the_config(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, data_options={"split_seed": "3"})
    config = method_settings(spec, {})
    table = as_table(resolved(spec), config)
    again = build(RunSpec, table["run"])
    assert as_table(resolved(again), config) == table
