"""Reading runs back, and taking seeds together."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from clipcil.errors import UserError
from clipcil.paper import PaperResult
from clipcil.report.compare import Line, group_runs, mean_std, print_comparison, stream_titles
from clipcil.report.runs import find_runs, read_run
from support.finished_runs import write_run


def test_spread_is_mean_and_sample_deviation() -> None:
    assert mean_std([70.0, 72.0, 74.0]) == (72.0, 2.0)
    assert str(mean_std([70.0, 72.0, 74.0])) == "72.00 ± 2.00"
    assert str(mean_std([70.0])) == "70.00"
    assert str(mean_std([70.0, 70.0])) == "70.00 (constant)"


def test_seeds_stand_together_and_settings_apart(tmp_path: Path) -> None:
    for seed in (1, 0):
        write_run(tmp_path / f"a{seed}", "dmc-ot", seed)
        write_run(tmp_path / f"b{seed}", "dmc-ot", seed, 0.7, "beta=10")
    write_run(tmp_path / "c", "zero-shot", 0, 0.2)
    write_run(tmp_path / "again", "zero-shot", 0, 0.2)
    groups = group_runs(find_runs([tmp_path]))
    assert [group.label for group in groups] == ["Zero-shot CLIP", "DMC-OT (beta=0.1)", "DMC-OT (beta=10)"]
    assert [[run.seed for run in group.runs] for group in groups] == [[0], [0, 1], [0, 1]]
    assert groups[1].last.std is not None and groups[0].last.std is None
    assert groups[0].first.seconds == 9, "nested phases count once"


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        (["", "beta=10", "beta=1", "ortho=2", "ortho=3"], ["", " (beta=1)", " (beta=10)", " (ortho=2)", " (ortho=3)"]),
        (["beta=1", "beta=2", "beta=3"], [" (beta=1)", " (beta=2)", " (beta=3)"]),  # no majority
        (["", "tasks"], ["", ""]),  # on another stream
    ],
)
def test_a_label_names_the_settings_that_most_variants_on_the_stream_do_not_have(
    tmp_path: Path, changes: list[str], labels: list[str]
) -> None:
    for number, change in enumerate(changes):
        words, more = ([], {"tasks": 4}) if change == "tasks" else ([change] if change else [], {})
        write_run(tmp_path / str(number), "dmc-ot", 0, 0.8, *words, **more)
    assert sorted(group.label for group in group_runs(find_runs([tmp_path]))) == [f"DMC-OT{each}" for each in labels]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(("results.json", text) for text in ("", "{", "[]", '{"last": 3}')),
        *(("timing.json", text) for text in ("", '{"seconds": 3}', '{"seconds": {"loading": -1}}')),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str, content: str) -> None:
    (write_run(tmp_path / "a") / file).write_text(content)
    with pytest.raises(UserError, match=file):
        find_runs([tmp_path])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda values: values["config"]["run"].update(hold_out="one"), "config.run.hold_out"),
        (lambda values: values["config"]["run"].update(hold_out=0), "config.run.hold_out"),
        (lambda values: values["drift"].__setitem__(1, {"w2_before": 1.7e308}), "drift.1.w2_before"),
        (lambda values: values["after"].pop(), "3 tasks"),
    ],
)
def test_a_value_that_no_run_has_is_named(tmp_path: Path, change: Callable[[Any], object], named: str) -> None:
    folder = write_run(tmp_path / "a")
    values = json.loads((folder / "results.json").read_text())
    change(values)
    (folder / "results.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=named):
        read_run(folder)


def test_a_folder_without_runs_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        find_runs([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        find_runs([tmp_path / "nowhere"])


def test_the_terminal_table_has_the_paper_s_numbers_and_the_difference(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", "simplecil", data="cifar100", tasks=10)
    values = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**values, "last": 70.0, "average": 74.0}))
    group = group_runs([read_run(folder)])[0]
    console = Console(record=True, width=160)
    lines = [Line("SimpleCIL", "cifar100", 10, group, group.paper_result()), Line("L2P", "cifar100", 10, None, None, 2)]
    print_comparison(lines, "", console)
    said = console.export_text()
    assert "68.73  +1.27" in said and "74.52  −0.52" in said
    assert "0 (+2 failed)" in said and "these are of mini" in said


def test_the_terminal_table_can_be_read_at_80_columns(tmp_path: Path) -> None:
    lines = []
    for data in ("cifar100", "imagenet-r"):
        runs = [read_run(write_run(tmp_path / f"{data}{seed}", "simplecil", seed, data=data)) for seed in range(3)]
        group = group_runs(runs)[0]
        lines += [Line("DMC-OT without task prompt", data, 10, group, PaperResult("table1", "DMC-OT", 82.16, 86.13), 1)]
    console = Console(record=True, width=80)
    print_comparison(lines, "The table", console)
    said = console.export_text()
    assert all(len(line) <= 80 for line in said.splitlines()) and "…" not in said
    words = ["The table: cifar100, 10 tasks", "The table: imagenet-r, 10 tasks", "DMC-OT without task"]
    assert all(each in said for each in [*words, "3 (+1 failed)", "82.16", "86.13", "(constant)"])


def test_runs_on_another_device_or_in_another_precision_say_so(tmp_path: Path) -> None:
    for device, precision in (("cpu", "32-true"), ("cuda", "32-true"), ("cuda", "bf16-mixed")):
        write_run(tmp_path / device / precision, device=device, precision=precision)
    labels = {group.label for group in group_runs(find_runs([tmp_path]))}
    assert labels == {"SimpleCIL (device=cpu)", "SimpleCIL", "SimpleCIL (precision=bf16-mixed)"}


def test_kept_runs_on_folders_with_other_classes_are_other_streams(tmp_path: Path) -> None:
    """The folder of the data is not kept, so its name does not tell them apart."""
    for kind in ("bird", "tree"):
        for seed in (0, 1):
            names = [f"{kind} {index}" for index in range(6)]
            write_run(tmp_path / f"{kind}{seed}", seed=seed, data="folder", names=names)
    groups = group_runs(find_runs([tmp_path]))
    assert [len(group.runs) for group in groups] == [2, 2]
    assert stream_titles([group.stream for group in groups]) == [
        "folder, 3 tasks, mini, classes bird 0 to bird 5 (6)",
        "folder, 3 tasks, mini, classes tree 0 to tree 5 (6)",
    ]
