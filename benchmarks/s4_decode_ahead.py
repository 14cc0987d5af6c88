"""S4: decoding the next pictures while the trunk works, against one after the other."""

from __future__ import annotations

import tempfile
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness import Row, alternate, difference, versus
from clipcil.clip import CLIP, load_clip
from clipcil.data.dataset import open_dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.store import CHUNK, PixelStore


def jpegs(count: int, side: int) -> PictureSet:
    """Pictures whose decoding takes as long as a photo's: JPEGs of `side` pixels."""
    train, found = open_dataset("emoji", None, {}).train, []
    for index in range(count):
        file = BytesIO()
        train.image(index).resize((side, side)).save(file, "JPEG", quality=90)
        found.append(file.getvalue())
    return PictureSet("photos", found, torch.zeros(count, dtype=torch.int64), f"photos-{count}-{side}")


@torch.no_grad()
def in_turn(clip: CLIP, pictures: PictureSet) -> Tensor:
    done = []
    for rows in torch.split(torch.arange(len(pictures)), CHUNK):
        batch = torch.stack([clip.preprocess.picture(pictures.image(int(row))) for row in rows])
        done.append(clip.preprocess.finish(batch).half().float())
    return torch.cat(done)


def ahead(clip: CLIP, pictures: PictureSet) -> Tensor:
    with tempfile.TemporaryDirectory() as folder:
        store = PixelStore(pictures, clip.preprocess, Path(folder))
        return store.read(pictures, torch.arange(len(pictures)), lambda done, total: None)


def run(quick: bool) -> list[Row]:
    clip, pictures = load_clip("mini"), jpegs(*((CHUNK, 64) if quick else (6 * CHUNK, 500)))
    error = difference(ahead(clip, pictures), in_turn(clip, pictures))
    seconds = alternate({"theirs": lambda: in_turn(clip, pictures), "ours": lambda: ahead(clip, pictures)}, 3)
    step = f"decode {len(pictures)} JPEGs and pass the trunk; ours decodes ahead and writes the cache"
    return [versus("S4", step, seconds, error=error, tolerance=1e-3)]
