"""The training pictures: four public sets below a folder that the user names, and their trunk outputs.

The outputs of the trunk are kept in shards of 512 pictures, two views of each, (2, width, 4, 4) in half precision. A
shard that is there is not made again, so a killed process continues where it was.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.errors import UserError
from clipcil.storage import whole_file
from reproduce.mini.lite import Lite

SHARD, AT_ONCE = 512, 32
USED = 30_000
"""The vision tower learns from so many of the shuffled list."""
_CLASSES = {
    "tiny-imagenet": ("tiny-imagenet-200/train", 200),
    "cifar-10": ("train", 800),
    "caltech-101": ("101_ObjectCategories", 1000),
}
"""Where the folders of classes are, and how many pictures of a class are taken."""
_SMALL = {"tiny-imagenet": (32,), "cifar-10": (), "caltech-101": (32, 64), "flickr8k": (32, 64)}


@dataclass(frozen=True)
class Picture:
    """One picture: its file (relative to the folder of pictures), its set, and its label or captions."""

    file: str
    source: str
    label: str
    """Tiny-ImageNet: the WordNet id; CIFAR-10 and Caltech-101: the class; Flickr8k: the captions, one a line."""


def listing(folder: Path, seed: int) -> list[Picture]:
    """Every picture of the four sets below `folder`, shuffled."""
    rng = random.Random(seed)
    found = [picture for source in _CLASSES for picture in _classes(folder, source, rng)]
    found += _flickr(folder / "flickr8k", folder)
    rng.shuffle(found)
    return found


def _classes(folder: Path, source: str, rng: random.Random) -> Iterator[Picture]:
    inside, per_class = _CLASSES[source]
    root = folder / source / inside
    if not root.is_dir():
        raise UserError(f"no pictures in {root}; unpack {source} there, see reproduce/mini/README.md")
    for group in sorted(path for path in root.iterdir() if path.is_dir()):
        if group.name in ("BACKGROUND_Google", "Faces_easy"):  # no subject; the same pictures as Faces, cropped
            continue
        files = sorted(path for path in group.rglob("*") if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
        for file in rng.sample(files, min(per_class, len(files))):
            yield Picture(str(file.relative_to(folder)), source, group.name)


def _flickr(root: Path, folder: Path) -> Iterator[Picture]:
    captions: dict[str, list[str]] = {}
    for line in (root / "Flicker8k_text" / "Flickr8k.token.txt").read_text(encoding="utf-8").splitlines():
        name, caption = line.split("\t")
        captions.setdefault(name.split("#")[0], []).append(caption.strip())
    for name, texts in sorted(captions.items()):
        file = root / "Flicker8k_Dataset" / name
        if file.is_file():
            yield Picture(str(file.relative_to(folder)), "flickr8k", "\n".join(texts))


def views(image: Image.Image, source: str, rng: random.Random) -> list[Image.Image]:
    """Two views: cropped and mirrored at random, the second reduced to the size of a small dataset's pictures."""
    whole, small = _moved(image, rng), _moved(image, rng)
    if sizes := _SMALL[source]:
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


def fill(pictures: Sequence[Picture], folder: Path, lite: Lite, out: Path, seed: int) -> int:
    """Write the shards that are missing; returns how many pictures were computed."""
    out.mkdir(parents=True, exist_ok=True)
    trunk = lite.trunk()
    student = Preprocess(Steps.from_trunk(lite.spec), trunk)
    width = lite.spec["blocks"][-1]["out"]  # behind these channels the trunk packs averages
    done = 0
    for shard, first in enumerate(range(0, len(pictures), SHARD)):
        file = out / f"{shard:04d}.npy"
        if file.exists():
            continue
        chosen = pictures[first : first + SHARD]
        seen = []
        for start in range(0, len(chosen), AT_ONCE):
            both: list[Tensor] = []
            for index, picture in enumerate(chosen[start : start + AT_ONCE], start):
                with Image.open(folder / picture.file) as opened:
                    image = opened.convert("RGB")
                rng = random.Random(f"{seed} {shard} {index}")
                both += [student.picture(view) for view in views(image, picture.source, rng)]
            seen.append(trunk(torch.stack(both))[:, :width].half().unflatten(0, (-1, 2)))
        with whole_file(file) as half, half.open("wb") as stream:
            np.save(stream, torch.cat(seen).numpy())
        done += len(chosen)
    return done
