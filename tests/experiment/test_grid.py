"""The runs of grids and sweeps: tables of the paper, settings and folders of data; wrong words are refused."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipcil.errors import UserError
from clipcil.experiment.grid import data_roots, plan, plan_sweep
from clipcil.experiment.spec import Grid
from clipcil.report.compare import MeanStd
from clipcil.report.figures import Curve, save_sweep


def test_a_table_of_the_paper_is_a_grid(tmp_path: Path) -> None:
    planned = plan(Grid("table1", out=tmp_path))
    assert len(planned) == 12 * 4
    assert {(each.spec.tasks, each.spec.backbone) for each in planned} == {(10, "openai/clip-vit-base-patch16")}
    cut = plan(Grid("table1", only=("dmc*", "rapf", "c*00"), seeds=3, out=tmp_path))
    assert {each.spec.method for each in cut} == {"dmc", "dmc-ot", "rapf"}
    assert [each.spec.seed for each in cut[:3]] == [0, 1, 2]
    assert {each.spec.data for each in cut} == {"cifar100", "cub200"}
    assert {each.spec.tasks for each in plan(Grid("table2", out=tmp_path))} == {20}


def test_ablations_are_settings(tmp_path: Path) -> None:
    planned = plan(Grid("table4", data=("emoji",), run={"backbone": "mini"}, out=tmp_path))
    assert [(each.label, each.config.calibration, each.config.task_prompt) for each in planned] == [
        ("w/o OT", "none", True), ("with alternative OT", "class", True), ("with OT", "task", True),
    ]  # fmt: skip
    assert plan(Grid("table3", data=("emoji",), out=tmp_path))[0].config.simultaneous
    assert not plan(Grid("table5", data=("emoji",), out=tmp_path))[0].config.task_prompt
    usual = plan(Grid("table1", data=("emoji",), only=("dmc-ot",), run={"backbone": "mini"}, out=tmp_path))
    assert usual[0].folder == planned[2].folder, "the same run in two tables is one run"


def test_an_option_that_is_not_given_is_no_part_of_the_name_of_a_folder() -> None:
    (planned,) = plan(Grid(methods=("simplecil",), data=("emoji",)))
    assert "hold_out" not in planned.table["run"]
    (held,) = plan(Grid(methods=("simplecil",), data=("emoji",), run={"hold_out": 1}))
    assert held.folder != planned.folder


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"table": "table9"}, "'table9'"),
        ({"methods": ("simplecli",)}, "'simplecil'"),
        ({"data": ("emojis",)}, "'emoji'"),
        ({"data": ("tests",)}, "--data folder --data-root tests"),
        ({"only": ("nothing-like-it",)}, "'nothing-like-it'"),
        ({"set": ("stage1.epoch=1",)}, "'stage1.epoch'"),
        ({"table": "table4", "set": ("calibration=none",)}, "'calibration'"),
        ({"methods": ("l2p",), "set": ("pool=3", "top_k=4")}, "'pool' is 3"),
        ({"data_root": ("a", "b")}, "--data-root"),
        ({"data_options": ("splits=1",)}, "'splits'"),
        ({"orders": ("seed:3",), "run": {"order": "seed:9"}}, "--order"),
        *(({name: ("",)}, f"--{name}") for name in ("methods", "only", "data", "orders")),
        *(({name: 0}, f"'{name}' is '0'") for name in ("seeds", "jobs", "cpus_per_run")),
        ({"gpus_per_run": -1.0}, "'gpus_per_run'"),
        ({"address": "auto"}, "--on ray"),
        ({"on": "ray", "jobs": 2}, "--jobs"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(
    options: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tests").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        plan(Grid(**options))
    assert named in str(caught.value)


def test_settings_reach_the_methods_that_have_them(tmp_path: Path) -> None:
    planned = plan(Grid(methods=("zero-shot", "l2p"), set=("pool=3", "top_k=2"), out=tmp_path))
    assert [each.problem for each in planned] == ["", ""]  # a pool of 3 does not fit the default top_k
    assert (planned[1].config.pool, planned[1].config.top_k) == (3, 2)


def test_the_folder_of_a_dataset_is_absolute_however_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    found = data_roots([str(tmp_path), "cub200=elsewhere"], ["cifar100", "cub200", "imagenet-r", "emoji"])
    assert found.pop("cub200") == Path("elsewhere").absolute()
    assert found == {"cifar100": tmp_path / "cifar100", "imagenet-r": tmp_path, "emoji": None}


def test_each_value_is_a_run_and_symbols_of_the_paper_are_names() -> None:
    planned = plan_sweep("dmc-ot", "λ", ["0", "0.5"], Grid(seeds=2))
    assert [(each.label, each.config.ortho, each.spec.seed) for each in planned] == [
        ("0", 0.0, 0), ("0", 0.0, 1), ("0.5", 0.5, 0), ("0.5", 0.5, 1),
    ]  # fmt: skip


def test_options_of_the_run_can_be_swept_and_without_values_those_of_the_study_are_taken() -> None:
    planned = plan_sweep("simplecil", "tasks", ["5", "10", "20"], Grid())
    assert [each.spec.tasks for each in planned] == [5, 10, 20]
    planned = plan_sweep("dmc-ot", "M", [], Grid())
    assert [each.config.prompt_length for each in planned] == [1, 2, 5, 10, 16, 20]


def test_a_sweep_reuses_the_runs_of_a_bench() -> None:
    (usual,) = plan(Grid(methods=("dmc-ot",)))
    swept = plan_sweep("dmc-ot", "beta", ["1.5", f"{usual.config.beta:g}"], Grid())
    assert [each.folder == usual.folder for each in swept] == [False, True]


@pytest.mark.parametrize(
    ("key", "values", "more", "named"),
    [
        ("betta", ["1", "2"], {}, "'beta'"),
        ("beta", ["1"], {}, "two values of 'beta'"),
        ("beta", ["1", "big"], {}, "'beta' is 'big'"),
        ("tasks", ["5", "five"], {}, "'tasks' is 'five'"),
        ("max_replay", [], {}, "two values of 'max_replay'"),
        ("order", ["seed:1", "seed:2"], {"orders": ("seed:3",)}, "--orders"),
        ("tasks", ["5", "10"], {"run": {"increment": "20"}}, "--increment"),
        ("test_sample", ["5", "10"], {"run": {"test_sample": "20"}}, "--test-sample"),
        ("β", ["0", "1"], {"set": ("prompt_length=3", "beta = 0.5")}, "--set beta = 0.5"),
    ],
)
def test_wrong_words_are_refused(key: str, values: list[str], more: dict[str, Any], named: str) -> None:
    """So are options that say otherwise."""
    with pytest.raises(UserError) as caught:
        plan_sweep("dmc-ot", key, values, Grid(**more))
    assert named in str(caught.value)


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    points = [(value, MeanStd(50 + i, 1.0), MeanStd(60 + i, None)) for i, value in enumerate(("10", "0", "0.5"))]
    save_sweep([Curve("emoji", points), Curve("cifar100", points[:2])], "title", "beta", tmp_path / "a" / "curve.png")
    image = Image.open(tmp_path / "a" / "curve.png").convert("RGB")
    assert image.width > 600
    colours = {colour for _, colour in image.getcolors(maxcolors=10**6)}
    assert {(213, 94, 0), (0, 114, 178)} <= colours, "a line of its own colour for each dataset"
