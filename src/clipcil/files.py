"""Names of 0.2.0 for functions of `storage`, until every room imports them from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clipcil.storage import *  # noqa: F403


def sweep_parts(folder: Path, owns: Callable[[str], bool]) -> None:
    """Half-written files are in `.tmp/`, which `run_lock` deletes."""


def part_names(folder: Path, owns: Callable[[str], bool]) -> set[str]:
    """Half-written files are in `.tmp/`, which `run_lock` deletes."""
    return set()
