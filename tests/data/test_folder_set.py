from dataclasses import replace
from pathlib import Path

import pytest

from clipcil.data.dataset import open_dataset
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.spec import RunSpec, as_table, method_settings, resolved
from clipcil.settings import build
from clipcil.storage import read_toml
from support.errors import one_line
from support.made_up import class_tree, encoded, refused
from support.short_runs import Told


def test_a_tree_is_split_by_seed_wherever_it_is(tmp_path: Path) -> None:
    tests = []
    for place in ("a", "b"):
        root = class_tree(tmp_path / place / "mine", {"black_bear": 10, "Ünïcode 🐱": 5})
        (root / "one").symlink_to(class_tree(tmp_path / place / "store", {"one": 1}) / "one")
        (root / "black_bear" / "0.png").write_bytes(encoded(5, "JPEG"))  # read by its contents, not its ending
        data = open_dataset("folder", root, {"template": "my {}."})
        tests.append([Path(data.test.describe(i)).relative_to(root) for i in range(len(data.test))])
    assert tests[0] == tests[1]
    assert data.classes == ["black bear", "one", "Ünïcode 🐱"] and data.templates == ("my {}.",)
    assert data.train.labels.bincount().tolist() == [8, 1, 4]
    assert data.test.labels.bincount(minlength=3).tolist() == [2, 0, 1]
    assert len({data.train.describe(i) for i in range(13)} | {data.test.describe(i) for i in range(3)}) == 16
    again = open_dataset("folder", root, {"split_seed": "1"})
    assert [Path(again.test.describe(i)).relative_to(root) for i in range(3)] != tests[1]
    assert {data.train.image(i).size for i in range(13)} | {data.test.image(i).size for i in range(3)} == {(8, 8)}


@pytest.mark.parametrize("test", ["test", "Validation"])
def test_given_parts(tmp_path: Path, test: str) -> None:
    class_tree(tmp_path / "train", {"cat": 5, "dog": 5, "owl": 1})
    assert open_dataset("folder", tmp_path).test.labels.tolist() == [0, 1], "a train folder alone is split"
    class_tree(tmp_path / test, {"cat": 1, "owl": 2})
    data = open_dataset("folder", tmp_path)
    assert data.classes == ["cat", "dog", "owl"]
    assert data.train.labels.bincount().tolist() == [5, 5, 1] and data.test.labels.tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("classes", "said", "options"),
    [
        ({}, "has no folders", {}),
        ({"empty": 0}, "empty", {}),
        ({"a": 2}, "no place", {"template": "no place"}),
        ({"a": 2}, "test_share", {"test_share": "1.5"}),
        ({"train/cat": 2, "test/dog": 2}, "'dog'", {}),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, classes: dict[str, int], said: str, options: dict[str, str]) -> None:
    for name in classes:
        (tmp_path / name).mkdir(parents=True)
    refused("folder", said, class_tree(tmp_path, classes), **options)
    refused("folder", "--data-root", None)
    refused("folder", "gone", tmp_path / "gone")


def test_a_broken_picture_stops_a_run_or_is_left_out(tmp_path: Path) -> None:
    root = class_tree(tmp_path / "mine", {f"{part}/{name}": 2 for part in ("train", "test") for name in ("cat", "dog")})
    broken = root / "test" / "dog" / "broken.png"
    broken.write_bytes(b"no picture")
    values = {"method": "zero-shot", "data": "folder", "data_root": root, "tasks": 2}
    spec, told = build(RunSpec, {**values, "data_options": {"split_seed": "1"}}), Told()
    config = method_settings(spec, {})
    with one_line(str(broken)):
        Experiment.of(spec, config).run(tmp_path / "stops")
    spec = replace(spec, skip_broken=True)
    results = Experiment.of(spec, config).run(tmp_path / "goes on", display=told)
    assert [line for line in told.lines if line.startswith("left out: ") and str(broken) in line]
    assert sum(results.records[-1].total) == 4
    table = read_toml(tmp_path / "goes on" / "config.toml")["run"]
    assert table["skip_broken"] is True
    kept = {"test_share": 0.2, "split_seed": 1, "template": "a photo of a {}.", "jpeg2000": False}
    assert table["data_options"] == kept
    assert as_table(resolved(build(RunSpec, table)), config)["run"] == table
