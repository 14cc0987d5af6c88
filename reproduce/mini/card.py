"""The model card: what the backbone is, how it was made, and the figures that were measured on it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import torch

from reproduce.mini.measure import Figures, line
from reproduce.mini.sources import NPM, PYPI

TEXT = Path(__file__).with_name("card.md")


def write(file: Path, now: Sequence[Figures], before: Sequence[Figures] = ()) -> None:
    """Fill `card.md` of this folder with the figures and the versions."""
    heads = "| pictures | test | nearest class mean | zero-shot | zero-shot, top 5 |\n|---|---|---|---|---|\n"
    table = heads + "\n".join(line(row) for row in now)
    if before:
        table += "\n\nThe backbone before it, by the same command:\n\n" + heads + "\n".join(line(row) for row in before)
    packages = ", ".join(f"{name} {version}" for name, version in {**PYPI, **NPM}.items())
    sizes = {path.name: path.stat().st_size / 1e6 for path in file.parent.glob("*.safetensors")}
    text = TEXT.read_text(encoding="utf-8").format(
        figures=table,
        packages=packages,
        megabytes=f"{sum(sizes.values()):.1f}",
        torch=torch.__version__.split("+")[0],
        date=datetime.date.today().isoformat(),
    )
    file.write_text(text, encoding="utf-8")
