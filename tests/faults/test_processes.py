"""Real processes: killed, interrupted, terminated."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import start

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    child = start(tmp_path, "run", "coop", "--out", "my run", "--increment", "2", "--set", "train.epochs=500")
    assert child.stdout is not None
    assert "100 classes in 50 tasks" in child.stdout.readline()
    child.send_signal(number)
    child.send_signal(number)  # a second Ctrl-C, while the first is being seen to
    _, errors = child.communicate(timeout=120)
    assert errors == "clipcil: stopped; continue with: clipcil run --resume 'my run'\n"
    assert child.returncode == 130
    assert (tmp_path / "my run" / "config.toml").is_file()
    assert not list((tmp_path / "my run").rglob(".tmp"))


def test_runs_killed_at_random_moments_end_with_the_same_bytes(tmp_path: Path) -> None:
    """The short form of `tools/kill_test.py --kills 50`."""
    command = [sys.executable, str(ROOT / "tools/kill_test.py"), "--kills", "3", "--seed", "1"]
    command += ["--what", "runs", "--methods", "rapf"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^3 kills in (\d+) runs of 1 methods, \d+ s: (\d+) of \1 runs ended", done.stdout, re.M)
    assert found is not None, done.stdout
    assert found[1] == found[2]


def test_bad_input_is_refused_in_one_line_or_taken(tmp_path: Path) -> None:
    """The short form of `tools/fuzz.py --inputs 1000`."""
    command = [sys.executable, str(ROOT / "tools/fuzz.py"), "--inputs", "20", "--seed", "7"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^20 inputs \(seed 7\), \d+ s: .*; 0 failures$", done.stdout, re.M), done.stdout
