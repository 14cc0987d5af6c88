"""How a run carries the choices about its data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clipcil.experiment.experiment import Experiment, LoadCache
from clipcil.experiment.monitor import Display
from clipcil.experiment.spec import RunSpec, as_table, method_settings, resolved
from clipcil.settings import build
from clipcil.storage import read_toml
from support.errors import one_line
from support.made_up import class_tree


class Told(Display):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def tell(self, line: str) -> None:
        self.lines.append(line)


def spec_for(root: Path, **more: object) -> RunSpec:
    return build(RunSpec, {"method": "zero-shot", "data": "folder", "data_root": root, "tasks": 2, **more})


def test_a_broken_picture_stops_a_run_or_is_left_out(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "mine", {f"{part}/{name}": 2 for part in ("train", "test") for name in ("cat", "dog")})
    broken = root / "test" / "dog" / "broken.png"
    broken.write_bytes(b"no picture")
    spec, shared, told = spec_for(root, data_options={"split_seed": "1"}), LoadCache(), Told()
    config = method_settings(spec, {})
    with one_line(str(broken)):
        Experiment.of(spec, config, shared).run(tmp_path / "stops")
    spec = replace(spec, skip_broken=True)
    results = Experiment.of(spec, config, shared).run(tmp_path / "goes on", display=told)
    assert [line for line in told.lines if line.startswith("left out: ") and str(broken) in line]
    assert sum(results.records[-1].total) == 4
    table = read_toml(tmp_path / "goes on" / "config.toml")["run"]
    assert table["skip_broken"] is True
    assert table["data_options"] == {"test_share": 0.2, "split_seed": 1, "template": "a photo of a {}."}


def test_options_come_back_from_the_config(tmp_path: Path) -> None:
    spec = spec_for(tmp_path, data_options={"split_seed": "3"})
    config = method_settings(spec, {})
    table = as_table(resolved(spec), config)
    again = build(RunSpec, table["run"])
    assert as_table(resolved(again), config) == table
