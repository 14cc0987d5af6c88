"""The pictures to learn from: four public sets below a folder the user names, shuffled, and the views of each."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from clipcil.errors import UserError

USED = 30_000
"""The vision tower learns from so many of the shuffled list."""
PER_CLASS = {"tiny-imagenet": 200, "cifar-10": 800, "caltech-101": 1000}
_SMALL = {"tiny-imagenet": (32,), "cifar-10": (), "caltech-101": (32, 64), "flickr8k": (32, 64)}


@dataclass(frozen=True)
class Picture:
    """One picture: its file (relative to the folder of pictures), its set, and its label or captions."""

    file: str
    source: str
    label: str
    """Tiny-ImageNet: the WordNet id; CIFAR-10 and Caltech-101: the class; Flickr8k: the captions, one a line."""


def listing(folder: Path, seed: int, per_class: dict[str, int] = PER_CLASS) -> list[Picture]:
    """Every picture of the sets below `folder` (tiny-imagenet, cifar-10, caltech-101, flickr8k), shuffled.

    Raises:
        UserError: If a set is missing.
    """
    rng = random.Random(seed)
    found = [*_classes(folder, "tiny-imagenet", "tiny-imagenet-200/train", rng, per_class)]
    found += _classes(folder, "cifar-10", "train", rng, per_class)
    found += _classes(folder, "caltech-101", "101_ObjectCategories", rng, per_class)
    found += _flickr(folder / "flickr8k", folder)
    rng.shuffle(found)
    return found


def _classes(
    folder: Path, source: str, inside: str, rng: random.Random, per_class: dict[str, int]
) -> Iterator[Picture]:
    root = folder / source / inside
    if not root.is_dir():
        raise UserError(f"no pictures in {root}; unpack {source} there, see reproduce/mini/README.md")
    for group in sorted(path for path in root.iterdir() if path.is_dir()):
        if group.name in ("BACKGROUND_Google", "Faces_easy"):  # no subject; the same pictures as Faces, cropped
            continue
        files = sorted(path for path in group.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
        for file in rng.sample(files, min(per_class[source], len(files))):
            yield Picture(str(file.relative_to(folder)), source, group.name)


def _flickr(root: Path, folder: Path) -> Iterator[Picture]:
    captions: dict[str, list[str]] = {}
    lines = (root / "Flicker8k_text" / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        name, caption = line.split("\t")
        captions.setdefault(name.split("#")[0], []).append(caption.strip())
    for name, texts in sorted(captions.items()):
        file = root / "Flicker8k_Dataset" / name
        if file.is_file():
            yield Picture(str(file.relative_to(folder)), "flickr8k", "\n".join(texts))


def views(image: Image.Image, source: str, rng: random.Random) -> list[Image.Image]:
    """Two views: cropped and mirrored at random, the second reduced to the size of a small dataset's pictures."""
    sizes = _SMALL[source]
    whole, small = _moved(image, rng), _moved(image, rng)
    if sizes:
        side = rng.choice(sizes)
        small = small.resize((side, side), Image.Resampling.BICUBIC)
    return [whole, small]


def _moved(image: Image.Image, rng: random.Random) -> Image.Image:
    if rng.random() < 0.5:
        scale = rng.uniform(0.7, 1.0)
        wide, high = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
        left, top = rng.randint(0, image.width - wide), rng.randint(0, image.height - high)
        image = image.crop((left, top, left + wide, top + high))
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else image
