"""Decoding threads in forked processes, where torch makes its own threads anew."""

from __future__ import annotations

import os
import subprocess
import sys

FORKS = 30
PROGRAM = """
import os, sys, threading
import torch
from clipcil.data import pictures

pictures.DECODING_THREADS = 16
torch.set_num_threads(16)
picture = torch.zeros(512, 512, 3, dtype=torch.uint8)

def convert(_):
    together.wait()
    return picture.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format).sum()

failed = 0
for _ in range(int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        together = threading.Barrier(16)
        try:
            with pictures.decoding_pool() as pool:
                list(pool.map(convert, range(16)))
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(1)
        os._exit(0)
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(f"{failed} of {sys.argv[1]} failed" if failed else 0)
"""


def test_threads_of_a_forked_process_set_torch_up_one_after_the_other() -> None:
    """Without that about a quarter of these children fail with "Invalid thread pool!"."""
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", PROGRAM, str(FORKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
