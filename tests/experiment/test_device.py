"""Precision on a processor: instructions that it announces and does not execute, and where bfloat16 is faster."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clipcil.errors import UserError
from clipcil.experiment.experiment import Experiment
from clipcil.training import device
from clipcil.training.device import avoid_broken_amx, find_device, find_precision, make_fabric

VARIABLE = "ONEDNN_MAX_CPU_ISA"
AMX = "flags : fpu avx512f amx_bf16 amx_tile amx_int8"


@pytest.mark.parametrize(
    ("end", "precision", "announced", "limit"),
    [
        (-signal.SIGILL, "bf16-mixed", AMX, "AVX512_CORE_FP16"),
        (0, "bf16-mixed", AMX, None),
        (1, "bf16-mixed", AMX, None),  # instructions that could not be tried are used
        (None, "32-true", AMX, None),  # None: nothing is tried
        (None, "bf16-mixed", AMX, "AVX2"),  # the variable is set
        (None, "bf16-mixed", "flags : fpu avx2", None),
        (None, "bf16-mixed", "", None),  # no such file, as on macOS
    ],
)
def test_instructions_are_tried_once_in_a_process_and_avoided_where_they_fail(
    end: int | None, precision: Any, announced: str, limit: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ends = [end]
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, ends.pop()))
    monkeypatch.setenv(VARIABLE, limit or "")  # so that it comes back afterwards
    if end is not None or limit is None:
        monkeypatch.delenv(VARIABLE)
    if announced:
        (tmp_path / "cpuinfo").write_text(announced)
    avoid_broken_amx.cache_clear()
    for _ in range(2):
        make_fabric("cpu", precision)
    avoid_broken_amx.cache_clear()
    assert os.environ.get(VARIABLE) == limit and ends == ([None] if end is None else [])


@pytest.mark.parametrize(
    ("flags", "slower", "found"),
    [
        ("avx512f avx512_bf16", 3, "bf16-mixed"),
        ("avx512f amx_bf16", 3, "bf16-mixed"),
        ("avx512f avx512_bf16", 1, "32-true"),
        ("avx512f avx2", 3, "32-true"),  # never tried
        ("", 3, "32-true"),  # no such file
    ],
)
def test_half_precision_is_taken_where_the_processor_is_faster_with_it(
    flags: str, slower: int, found: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Products in single precision take `slower` times as long."""
    ticks = itertools.accumulate(itertools.cycle([0, slower, 0, 1]))
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(ticks))
    if flags:
        (tmp_path / "cpuinfo").write_text(f"flags : {flags}\n")
    assert find_precision("auto", "cpu") == found
    assert find_precision("16-mixed", "cpu") == "16-mixed"
    assert Experiment("zero-shot", precision="auto", device="cpu").table["run"]["precision"] == found


def test_half_precision_works_on_this_machine() -> None:
    program = (
        "import torch; from clipcil.training.device import make_fabric; make_fabric('cpu', 'bf16-mixed');"
        " matrix = torch.ones(64, 64, dtype=torch.bfloat16); assert (matrix @ matrix)[0, 0] == 64"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_apple_s_gpu_has_no_double_precision_and_is_never_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert find_device("auto") == "cpu"
    for ask in (find_device, lambda name: make_fabric(name, "32-true")):
        with pytest.raises(UserError, match=r"no double precision.*--device cpu"):
            ask("mps")
