"""Models of plain colours, lessons of a moment, and commands that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from clipcil.cli import main


def plain(*colours: str) -> list[Image.Image]:
    return [Image.new("RGB", (32, 32), colour) for colour in colours]


def week(folder: Path) -> Path:
    for name, colours in (("green", ("green", "lime")), ("grey", ("grey", "silver"))):
        (folder / name).mkdir(parents=True)
        for place, image in enumerate(plain(*colours)):
            image.save(folder / name / f"{place}.png")
    return folder


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1, said
    return said
