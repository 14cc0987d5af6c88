"""`clipcil …` in a process forked from this one, which has imported everything already: a thousand take minutes."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from PIL import Image

PATIENCE = 300
"""Seconds after which a process is ended, by SIGALRM."""


def import_all() -> None:
    """Import what commands import late; with one thread, because threads do not survive a fork."""
    import lightning_fabric  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import torch

    import clipcil.classifier.export
    import clipcil.experiment.experiment
    import clipcil.report.page  # noqa: F401
    from clipcil.methods.registry import methods

    methods()
    torch.set_num_threads(1)


def write_colours(folder: Path, **classes: tuple[str, ...]) -> None:
    """A folder of plain pictures for each class, named by their colours."""
    for name, colours in classes.items():
        (folder / name).mkdir(parents=True)
        for colour in colours:
            Image.new("RGB", (32, 32), colour).save(folder / name / f"{colour}.png")


def start(words: list[str], folder: Path, first: Callable[[], object] = lambda: None) -> int:
    """Start `clipcil` with these words in `folder`, its output in the files `stdout` and `stderr` there.

    Returns the number of the process, in which `first` is called before the command.
    """
    files = [os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    process = os.fork()
    if process == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file, number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", 1, encoding="utf-8") for number in (1, 2))
        signal.alarm(PATIENCE)
        os.chdir(folder)
        first()
        os._exit(_run(words))
    for file in files:
        os.close(file)
    return process


def _run(words: list[str]) -> int:
    from clipcil.cli import main

    code = 0
    try:
        main(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def end(process: int, kill: bool = False) -> int:
    """Wait for a process, killing it first if told to; returns its exit code, negative for a signal."""
    if kill:
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def has_ended(process: int) -> bool:
    """Whether a process has ended; `end` still gives its code."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def run(words: list[str], folder: Path) -> None:
    """Run a command that must succeed."""
    if code := end(start(words, folder)):
        sys.exit(f"clipcil {words} ended with {code}: {(folder / 'stderr').read_text()}")
