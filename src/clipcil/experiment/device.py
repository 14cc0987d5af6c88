"""Choosing the device, and Lightning Fabric for device and precision."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from clipcil.errors import UserError, first_line


def find_device(name: str) -> str:
    """`auto` → cuda, mps or cpu, the first that is there; another name stays as it is."""
    if name != "auto":
        return name
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def make_fabric(device: str, precision: str, devices: int = 1) -> Any:
    """A launched Fabric.

    Args:
        device: cpu, cuda, mps or auto.
        precision: 32-true, bf16-mixed or 16-mixed.
        devices: Number of devices.

    Raises:
        UserError: There is no such device or precision.
    """
    from lightning_fabric import Fabric

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fabric = Fabric(accelerator=find_device(device), devices=devices, precision=precision)  # type: ignore[arg-type,unused-ignore]
        except (ValueError, RuntimeError, TypeError) as error:
            raise UserError(f"device '{device}' with precision '{precision}': {first_line(error)}") from error
    fabric.launch()
    return fabric
