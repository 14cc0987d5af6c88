"""`clipcil run --devices 2`: one process writes, results are reproducible, a lost process ends the run."""

import csv
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from clipcil.errors import UserError
from clipcil.training.device import make_fabric
from support.processes import start

SHORT = ("stage1.epochs=1", "stage2.epochs=2", "stage2.steps=0")
WORDS = ("run", "dmc-ot", "--shots", "3", "--tasks", "4", "--set", *SHORT, "--device", "cpu")
TWO = (*WORDS, "--devices", "2", "--out")
FILES = ("results.json", "predictions.csv", "matrix.csv", "steps.jsonl", "config.toml")


def done(*started: subprocess.Popen[str]) -> None:
    """Wait for processes that end well and of which the first alone speaks."""
    try:
        printed = [process.communicate(timeout=600) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), printed
    assert printed[0][0].count("A_B") == 1 and not any(said for said, _ in printed[1:]), printed


def check_same(run: Path, other: Path) -> None:
    for name in FILES:
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


def answers(folder: Path) -> list[tuple[str, str]]:
    """Picture and predicted class of every test picture; probabilities differ in their last digit."""
    with (folder / "predictions.csv").open(encoding="utf-8") as file:
        return [(row["picture"], row["predicted"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by one process and by two."""
    folder = tmp_path_factory.mktemp("runs")
    done(start(folder, *WORDS, "--out", "one"))
    done(start(folder, *TWO, "two"))
    return folder


def test_two_processes_end_with_the_same_bytes_every_time_and_predict_what_one_predicts(runs: Path) -> None:
    done(start(runs, *TWO, "again"))
    check_same(runs / "again", runs / "two")
    assert answers(runs / "two") == answers(runs / "one")
    assert (runs / "two" / "config.toml").read_bytes() == (runs / "one" / "config.toml").read_bytes()


def test_processes_that_torchrun_started_are_found(runs: Path, tmp_path: Path) -> None:
    done(start(tmp_path, "-m", "clipcil", *TWO, "run", module=("torch.distributed.run", "--nproc-per-node", "2")))
    check_same(tmp_path / "run", runs / "two")


def test_processes_that_slurm_started_are_found(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that `srun --ntasks-per-node 2` gives its two processes, on one machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    job = {"JOB_ID": "77", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "STEP_NUM_TASKS": "2"}
    started = []
    for rank in ("0", "1"):
        own = {"NNODES": "1", "NODEID": "0", "NODELIST": "localhost", "PROCID": rank, "LOCALID": rank}
        for key, value in (job | own).items():
            monkeypatch.setenv(f"SLURM_{key}", value)
        started.append(start(tmp_path, *TWO, "run"))
    done(*started)
    check_same(tmp_path / "run", runs / "two")


@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_another_number_of_processes_is_refused(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"torchrun": {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "3"}, "srun": {"SLURM_STEP_NUM_TASKS": "3"}}[by]
    for key, value in started.items():
        monkeypatch.setenv(key, value)
    for devices, nodes in ((1, 1), (2, 1), (4, 1)):
        with pytest.raises(UserError, match=f"{by} started 3 processes"):
            make_fabric("cpu", "32-true", devices, nodes)


def test_a_killed_process_ends_the_run_and_one_process_resumes_it(runs: Path, tmp_path: Path) -> None:
    folder, end = tmp_path / "run", time.monotonic() + 300
    started = start(tmp_path, *TWO, str(folder))
    try:
        while not any((folder / "checkpoint").glob("task-0002-*.safetensors")):
            assert started.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        (other,) = children(started.pid)
        os.kill(other, signal.SIGKILL)
        _, errors = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode > 0, errors  # that of an abort is negative
    last = errors.strip().splitlines()[-1]
    assert last.startswith("clipcil: ") and f"clipcil run --resume {folder}" in last, errors
    assert "Traceback" not in errors and not (folder / "results.json").exists()
    done(start(tmp_path, "run", "--resume", str(folder)))
    assert answers(folder) == answers(runs / "one")


def children(pid: int) -> list[int]:
    """Processes that `pid` has started and that run clipcil."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"clipcil" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):
            continue  # it has ended meanwhile
    return found
