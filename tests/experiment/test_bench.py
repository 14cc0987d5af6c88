"""The grid: what it consists of, that nothing is done twice, and that a failure stops nothing."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from clipcil import cluster
from clipcil.cli import main
from clipcil.clip import CLIP
from clipcil.clip.loading import MINI
from clipcil.errors import UserError
from clipcil.experiment import experiment as experiments
from clipcil.experiment import workers
from clipcil.experiment.bench import RESULTS, FinishedRuns, lines_of, read_log, run_grid, states_of
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.folder import inputs
from clipcil.experiment.grid import PlannedRun, data_roots, plan
from clipcil.experiment.spec import Grid
from clipcil.storage import InUseError
from support.short_runs import digest
from support.towers import with_other_tokenizer

COLOURS = ("red", "green", "blue", "white", "black", "orange")
FAST = ("stage1.epochs=1", "stage2.epochs=1", "stage2.steps=0")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six classes of six pictures, a colour each."""
    root = tmp_path_factory.mktemp("pictures") / "folder"
    for colour in COLOURS:
        (root / colour).mkdir(parents=True)
        for size in range(40, 46):
            Image.new("RGB", (size, 48), colour).save(root / colour / f"{size}.png")
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path_factory.getbasetemp() / "bench-cache"))


def small_grid(pictures: Path, out: Path, **changes: Any) -> Grid:
    wanted = {
        "methods": ("zero-shot", "simplecil", "dmc-ot"),
        "data": ("folder",),
        "data_root": (f"folder={pictures}",),
    }
    settings = FAST if "dmc-ot" in changes.get("methods", wanted["methods"]) else ()
    return Grid(**{**wanted, "out": out, "seeds": 2, "set": settings, "run": {"tasks": 2}, **changes})


def counted(monkeypatch: pytest.MonkeyPatch, before: Any = None) -> list[str]:
    """The folders of the runs that are really run from now on."""
    real, folders = Experiment.run, []

    def run(self: Experiment, folder: Path, **more: Any) -> Any:
        folders.append(folder.name)
        if before is not None:
            before(self.spec, len(folders))
        return real(self, folder, **more)

    monkeypatch.setattr(Experiment, "run", run)
    return folders


def test_a_grid_is_stopped_and_goes_on_and_nothing_is_done_twice(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(small_grid(pictures, tmp_path))
    assert len({each.folder for each in planned}) == 6

    real, measured = experiments.evaluate, []

    def evaluate(*given: Any) -> Any:
        measured.append(given)
        if len(measured) == 8:  # the second of two tasks of the fourth run
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(experiments, "evaluate", evaluate)
    done = counted(monkeypatch)
    with pytest.raises(KeyboardInterrupt, match="stopped after 3 of 6 runs; the same command continues"):
        run_grid(planned, tmp_path)
    assert len(done) == 4 and len(read_log(tmp_path / RESULTS)) == 3
    monkeypatch.undo()
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(experiments, "evaluate", evaluate)
    again = counted(monkeypatch)
    told: list[str] = []
    finished = run_grid(planned, tmp_path, told.append)
    assert len(measured) == 8 + 1 + 2 * 2, "the first task of the run that was stopped is not measured again"
    assert again == [each.folder.name for each in planned[3:]]
    assert [line.rsplit("(", 1)[1] for line in told] == ["done before)"] * 3 + ["done)"] * 3
    lines = read_log(tmp_path / RESULTS)
    assert [line["run"] for line in lines] == [each.folder.name for each in planned]
    assert all(line["status"] == "done" and 0 <= line["last"] <= 100 for line in lines)
    assert [str(len(line.group.runs)) for line in lines_of(finished) if line.group] == ["2", "2", "2"]
    again.clear()
    run_grid(planned, tmp_path)
    assert not again and len(read_log(tmp_path / RESULTS)) == 6


def test_a_failed_run_is_reported_and_the_rest_go_on(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: Any, number: int) -> None:
        if spec.method == "zero-shot":
            raise RuntimeError("the tower fell\nand more")

    counted(monkeypatch, fail)
    told: list[str] = []
    planned = plan(small_grid(pictures, tmp_path, methods=("zero-shot", "simplecil"), seeds=1))
    finished = run_grid(planned, tmp_path, told.append)
    assert "FAILED: RuntimeError: the tower fell (see" in told[0] and "A_B" in told[1]
    assert "the tower fell" in (planned[0].folder / "error.txt").read_text()
    assert [line["status"] for line in read_log(tmp_path / RESULTS)] == ["failed", "done"]
    assert [(line.failed, line.group is None) for line in lines_of(finished)] == [(1, True), (0, False)]
    monkeypatch.undo()
    run_grid(planned, tmp_path)
    assert [line["status"] for line in read_log(tmp_path / RESULTS)] == ["failed", "done", "done"]
    assert not (planned[0].folder / "error.txt").exists()


def test_a_run_that_another_bench_does_meanwhile_is_not_a_failed_one(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, here = (plan(small_grid(pictures, tmp_path / name, methods=("simplecil",))) for name in ("other", "here"))
    run_grid(other, tmp_path / "other")

    def meanwhile(_: Any, number: int) -> None:
        if number == 1:
            raise InUseError("in use by process 7")
        shutil.copytree(other[0].folder, here[0].folder)

    counted(monkeypatch, meanwhile)
    told: list[str] = []
    finished = run_grid(here, tmp_path / "here", told.append)
    assert [each.error for each in finished] == ["", ""] and all(each.result for each in finished)
    assert "FAILED: in use by process 7" in told[0] and told[2].endswith("(done by another process)")
    assert [line["status"] for line in read_log(tmp_path / "here" / RESULTS)] == ["failed", "done", "done"]


def test_a_backbone_that_cannot_be_had_is_asked_for_once(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def offline(repository: str, file: str, **options: Any) -> str:
        asked.append(file)
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)
    run = {"tasks": 2, "backbone": "nobody/nothing"}
    finished = run_grid(plan(small_grid(pictures, tmp_path / "out", run=run)), tmp_path / "out")
    assert len(finished) == 6 and all("no network" in each.error for each in finished)
    assert len(asked) == len(set(asked))  # each file once, not once for each of the six runs


def test_damaged_or_foreign_results_are_done_again(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(small_grid(pictures, tmp_path, methods=("simplecil",), seeds=1))
    done = counted(monkeypatch)
    (tmp_path / RESULTS).write_text('{"run": "x", "sta')  # half a line, left by a process that was killed
    assert len(run_grid([*planned, *planned], tmp_path)) == 2 and len(done) == 1, "two rows may be the same run"
    results = planned[0].folder / "results.json"
    results.write_text(results.read_text()[:-40])
    run_grid(planned, tmp_path)
    values = json.loads(results.read_text())
    values["config"]["run"]["seed"] = 7
    results.write_text(json.dumps(values))
    run_grid(planned, tmp_path)
    assert len(done) == 3 and [line["run"] for line in read_log(tmp_path / RESULTS)] == [planned[0].folder.name]


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


@pytest.mark.parametrize("changed", ["order", "pictures"])
def test_a_file_that_has_changed_since_is_not_passed_over(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str
) -> None:
    own, order = tmp_path / "folder", tmp_path / "order.txt"
    shutil.copytree(pictures, own)
    order.write_text("\n".join(COLOURS))
    grid = small_grid(own, tmp_path / "out", methods=("simplecil",), seeds=1, orders=(str(order),))
    first = run_grid(plan(grid), grid.out)
    done = counted(monkeypatch)
    assert run_grid(plan(grid), grid.out)[0].result is not None and not done, "the same files: done before"
    if changed == "order":
        order.write_text("\n".join(reversed(COLOURS)))
    else:
        Image.new("RGB", (50, 50), COLOURS[0]).save(own / COLOURS[0] / "more.png")
    for _ in range(2):  # a refused run has not made the old results those of the new files
        again = run_grid(plan(grid), grid.out)[0]
        assert first[0].result is not None and again.result is None and "another run" in str(again.error)


@pytest.mark.parametrize("beside", ["pictures", "weights"])
def test_a_file_beside_the_inputs_is_no_reason_to_fail(
    pictures: Path, tmp_path: Path, mini: CLIP, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    """A file that a file manager leaves there changes the folder and nothing of the run."""
    own, weights = tmp_path / "folder", tmp_path / "backbone"
    shutil.copytree(pictures, own)
    shutil.copytree(MINI, weights)
    run = {"tasks": 2, "backbone": str(weights)}
    grid = small_grid(own, tmp_path / "out", methods=("zero-shot",), seeds=1, run=run)
    run_grid(plan(grid), grid.out)
    ((own if beside == "pictures" else weights) / ".DS_Store").write_text("icons")
    done = counted(monkeypatch)
    for _ in range(2):  # looked at once
        assert run_grid(plan(grid), grid.out)[0].result is not None and len(done) == 1
    with_other_tokenizer(mini, weights)
    assert "its tokenizer is" in run_grid(plan(grid), grid.out)[0].error


def test_a_run_killed_before_its_first_checkpoint_is_of_the_files_it_was_made_from(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order = tmp_path / "order.txt"
    order.write_text("\n".join(COLOURS))
    grid = small_grid(pictures, tmp_path / "out", methods=("simplecil",), seeds=1, orders=(str(order),))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(experiments, "evaluate", interrupt)
        run_grid(plan(grid), grid.out)
    order.write_text("\n".join(reversed(COLOURS)))
    (finished,) = run_grid(plan(grid), grid.out)
    assert finished.result is not None and list(finished.result.values["per_class"]) == [*reversed(COLOURS)]
    order.write_text("\n".join(COLOURS))
    assert "another run" in run_grid(plan(grid), grid.out)[0].error


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_file_that_changes_while_a_run_goes_on_is_named_as_the_reason(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, real, told = tmp_path / "order.txt", experiments.evaluate, []
    order.write_text("\n".join(COLOURS))
    grid = small_grid(pictures, tmp_path / "out", methods=("simplecil",), seeds=1, orders=(str(order),))

    def evaluate(*given: Any) -> Any:
        order.write_text("\n".join(reversed(COLOURS)))
        return real(*given)

    monkeypatch.setattr(experiments, "evaluate", evaluate)
    (finished,) = run_grid(plan(grid), grid.out, told.append)
    assert finished.result is None and "FAILED: " in told[0] and "--out" in told[0]


def test_files_that_a_run_is_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that an option or setting names, whole folders too, and those that are read with the weights."""
    monkeypatch.chdir(tmp_path)
    names = ("split.txt", "random", "lists/trainlist01.txt", "weights/vit.pt", "weights/vocab.json", "answers.json")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")

    def named(data: str, options: dict[str, Any], changed: str, **more: str) -> set[str]:
        """What is digested; of it exactly what `changed` is in has another digest after a change."""
        run = {"method": "engine", "data": data, "order": "natural", "data_options": options, **more}
        table = {"run": run, "method": {"descriptions": "answers.json"}}
        before = inputs(table)
        (tmp_path / changed).write_text(f"{(tmp_path / changed).read_text()} and after")
        after = inputs(table)
        assert before.keys() == after.keys() and sum(before[key] != after[key] for key in before) == 1
        return {*before} - {"descriptions"}

    assert named("imagenet-r", {"split_list": "split.txt", "check": True}, "split.txt") == {"data_options.split_list"}
    assert named("ucf101", {"lists": "lists", "split": "random"}, "lists/trainlist01.txt") == {"data_options.lists"}
    assert named("ucf101", {"split": "random"}, "answers.json") == set(), "no path, though a file is called like it"
    assert named("emoji", {}, "split.txt", order="split.txt") == {"order"}
    both = {"backbone", "backbone/vocab.json"}
    for part in ("vit.pt", "vocab.json"):
        assert named("emoji", {}, f"weights/{part}", backbone="weights/vit.pt") == both
    gone = {"run": {"data": "ucf101", "data_options": {"lists": "gone"}, "backbone": "owner/name"}, "method": {}}
    assert inputs(gone) == {}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"table": "table9"}, "'table9'"),
        ({"methods": ("simplecli",)}, "'simplecil'"),
        ({"data": ("emojis",)}, "'emoji'"),
        ({"data": ("tests",)}, "--data folder --data-root tests"),
        ({"only": ("nothing-like-it",)}, "'nothing-like-it'"),
        ({"set": ("stage1.epoch=1",)}, "'stage1.epoch'"),
        ({"set": ("stage1.epochs=many",)}, "'stage1.epochs' is 'many'"),
        ({"table": "table4", "set": ("calibration=none",)}, "'calibration'"),
        ({"methods": ("l2p",), "set": ("pool=3", "top_k=4")}, "'pool' is 3"),
        ({"data_root": ("a", "b")}, "--data-root"),
        ({"data_options": ("splits=1",)}, "'splits'"),
        ({"orders": ("seed:3",), "run": {"order": "seed:9"}}, "--order"),
        *(({name: ("",)}, f"--{name}") for name in ("methods", "only", "data", "orders")),
        *(({name: 0}, f"'{name}' is '0'") for name in ("seeds", "jobs", "cpus_per_run")),
        ({"gpus_per_run": -1.0}, "'gpus_per_run'"),
        ({"address": "auto"}, "--on ray"),
        ({"gpus_per_run": 1.0}, "--on ray"),
        ({"cpus_per_run": 2.0}, "--on ray"),
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


def test_two_processes_give_the_same_bytes_also_when_they_are_killed(pictures: Path, tmp_path: Path) -> None:
    """Both worker processes are killed in the middle of a run of DMC-OT; others continue from the checkpoints."""
    methods = ("simplecil", "dmc-ot")
    one, two = (plan(small_grid(pictures, tmp_path / name, methods=methods)) for name in ("one", "two"))
    run_grid(one, tmp_path / "one")
    told: list[str] = []

    def kill() -> None:
        while not any(any((each.folder / "checkpoint").glob("task-0001-*")) for each in two[2:]):
            time.sleep(0.005)
        for child in multiprocessing.active_children():
            child.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    finished = run_grid(two, tmp_path / "two", told.append, grid=Grid(jobs=2))
    killer.join()
    assert all(each.result is not None for each in finished), told
    assert any("died; another continues" in line for line in told)
    assert [each.result.folder.name for each in finished if each.result] == [each.folder.name for each in one]
    for first, second in zip(one, two, strict=True):
        assert digest(first.folder) == digest(second.folder)


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so by `Exception` where the machine is too busy."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore")

    monkeypatch.setattr(cluster, "need_ray", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(UserError, match=r"^Ray could not be started on this machine: .*timed out during startup.$"):
        cluster.connect()
    with pytest.raises(UserError, match=r"^there is no Ray cluster at 'ray://x': "):
        cluster.connect("ray://x")


def test_a_run_whose_process_always_dies_fails_and_the_rest_go_on(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process dies whenever it is given the first run; the other fails at once, without a real process."""

    class Mortal(SimpleNamespace):
        def __init__(self) -> None:
            here, other = multiprocessing.Pipe()
            super().__init__(pipe=here, other=other, process=SimpleNamespace(kill=lambda: None))

        def give(self, run: PlannedRun) -> bool:
            self.run = run
            self.other.send("no pictures")
            return True

        def answer(self) -> str | None:
            return None if self.run.spec.method == "zero-shot" else str(self.pipe.recv())

    monkeypatch.setattr(workers, "_Worker", Mortal)
    planned = plan(small_grid(pictures, tmp_path, methods=("zero-shot", "simplecil"), seeds=1))
    finished = run_grid(planned, tmp_path, grid=Grid(jobs=2))
    assert [each.error for each in finished] == ["its process died 3 times", "no pictures"]


def test_a_dry_run_says_how_far_the_grid_is_and_runs_nothing(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--methods", "zero-shot", "simplecil", "--data", "folder", "--data-root", f"folder={pictures}"]
    words += ["--tasks", "2", "--seeds", "2", "--out", str(tmp_path / "out")]
    main([*words, "--dry-run"])
    assert "0 of 4 runs are finished" in capsys.readouterr().out and not (tmp_path / "out").exists()
    main([*words, "--only", "simplecil", "--quiet"])
    begun = next((tmp_path / "out").glob("*simplecil-seed1*"))
    (begun / "matrix.csv").unlink()
    capsys.readouterr()
    main([*words, "--dry-run"])
    printed = capsys.readouterr().out
    assert [line.split() for line in printed.splitlines()[1:3]] == [
        ["Zero-shot", "CLIP", "folder", "2", "2"],
        ["SimpleCIL", "folder", "2", "2", "1", "1"],
    ]
    assert "1 of 4 runs are finished" in printed and not (begun / "matrix.csv").exists()
    missing = ["bench", "--methods", "simplecil", "--data", "cub200", "--data-root", str(tmp_path / "no"), "--dry-run"]
    main([*missing, "--out", str(tmp_path / "other")])
    assert "0 of 1 runs are finished" in capsys.readouterr().out
    same = ["bench", "sensitivity", "--only", "M = 10", "β = 0.05", "--data", "cifar100", "--dry-run"]
    main([*same, "--out", str(tmp_path / "other")])
    assert "0 of 1 runs are finished" in capsys.readouterr().out, "two rows that are the same run are one run"
    planned = plan(small_grid(pictures, tmp_path / "x", methods=("simplecil",)))[0]
    assert states_of([replace(planned, problem="broken")], FinishedRuns()).popitem()[1] == {"cannot be run": 1}
