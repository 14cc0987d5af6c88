"""Choosing the device, and Lightning Fabric for device and precision."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch

from clipcil.errors import UserError, first_line

TIMEOUT = 1800
"""Seconds that a process waits for the others before the run ends with an error."""
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
"""Those in which parameters stay in single precision; Fabric has others, for modules that it has set up itself."""
CPUINFO = Path("/proc/cpuinfo")
HALF_PRODUCT = "import torch; matrix = torch.ones(64, 64, dtype=torch.bfloat16); matrix @ matrix"


def find_device(name: str) -> str:
    """`auto` → cuda where there is one, else cpu; another name stays as it is.

    Raises:
        UserError: It is Apple's GPU, on which statistics, heads and memories in double precision cannot lie.
    """
    if name == "mps":
        raise UserError("Apple's GPU (mps) has no double precision, which most methods compute in; take --device cpu")
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def make_fabric(device: str, precision: str, devices: int = 1, nodes: int = 1) -> Any:
    """A launched Fabric.

    With several devices Fabric starts the other processes itself, by running the same command again, unless torchrun or
    Slurm has started them.

    Args:
        device: cpu, cuda or auto.
        precision: 32-true, bf16-mixed or 16-mixed.
        devices: Number of devices of this machine.
        nodes: Number of machines.

    Raises:
        UserError: There is no such device or precision, or fewer devices, or another number of processes was started.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    if precision not in PRECISIONS:
        known = ", ".join(PRECISIONS)
        raise UserError(f"device '{device}' with precision '{precision}': the precision must be one of {known}")
    _check_started(devices, nodes)
    if precision == "bf16-mixed" and find_device(device) == "cpu":
        avoid_broken_amx()
    several: dict[str, Any] = {}
    if devices * nodes > 1:
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # it announces every process
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
        several = {"strategy": DDPStrategy(timeout=timedelta(seconds=TIMEOUT)), "num_nodes": nodes}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fabric = Fabric(accelerator=find_device(device), devices=devices, precision=precision, **several)  # type: ignore[arg-type,unused-ignore]
            fabric.launch()
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"device '{device}' with precision '{precision}': {first_line(error)}") from error
    return fabric


@contextmanager
def usual_torch(device: torch.device) -> Iterator[None]:
    """Compute inside as in a new process: in float32 by default, with gradients, without mixed precision on `device`.

    A notebook may have set any of these for what else it does; its settings are back afterwards.
    """
    before, mixed = torch.get_default_dtype(), torch.is_autocast_enabled(device.type)
    cached = torch.is_autocast_cache_enabled()
    torch.set_default_dtype(torch.float32)
    # Not by `torch.autocast`: weights that a block inside casts would be kept until this one ends, trained or not.
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
    """Keep oneDNN from matrix instructions (AMX) that this machine announces and does not execute.

    Some virtual machines do so, and a product of bfloat16 matrices ends the process there with an illegal instruction.
    Where the processor announces AMX, a process of its own tries such a product, which takes about two seconds. oneDNN
    reads the variable when it is first used, so this has to come before; one that is set already is left alone.
    """
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not CPUINFO.is_file() or "amx_tile" not in CPUINFO.read_text():
        return
    tried = subprocess.run([sys.executable, "-c", HALF_PRODUCT], capture_output=True, check=False)
    if tried.returncode == -signal.SIGILL:
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_FP16"  # the most there is without AMX


def _check_started(devices: int, nodes: int) -> None:
    """Refuse where torchrun or srun has started more or fewer processes than the run is told to have.

    More would each do the run alone, into one folder; fewer would wait for the others.
    """
    by, started = "torchrun", os.environ.get("WORLD_SIZE") if torch.distributed.is_torchelastic_launched() else None
    if started is None:
        by, started = "srun", os.environ.get("SLURM_STEP_NUM_TASKS")
    if started is not None and started != str(devices * nodes):
        raise UserError(
            f"{by} started {started} processes, but the run has --devices {devices} and --nodes {nodes};"
            " --devices is the number of processes on each machine"
        )
