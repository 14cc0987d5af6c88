"""`clipcil run --devices 2`: one process writes, results are reproducible, a lost process ends the run."""

from __future__ import annotations

import csv
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clipcil.errors import UserError
from clipcil.training.device import make_fabric

SHORT = ("stage1.epochs=1", "stage2.epochs=2", "stage2.steps=0")
WORDS = ("run", "dmc-ot", "--shots", "3", "--tasks", "4", "--set", *SHORT, "--device", "cpu")
FILES = ("results.json", "predictions.csv", "matrix.csv", "steps.jsonl", "config.toml")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "clipcil", *words]


def done(whole: list[str]) -> str:
    """What a command that ends well prints."""
    result = subprocess.run(whole, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def check_same(run: Path, other: Path, said: str = "A_B") -> None:
    """The same bytes, from processes of which one spoke."""
    assert said.count("A_B") == 1, said
    for name in FILES:
        assert (run / name).read_bytes() == (other / name).read_bytes(), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by one process and twice by two."""
    folder = tmp_path_factory.mktemp("runs")
    for name, words in (("one", ()), ("two", ("--devices", "2")), ("again", ("--devices", "2"))):
        assert done(command(*WORDS, "--out", str(folder / name), *words)).count("A_B") == 1
    return folder


def test_two_processes_end_with_the_same_bytes_every_time(runs: Path) -> None:
    check_same(runs / "two", runs / "again")


def test_two_processes_predict_what_one_predicts(runs: Path) -> None:
    assert answers(runs / "two") == answers(runs / "one")
    assert (runs / "two" / "config.toml").read_bytes() == (runs / "one" / "config.toml").read_bytes()


def test_processes_that_torchrun_started_are_found(runs: Path, tmp_path: Path) -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", *command(*WORDS)[1:]]
    check_same(
        tmp_path / "run",
        runs / "two",
        done([sys.executable, *words, "--devices", "2", "--out", str(tmp_path / "run")]),
    )


def test_processes_that_slurm_started_are_found(runs: Path, tmp_path: Path) -> None:
    """The environment that `srun --ntasks-per-node 2` gives its two processes, on one machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"JOB_ID": "77", "JOB_NAME": "train", "NTASKS": "2", "NTASKS_PER_NODE": "2", "STEP_NUM_TASKS": "2"}
    job |= {"NNODES": "1", "NODEID": "0", "NODELIST": "localhost"}
    shared = {**os.environ, "MASTER_PORT": port, **{f"SLURM_{key}": value for key, value in job.items()}}
    started = [
        subprocess.Popen(
            command(*WORDS, "--devices", "2", "--out", str(tmp_path / "run")),
            env={**shared, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        (said, errors), other = (process.communicate(timeout=600) for process in started)
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], (errors, other)
    assert not other[0]
    check_same(tmp_path / "run", runs / "two", said)


@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_another_number_of_processes_is_refused(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started = {"torchrun": {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "3"}, "srun": {"SLURM_STEP_NUM_TASKS": "3"}}[by]
    for key, value in started.items():
        monkeypatch.setenv(key, value)
    for devices, nodes in ((1, 1), (2, 1), (4, 1)):
        with pytest.raises(UserError, match=f"{by} started 3 processes"):
            make_fabric("cpu", "32-true", devices, nodes)


def test_a_killed_process_ends_the_run_and_one_process_resumes_it(runs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    started = subprocess.Popen(
        command(*WORDS, "--out", str(folder), "--devices", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: any((folder / "checkpoint").glob("task-0002-*.safetensors")), started)
        other = children(started.pid)
        assert len(other) == 1
        os.kill(other[0], signal.SIGKILL)
        _, errors = started.communicate(timeout=120)
    finally:
        started.kill()
    assert started.returncode > 0, errors  # that of an abort is negative
    last = errors.strip().splitlines()[-1]
    assert last.startswith("clipcil: ") and f"clipcil run --resume {folder}" in last, errors
    assert "Traceback" not in errors
    assert not (folder / "results.json").exists()
    done(command("run", "--resume", str(folder)))
    assert answers(folder) == answers(runs / "one")


def answers(folder: Path) -> list[tuple[str, str]]:
    """Picture and predicted class of every test picture; probabilities differ in their last digit."""
    with (folder / "predictions.csv").open(encoding="utf-8") as file:
        return [(row["picture"], row["predicted"]) for row in csv.DictReader(file)]


def until(true, started: subprocess.Popen[str]) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + 300
    while not true():
        assert started.poll() is None, started.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Processes that `pid` has started and that are Python."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == pid and b"clipcil" in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except (OSError, ValueError):
                continue  # it has ended meanwhile
    return found
