"""The grid: what it consists of, that nothing is done twice, and that a failure stops nothing."""

import json
import multiprocessing
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
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
from clipcil.experiment.bench import RESULTS, FinishedRuns, RunOutcome, lines_of, read_log, run_grid
from clipcil.experiment.experiment import Experiment
from clipcil.experiment.folder import inputs
from clipcil.experiment.grid import PlannedRun, plan
from clipcil.experiment.spec import Grid, RunSpec, method_settings
from clipcil.storage import InUseError
from support.lessons import COLOURS
from support.short_runs import digest, interrupt
from support.towers import with_other_tokenizer

FAST = ("stage1.epochs=1", "stage2.epochs=1", "stage2.steps=0")


class Bench:
    """Small grids on pictures of six colours; counts the runs that are really run."""

    def __init__(self, pictures: Path, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.pictures, self.out, self.patch = pictures, folder / "out", patch
        self.told: list[str] = []
        self.order = folder / "order.txt"

    def grid(self, *methods: str, **changes: Any) -> Grid:
        data = {"data": ("folder",), "data_root": (f"folder={self.pictures}",), "out": self.out}
        settings = FAST if "dmc-ot" in methods else ()
        return Grid(**{**data, "methods": methods, "seeds": 1, "set": settings, "run": {"tasks": 2}, **changes})

    def ordered(self, colours: Iterable[str] = COLOURS) -> Grid:
        """One run with the class order of a file, which is written."""
        self.order.write_text("\n".join(colours))
        return self.grid("simplecil", orders=(str(self.order),))

    def run(self, grid: Grid) -> list[RunOutcome]:
        self.told = []
        return run_grid(plan(grid), grid, self.told.append)

    def status(self) -> list[str]:
        return [line["status"] for line in read_log(self.out / RESULTS)]

    def count(self, before: Callable[[Any, int], object] = lambda spec, number: None) -> list[str]:
        """The folders of the runs that are really run from now on; `before` is called before each."""
        real, folders = Experiment.run, []

        def run(self: Experiment, folder: Path, **more: Any) -> Any:
            folders.append(folder.name)
            before(self.spec, len(folders))
            return real(self, folder, **more)

        self.patch.setattr(Experiment, "run", run)
        return folders


@pytest.fixture
def bench(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(pictures, tmp_path, monkeypatch)


def test_a_grid_is_stopped_and_goes_on_and_nothing_is_done_twice(bench: Bench) -> None:
    grid = bench.grid("zero-shot", "simplecil", "dmc-ot", seeds=2)
    names = [each.folder.name for each in plan(grid)]
    assert len(set(names)) == 6
    real, measured = experiments.evaluate, []

    def evaluate(*given: Any) -> Any:
        measured.append(given)
        if len(measured) == 8:  # the second of two tasks of the fourth run
            raise KeyboardInterrupt
        return real(*given)

    bench.patch.setattr(experiments, "evaluate", evaluate)
    done = bench.count()
    with pytest.raises(KeyboardInterrupt, match="stopped after 3 of 6 runs; the same command continues"):
        bench.run(grid)
    assert done == names[:4] and bench.status() == ["done"] * 3
    done.clear()
    finished = bench.run(grid)
    assert len(measured) == 8 + 1 + 2 * 2, "the first task of the run that was stopped is not measured again"
    assert done == names[3:]
    assert [line.rsplit("(", 1)[1] for line in bench.told] == ["done before)"] * 3 + ["done)"] * 3
    lines = read_log(bench.out / RESULTS)
    assert [line["run"] for line in lines] == names and bench.status() == ["done"] * 6
    assert all(0 <= line["last"] <= 100 for line in lines)
    assert [len(line.group.runs) for line in lines_of(finished) if line.group] == [2, 2, 2]
    done.clear()
    bench.run(grid)
    assert not done and bench.status() == ["done"] * 6


def test_a_failed_run_is_reported_and_the_rest_go_on(bench: Bench) -> None:
    def fail(spec: Any, number: int) -> None:
        if number == 1:
            raise RuntimeError("the tower fell\nand more")

    bench.count(fail)
    grid = bench.grid("zero-shot", "simplecil")
    error = plan(grid)[0].folder / "error.txt"
    finished = bench.run(grid)
    assert "FAILED: RuntimeError: the tower fell (see" in bench.told[0] and "A_B" in bench.told[1]
    assert "the tower fell" in error.read_text() and bench.status() == ["failed", "done"]
    assert [(line.failed, line.group is None) for line in lines_of(finished)] == [(1, True), (0, False)]
    bench.run(grid)
    assert bench.status() == ["failed", "done", "done"] and not error.exists()


def test_a_run_that_another_bench_does_meanwhile_is_not_a_failed_one(bench: Bench) -> None:
    here = bench.grid("simplecil", seeds=2)
    other = replace(here, out=bench.out.with_name("other"))
    bench.run(other)

    def meanwhile(_: Any, number: int) -> None:
        if number == 1:
            raise InUseError("in use by process 7")
        shutil.copytree(plan(other)[0].folder, plan(here)[0].folder)

    bench.count(meanwhile)
    finished = bench.run(here)
    assert [each.error for each in finished] == ["", ""] and all(each.result for each in finished)
    assert "FAILED: in use by process 7" in bench.told[0] and bench.told[2].endswith("(done by another process)")
    assert bench.status() == ["failed", "done", "done"]


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_run(bench: Bench) -> None:
    done = bench.count()
    with pytest.raises(UserError, match=r"cannot write /proc/bench/results\.jsonl"):
        bench.run(replace(bench.grid("simplecil"), out=Path("/proc/bench")))
    assert not done


def test_a_backbone_that_cannot_be_had_is_asked_for_once(bench: Bench) -> None:
    asked = []

    def offline(repository: str, file: str, **options: Any) -> str:
        asked.append(file)
        raise ConnectionError("no network")

    bench.patch.setattr("huggingface_hub.hf_hub_download", offline)
    finished = bench.run(bench.grid("zero-shot", "simplecil", run={"tasks": 2, "backbone": "nobody/nothing"}))
    assert len(finished) == 2 and all("no network" in each.error for each in finished)
    assert len(asked) == len(set(asked))  # each file once, not once for each run


def test_damaged_or_foreign_results_are_done_again(bench: Bench) -> None:
    grid = bench.grid("simplecil")
    (planned,) = plan(grid)
    done = bench.count()
    bench.out.mkdir()
    (bench.out / RESULTS).write_text('{"run": "x", "sta')  # half a line, left by a process that was killed
    assert len(run_grid([planned, planned], grid)) == 2 and len(done) == 1, "two rows may be the same run"
    results = planned.folder / "results.json"
    results.write_text(results.read_text()[:-40])
    bench.run(grid)
    values = json.loads(results.read_text())
    values["config"]["run"]["seed"] = 7
    results.write_text(json.dumps(values))
    bench.run(grid)
    assert len(done) == 3 and [line["run"] for line in read_log(bench.out / RESULTS)] == [planned.folder.name]


@pytest.mark.parametrize("changed", ["order", "pictures"])
def test_a_file_that_has_changed_since_is_not_passed_over(bench: Bench, tmp_path: Path, changed: str) -> None:
    bench.pictures = Path(shutil.copytree(bench.pictures, tmp_path / "folder"))
    grid = bench.ordered()
    assert bench.run(grid)[0].result is not None
    done = bench.count()
    assert bench.run(grid)[0].result is not None and not done, "the same files: done before"
    if changed == "order":
        bench.ordered(reversed(COLOURS))
    else:
        Image.new("RGB", (50, 50), COLOURS[0]).save(bench.pictures / COLOURS[0] / "more.png")
    for _ in range(2):  # a refused run has not made the old results those of the new files
        again = bench.run(grid)[0]
        assert again.result is None and "another run" in again.error


@pytest.mark.parametrize("beside", ["pictures", "weights"])
def test_a_file_beside_the_inputs_is_no_reason_to_fail(bench: Bench, tmp_path: Path, mini: CLIP, beside: str) -> None:
    """A file that a file manager leaves there changes the folder and nothing of the run."""
    weights = Path(shutil.copytree(MINI, tmp_path / "backbone"))
    bench.pictures = Path(shutil.copytree(bench.pictures, tmp_path / "folder"))
    grid = bench.grid("zero-shot", run={"tasks": 2, "backbone": str(weights)})
    bench.run(grid)
    ((bench.pictures if beside == "pictures" else weights) / ".DS_Store").write_text("icons")
    done = bench.count()
    for _ in range(2):  # looked at once
        assert bench.run(grid)[0].result is not None and len(done) == 1
    with_other_tokenizer(mini, weights)
    assert "its tokenizer is" in bench.run(grid)[0].error


def test_a_run_killed_before_its_first_checkpoint_is_of_the_files_it_was_made_from(bench: Bench) -> None:
    grid = bench.ordered()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(experiments, "evaluate", interrupt)
        bench.run(grid)
    bench.ordered(reversed(COLOURS))
    (finished,) = bench.run(grid)
    assert finished.result is not None and list(finished.result.values["per_class"]) == [*reversed(COLOURS)]
    bench.ordered()
    assert "another run" in bench.run(grid)[0].error


def test_a_file_that_changes_while_a_run_goes_on_is_named_as_the_reason(bench: Bench) -> None:
    grid, real = bench.ordered(), experiments.evaluate

    def evaluate(*given: Any) -> Any:
        bench.ordered(reversed(COLOURS))
        return real(*given)

    bench.patch.setattr(experiments, "evaluate", evaluate)
    (finished,) = bench.run(grid)
    assert finished.result is None and "FAILED: " in bench.told[0] and "--out" in bench.told[0]


def test_files_that_a_run_is_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and folders that an option or setting names, and files that are read with the weights."""
    monkeypatch.chdir(tmp_path)
    names = ("split.txt", "random", "lists/trainlist01.txt", "weights/vit.pt", "weights/vocab.json", "answers.json")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("before")

    def named(data: str, options: dict[str, Any], changed: str, **more: str) -> set[str]:
        """The names of the digests; a change of the file `changed` changes exactly one digest."""
        spec = RunSpec("engine", data, data_options=options, **{"order": "natural", **more})
        config = method_settings(spec, {"descriptions": "answers.json"})
        before = inputs(spec, config)
        (tmp_path / changed).write_text(f"{(tmp_path / changed).read_text()} and after")
        after = inputs(spec, config)
        assert before.keys() == after.keys() and sum(before[key] != after[key] for key in before) == 1
        return {*before} - {"descriptions"}

    assert named("imagenet-r", {"split_list": "split.txt", "check": True}, "split.txt") == {"data_options.split_list"}
    assert named("ucf101", {"lists": "lists", "split": "random"}, "lists/trainlist01.txt") == {"data_options.lists"}
    assert named("ucf101", {"split": "random"}, "answers.json") == set(), "no path, though a file is called like it"
    assert named("emoji", {}, "split.txt", order="split.txt") == {"order"}
    both = {"backbone", "backbone/vocab.json"}
    for part in ("vit.pt", "vocab.json"):
        assert named("emoji", {}, f"weights/{part}", backbone="weights/vit.pt") == both
    gone = RunSpec("rapf", "ucf101", data_options={"lists": "gone"}, backbone="owner/name")
    assert inputs(gone, method_settings(gone, {})) == {}


def test_two_processes_give_the_same_bytes_also_when_they_are_killed(bench: Bench) -> None:
    """Both worker processes are killed in the middle of a run of DMC-OT; others continue from the checkpoints."""
    grid = bench.grid("simplecil", "dmc-ot", seeds=2)
    alone = replace(grid, out=bench.out.with_name("one"))
    one, two = plan(alone), plan(grid)
    run_grid(one, alone)

    def kill() -> None:
        while not any(any((each.folder / "checkpoint").glob("task-0001-*")) for each in two[2:]):
            time.sleep(0.005)
        for child in multiprocessing.active_children():
            child.kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    finished = bench.run(replace(grid, jobs=2))
    killer.join()
    assert any("died; another continues" in line for line in bench.told)
    assert [each.result.folder for each in finished if each.result] == [each.folder for each in two], bench.told
    assert [digest(each.folder) for each in one] == [digest(each.folder) for each in two]


def test_a_ray_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says so by `Exception` where the machine is too busy."""

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.\nMore")

    monkeypatch.setattr(cluster, "need_ray", lambda: SimpleNamespace(is_initialized=lambda: False, init=init))
    with pytest.raises(UserError, match=r"^Ray could not be started on this machine: .*timed out during startup.$"):
        cluster.connect()
    with pytest.raises(UserError, match=r"^there is no Ray cluster at 'ray://x': "):
        cluster.connect("ray://x")


def test_a_run_whose_process_always_dies_fails_and_the_rest_go_on(bench: Bench) -> None:
    """The process of the first run always dies; that of the other fails at once. Neither is a real process."""

    class Mortal(ProcessPoolExecutor):
        def submit(self, _: Any, run: PlannedRun) -> Any:
            ended = Future[str]()
            if run.spec.method == "zero-shot":
                ended.set_exception(BrokenProcessPool())
            else:
                ended.set_result("no pictures")
            return ended

    bench.patch.setattr("clipcil.experiment.bench.ProcessPoolExecutor", Mortal)
    finished = bench.run(bench.grid("zero-shot", "simplecil", jobs=2))
    assert [each.error for each in finished] == ["its process died 3 times", "no pictures"]


def test_a_dry_run_says_how_far_the_grid_is_and_runs_nothing(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def dry(*words: str) -> str:
        main(["bench", *words, "--dry-run"])
        return capsys.readouterr().out

    words = ["--methods", "zero-shot", "simplecil", "--data", "folder", "--data-root", f"folder={bench.pictures}"]
    words += ["--tasks", "2", "--seeds", "2", "--out", str(bench.out)]
    assert "0 of 4 runs are finished" in dry(*words) and not bench.out.exists()
    main(["bench", *words, "--only", "simplecil", "--quiet"])
    begun = next(bench.out.glob("*simplecil-seed1*"))
    (begun / "matrix.csv").unlink()
    capsys.readouterr()
    printed = dry(*words)
    assert [line.split() for line in printed.splitlines()[1:3]] == [
        ["Zero-shot", "CLIP", "folder", "2", "2"],
        ["SimpleCIL", "folder", "2", "2", "1", "1"],
    ]
    assert "1 of 4 runs are finished" in printed and not (begun / "matrix.csv").exists()
    missing = ("--methods", "simplecil", "--data", "cub200", "--data-root", str(tmp_path / "no"))
    assert "0 of 1 runs are finished" in dry(*missing, "--out", str(tmp_path / "other"))
    same = ("sensitivity", "--only", "M = 10", "β = 0.05", "--data", "cifar100", "--out", str(tmp_path / "other"))
    assert "0 of 1 runs are finished" in dry(*same), "two rows that are the same run are one run"
    (planned,) = plan(bench.grid("simplecil"))
    assert FinishedRuns().state(replace(planned, problem="broken")) == "cannot be run"
