"""Standard streams that are closed or full, and signals while Python still imports or already ends."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

NO_COMMAND = "clipcil: there is no command 'nothing'"


@pytest.mark.parametrize(
    ("words", "streams", "code", "out", "errors"),
    [
        ("--version", ">&- 2>&- <&-", 0, "", ""),
        ("--help", "2>&-", 0, "Usage: ", ""),
        ("--version", ">/dev/full", 2, "", "clipcil: "),
        ("--help", ">/dev/full 2>/dev/full", 2, "", ""),
        ("nothing", "", 2, "", NO_COMMAND),
        ("nothing", ">&- <&-", 2, "", NO_COMMAND),
        ("nothing", "2>&-", 2, "", ""),
        ("nothing", "2>/dev/full", 2, "", ""),
    ],
)
def test_streams(words: str, streams: str, code: int, out: str, errors: str, tmp_path: Path) -> None:
    """The error never goes to stdout, and one line is said or nothing. Not process 0 of several says its error, too."""
    command = f"exec {sys.executable} -m clipcil {words} {streams}"
    environment = {**os.environ, "RANK": "3"}
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.startswith(out) and bool(done.stdout) == bool(out)
    assert done.stderr.startswith(errors) and done.stderr.count("\n") == bool(errors)


@pytest.mark.parametrize("module", ["typing", "inspect", "cyclopts"])
def test_ctrl_c_while_python_imports(module: str, tmp_path: Path) -> None:
    """The module that is imported sends the signal. All are imported before a command runs."""
    (tmp_path / f"{module}.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nprint('went on')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "clipcil", "--version"]
    heed: Any = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
    done = subprocess.run(command, env=environment, preexec_fn=heed, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_last_line(number: signal.Signals) -> None:
    """It is sent while the process ends: the command has succeeded, and says no more."""
    code = f"import atexit, os; atexit.register(lambda: os.kill(os.getpid(), {number:d}))"
    command = [sys.executable, "-c", f"{code}; from clipcil.__main__ import main; main()", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")
