"""Commands in processes of their own, and a limit on the size of files."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


def start(
    folder: Path, *words: str, module: Sequence[str] = ("clipcil",), group: bool = False
) -> subprocess.Popen[str]:
    """Start `python -m` with a module (and its own words) and further words, with `folder` as current directory.

    With `group` it has a process group of its own, as a terminal gives to a command.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", *module, *words]
    pipe = subprocess.PIPE

    def restore() -> None:
        """A background job has SIGINT ignored, one under nohup SIGHUP, and hands that on: here they are as a terminal
        has them."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    more = {"cwd": folder, "env": environment, "preexec_fn": restore, "start_new_session": group}
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **more)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel itself refuses to let any file grow beyond `size` bytes (Python ignores the signal)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
