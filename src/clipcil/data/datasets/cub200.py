"""`cub200`: CUB-200-2011, 200 birds, 11,788 pictures (Wah et al. 2011); the official folder or archive."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt

from clipcil.data.archives import find_archive, is_archive, unpack
from clipcil.data.dataset import Dataset, register
from clipcil.data.datasets.folder import picture_files
from clipcil.data.names import clean_name
from clipcil.data.splits import split_whole
from clipcil.errors import UserError
from clipcil.reading import read_text
from clipcil.settings import options

TEMPLATES = ("a photo of a {}, a type of bird.",)
"""The one sentence that OpenAI published for birds, and the only one of PROOF and ENGINE on this dataset."""
CLASSES, PICTURES = 200, 11_788
LISTS = ("images.txt", "image_class_labels.txt", "train_test_split.txt", "classes.txt")
_PUT = "put the official CUB_200_2011.tgz or the folder CUB_200_2011 unpacked from it there"


@options
class CubOptions:
    split: Literal["official", "random"] = "official"
    """official: 5,994 training pictures, 30 in most classes, and 5,794 test pictures; random: 80/20, as much of the
    field does."""
    split_seed: NonNegativeInt = 0
    """Seed of the random split."""
    test_share: Annotated[float, Field(ge=0.001, le=0.999)] = 0.2
    """Share of the test set in the random split."""
    check: bool = True
    """Refuse a dataset without the official 200 classes and 11,788 pictures."""


@register("cub200", "CUB-200-2011, 200 birds, 11,788 pictures", "CUB_200_2011.tgz or the folder in it", CubOptions)
def open_cub200(root: Path | None, options: CubOptions) -> Dataset:
    home = _find(root or Path("data/cub200"))
    images = _pairs(home / "images.txt")
    labels = _numbers(home / "image_class_labels.txt")
    official = _numbers(home / "train_test_split.txt")
    classes = _pairs(home / "classes.txt")
    if not images or not (images.keys() == labels.keys() == official.keys()):
        raise UserError(
            f"images.txt, image_class_labels.txt and train_test_split.txt of {home} name different pictures"
        )
    if options.check and (len(classes), len(images)) != (CLASSES, PICTURES):
        raise UserError(
            f"{home} lists {len(classes)} classes and {len(images)} pictures, but CUB-200-2011 has {CLASSES} and"
            f" {PICTURES}; set the data option check=no to use it all the same"
        )
    places = {number: index for index, number in enumerate(sorted(classes, key=int))}
    if wrong := [key for key, label in labels.items() if str(label) not in places]:
        raise UserError(
            f"{home / 'image_class_labels.txt'}: picture {wrong[0]} has class {labels[wrong[0]]}, not in classes.txt"
        )
    files = [home / "images" / name for name in images.values()]
    if missing := [path for path in files if not path.is_file()]:
        raise UserError(
            f"{len(missing)} pictures of CUB are missing, the first is {missing[0]}; unpack the archive again"
        )
    targets = torch.tensor([places[str(labels[key])] for key in images])
    if options.split == "official":
        is_test = torch.tensor([official[key] == 0 for key in images])
    else:
        is_test = split_whole(list(images.values()), options.test_share, options.split_seed)
    pictures = picture_files("cub200", home / "images", files, targets)
    # "001.Black_footed_Albatross" → "Black footed Albatross"
    names = [clean_name(classes[number].split(".", 1)[-1], hyphens=True) for number in places]
    learn, check = (pictures.subset(torch.nonzero(rows).flatten()) for rows in (~is_test, is_test))
    return Dataset("cub200", names, learn, check, TEMPLATES)


def _find(root: Path) -> Path:
    """The folder with images.txt: `root`, one in it, or one in the archive that `root` is or holds."""
    if is_archive(root):
        root = unpack(root)
    elif not root.is_dir():
        raise UserError(f"CUB-200-2011 is not in {root}: {_PUT}, or name another place with --data-root")
    elif not (homes := _homes(root)) and (archive := find_archive(root, "CUB_200_2011*")):
        root = unpack(archive)
    homes = _homes(root)
    if not homes:
        raise UserError(f"{root} has no images.txt of CUB-200-2011: {_PUT}, or name another place with --data-root")
    if missing := [name for name in (*LISTS, "images") if not (homes[0] / name).exists()]:
        raise UserError(f"{homes[0]} has no {missing[0]}; {_PUT}")
    return homes[0]


def _homes(root: Path) -> list[Path]:
    return [path.parent for path in (root / "images.txt", *sorted(root.glob("*/images.txt"))) if path.is_file()]


def _pairs(path: Path) -> dict[str, str]:
    """Lines of `number value`; blank lines are skipped."""
    pairs: dict[str, str] = {}
    for line, text in enumerate(read_text(path, links=True).splitlines(), 1):
        if not text.strip():
            continue
        number, *rest = text.split(maxsplit=1)
        value = rest[0].strip() if rest else ""
        if not _is_number(number) or not value or number in pairs:
            raise UserError(f"{path}, line {line}: '{text[:60]}' is not a number and a value that come once")
        if ".." in Path(value).parts or value.startswith("/"):
            raise UserError(f"{path}, line {line}: '{text[:60]}' leads out of the folder")
        pairs[number] = value
    return pairs


def _numbers(path: Path) -> dict[str, int]:
    pairs = _pairs(path)
    if wrong := [key for key, value in pairs.items() if not _is_number(value)]:
        raise UserError(f"{path}: '{wrong[0]} {pairs[wrong[0]][:60]}' is not two whole numbers")
    return {key: int(value) for key, value in pairs.items()}


def _is_number(word: str) -> bool:
    """Whether `word` is a whole number; Python would not read one of thousands of digits."""
    return word.isdecimal() and len(word) <= 20
