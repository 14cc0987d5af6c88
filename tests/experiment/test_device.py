"""Processors that announce matrix instructions which they do not execute."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipcil.errors import UserError
from clipcil.training import device
from clipcil.training.device import avoid_broken_amx, find_device, make_fabric

VARIABLE = "ONEDNN_MAX_CPU_ISA"


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "")  # so that it comes back afterwards, whatever a test sets
    monkeypatch.delenv(VARIABLE)
    avoid_broken_amx.cache_clear()
    yield
    avoid_broken_amx.cache_clear()


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A processor that announces AMX; what a trial ends with is taken from the end of the list."""
    ends = [0]
    (tmp_path / "cpuinfo").write_text("flags : fpu avx512f amx_bf16 amx_tile amx_int8\n")
    monkeypatch.setattr(device, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(device.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, ends.pop()))
    return ends


@pytest.mark.parametrize(("end", "limit"), [(-signal.SIGILL, "AVX512_CORE_FP16"), (0, None), (1, None)])
def test_instructions_are_tried_once_in_a_process_and_avoided_where_they_fail(
    tried: list[int], end: int, limit: str | None
) -> None:
    """Those that work are used, and those that could not be tried."""
    tried.append(end)
    for _ in range(2):
        make_fabric("cpu", "bf16-mixed")
    assert os.environ.get(VARIABLE) == limit and tried == [0]


def test_nothing_is_tried_in_single_precision_with_the_variable_set_or_without_such_a_processor(
    tried: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_fabric("cpu", "32-true")
    monkeypatch.setenv(VARIABLE, "AVX2")
    avoid_broken_amx()
    assert os.environ[VARIABLE] == "AVX2"
    monkeypatch.delenv(VARIABLE)
    for text in ("flags : fpu avx2\n", None):  # None: no such file, as on macOS
        avoid_broken_amx.cache_clear()
        monkeypatch.setattr(device, "CPUINFO", tmp_path / "other" if text is None else tmp_path / "cpuinfo")
        (tmp_path / "cpuinfo").write_text(text or "amx_tile")
        avoid_broken_amx()
    assert tried == [0]


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
