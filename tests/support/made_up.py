"""Small trees in the layouts of the official datasets, made in a moment."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clipcil.data.dataset import open_dataset
from support.errors import one_line


def shared_data(name: str) -> Path:
    """Real pictures in the folder `$CLIPCIL_DATA`, or a skipped test."""
    root = os.environ.get("CLIPCIL_DATA")
    if not root or not (Path(root) / name).exists():
        pytest.skip(f"set CLIPCIL_DATA to a folder that holds {name}")
    return Path(root) / name


def picture(path: Path, seed: int = 0, size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, size)).save(path)
    return path


def pixels(seed: int, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def encoded(seed: int = 0, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(seed)).save(file, format=kind)
    return file.getvalue()


def class_tree(root: Path, classes: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(classes.items()):
        for index in range(count):
            picture(root / name / f"{index}.png", 1000 * number + index)
    return root


def cub_tree(root: Path, classes: int = 3, each: int = 5) -> Path:
    """CUB_200_2011/ with its text files; every second picture is for training."""
    home = root / "CUB_200_2011"
    names = [f"{c + 1:03}.Grey_{'abcdefgh'[c]}-tailed_Bird" for c in range(classes)]
    rows = [(c, i) for c in range(classes) for i in range(each)]
    for c, i in rows:
        picture(home / "images" / names[c] / f"Bird_{i}.jpg", c * each + i)
    write_lines(home / "classes.txt", [f"{c + 1} {name}" for c, name in enumerate(names)])
    write_lines(home / "images.txt", [f"{n + 1} {names[c]}/Bird_{i}.jpg" for n, (c, i) in enumerate(rows)])
    write_lines(home / "image_class_labels.txt", [f"{n + 1} {c + 1}" for n, (c, _) in enumerate(rows)])
    write_lines(home / "train_test_split.txt", [f"{n + 1} {i % 2}" for n, (_, i) in enumerate(rows)])
    return home


def imagenet_r_tree(root: Path, each: int = 5) -> Path:
    home = root / "imagenet-r"
    names = {"n01443537": "goldfish", "n01484850": "great_white_shark", "n02106662": "German_shepherd_dog"}
    for number, wnid in enumerate(names):
        for index in range(each):
            picture(home / wnid / f"art_{index}.jpg", 10 * number + index)
    write_lines(home / "README.txt", ["ImageNet-R", "", *(f"{w} {n}" for w, n in names.items()), "", "Citation: n/a"])
    return home


def write_lines(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_tar(path: Path, members: list[tarfile.TarInfo | tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def refused(dataset: str, words: str, root: Path | None, **options: object) -> None:
    """Opening the dataset ends in an error of one line that has `words` in it."""
    with one_line(words):
        open_dataset(dataset, root, options)
