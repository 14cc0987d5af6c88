"""Choosing the device, and Lightning Fabric for device and precision."""

from __future__ import annotations

import logging
import warnings
from datetime import timedelta
from typing import Any

import torch

from clipcil.errors import UserError, first_line

TIMEOUT = 1800
"""Seconds that a process waits for the others before the run ends with an error."""


def find_device(name: str) -> str:
    """`auto` → cuda, mps or cpu, the first that is there; another name stays as it is."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def make_fabric(device: str, precision: str, devices: int = 1, nodes: int = 1) -> Any:
    """A launched Fabric.

    With several devices Fabric starts the other processes itself, by running the same command again, unless torchrun or
    Slurm has started them.

    Args:
        device: cpu, cuda, mps or auto.
        precision: 32-true, bf16-mixed or 16-mixed.
        devices: Number of devices of this machine.
        nodes: Number of machines.

    Raises:
        UserError: There is no such device or precision, or fewer devices.
    """
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy

    several: dict[str, Any] = {}
    if devices * nodes > 1:
        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)  # it announces every process
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)
        several = {"strategy": DDPStrategy(timeout=timedelta(seconds=TIMEOUT)), "num_nodes": nodes}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fabric = Fabric(accelerator=find_device(device), devices=devices, precision=precision, **several)  # type: ignore[arg-type,unused-ignore]
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"device '{device}' with precision '{precision}': {first_line(error)}") from error
        fabric.launch()
    return fabric
