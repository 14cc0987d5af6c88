"""Small lessons: emoji as folders, plain colours, settings that train for a moment, and commands that are refused."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipcil.cli import main
from clipcil.data.dataset import Dataset, open_dataset

COLOURS = ("red", "green", "blue", "white", "black", "orange")
FAST: dict[str, Any] = {"stage1": {"epochs": 1, "lr": 1e-4}, "stage2": {"epochs": 4, "steps": 0}, "prompt_length": 2}


@cache
def emoji() -> Dataset:
    return open_dataset("emoji")


def pictures(names: list[str], test: bool = False) -> dict[str, list[Image.Image]]:
    data = emoji()
    part = data.test if test else data.train
    rows = {name: (part.labels == data.classes.index(name)).nonzero().flatten().tolist() for name in names}
    return {name: [part.image(row) for row in found] for name, found in rows.items()}


def write_tree(root: Path, classes: dict[str, list[Image.Image]]) -> Path:
    for name, images in classes.items():
        (root / name).mkdir(parents=True)
        for place, image in enumerate(images):
            image.save(root / name / f"{place}.png")
    return root


def flat(classes: dict[str, list[Image.Image]]) -> list[Image.Image]:
    return [image for images in classes.values() for image in images]


def plain(*colours: str) -> list[Image.Image]:
    return [Image.new("RGB", (32, 32), colour) for colour in colours]


def week(folder: Path) -> Path:
    return write_tree(folder, {"green": plain("green", "lime"), "grey": plain("grey", "silver")})


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1, said
    return said
