"""Real processes: killed, interrupted, terminated."""

import os
import re
import signal
import subprocess
import sys
import time
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


def test_a_closed_terminal_stops_a_grid_in_one_line(tmp_path: Path) -> None:
    """All its processes get the signal, also the one that Python starts beside the workers."""
    words = ["--methods", "coop", "--seeds", "2", "--jobs", "2", "--set", "train.epochs=500", "--out", "b"]
    child = start(tmp_path, "bench", *words, group=True)
    end = time.monotonic() + 120
    while len(list(tmp_path.glob("b/*/config.toml"))) < 2:
        assert child.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGHUP)
    _, errors = child.communicate(timeout=120)
    assert (child.returncode, errors) == (130, "clipcil: stopped after 0 of 2 runs; the same command continues\n")


def test_the_short_form_of_the_kill_test_finds_nothing(tmp_path: Path) -> None:
    words = ["--kills", "3", "--seed", "1", "--what", "runs", "--methods", "rapf"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    full = [sys.executable, str(ROOT / "tools" / "kill_test.py"), *words]
    done = subprocess.run(full, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^3 kills in (\d+) runs .* s: \1 of \1 runs", done.stdout, re.M), done.stdout
