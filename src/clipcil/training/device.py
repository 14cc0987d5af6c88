"""The device and the precision of a run, through Lightning Fabric."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from clipcil.clip.layers import linear
from clipcil.errors import UserError, first_line

Precision = Literal["auto", "32-true", "bf16-mixed", "16-mixed"]
TIMEOUT = timedelta(minutes=30)
"""How long a process waits for the others before the run ends with an error."""
CPUINFO = Path("/proc/cpuinfo")
HALF_FLAGS = {"avx512_bf16", "amx_bf16"}
"""The processor's instructions for products of bfloat16 numbers, as /proc/cpuinfo names them."""
HALF_GAIN = 1.5
"""How many times faster bf16-mixed must be for `auto` to take it."""
HALF_PRODUCT = "import torch; matrix = torch.ones(64, 64, dtype=torch.bfloat16); matrix @ matrix"


def find_device(name: str) -> str:
    """The device called `name`; `auto` is cuda where there is one, else cpu."""
    if name == "mps":
        raise UserError("Apple's GPU (mps) has no double precision, which most methods compute in; take --device cpu")
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def find_precision(name: Precision, device: str) -> Precision:
    """The precision called `name`; `auto` is bf16-mixed on a CPU that multiplies bfloat16 faster, else 32-true.

    A processor without instructions for it is not tried. The trial takes a few milliseconds.
    """
    if name != "auto":
        return name
    if find_device(device) != "cpu" or not CPUINFO.is_file() or not HALF_FLAGS & set(CPUINFO.read_text().split()):
        return "32-true"
    avoid_broken_amx()
    rows, weight = torch.ones(512, 384), torch.ones(1024, 384)
    seconds = {False: math.inf, True: math.inf}
    for half in (False, True) * 5:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            linear(rows, weight)
        seconds[half] = min(seconds[half], time.perf_counter() - start)
    return "bf16-mixed" if seconds[False] > HALF_GAIN * seconds[True] else "32-true"


def make_fabric(device: str, precision: Precision, devices: int = 1, nodes: int = 1) -> Any:
    """A launched Fabric: `devices` devices (cpu, cuda or auto) on each of `nodes` machines.

    With several devices Fabric starts the other processes itself, by running the same command again, unless torchrun or
    Slurm has started them. Parameters are in single precision in each of the three precisions.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    device, precision = find_device(device), find_precision(precision, device)
    _check_started(devices, nodes)
    if precision == "bf16-mixed" and device == "cpu":
        avoid_broken_amx()
    several: dict[str, Any] = {}
    if devices * nodes > 1:
        for name in ("lightning.fabric", "lightning_fabric"):
            logging.getLogger(name).setLevel(logging.WARNING)  # it announces every process
        several = {"strategy": DDPStrategy(timeout=TIMEOUT), "num_nodes": nodes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fabric = Fabric(accelerator=device, devices=devices, precision=precision, **several)
            fabric.launch()
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"device '{device}' with precision '{precision}': {first_line(error)}") from error
    return fabric


@contextmanager
def usual_torch(device: torch.device) -> Iterator[None]:
    """Compute inside as in a new process, whatever a notebook has set: float32, gradients, no mixed precision."""
    before, mixed = torch.get_default_dtype(), torch.is_autocast_enabled(device.type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_default_dtype(torch.float32)
    # Not by `torch.autocast`, which would keep weights that a block inside casts until this one ends.
    torch.set_autocast_enabled(device.type, False)
    torch.set_autocast_cache_enabled(cached and not mixed)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        torch.set_autocast_enabled(device.type, mixed)
        torch.set_default_dtype(before)


@cache
def avoid_broken_amx() -> None:
    """Keep oneDNN from matrix instructions (AMX) that this machine announces but does not execute.

    On some virtual machines a product of bfloat16 matrices ends the process with an illegal instruction. Where AMX is
    announced, another process tries one, which takes two seconds. oneDNN reads the variable when it is first used.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not CPUINFO.is_file() or "amx_tile" not in CPUINFO.read_text():
        return
    tried = subprocess.run([sys.executable, "-c", HALF_PRODUCT], capture_output=True, check=False)
    if tried.returncode == -signal.SIGILL:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # the most there is without AMX


def _check_started(devices: int, nodes: int) -> None:
    """Refuse a wrong number of processes from torchrun or srun: more would run alone, fewer would wait for others."""
    by, started = "torchrun", os.environ.get("WORLD_SIZE") if torch.distributed.is_torchelastic_launched() else None
    if started is None:
        by, started = "srun", os.environ.get("SLURM_STEP_NUM_TASKS")
    if started not in (None, str(devices * nodes)):
        have = f"--devices {devices} (on each machine) and --nodes {nodes}"
        raise UserError(f"{by} started {started} processes, but the run has {have}; make them agree")
