"""Trunk outputs, computed once: two views of each picture, (2, width, 4, 4) in half precision.

Shards of 512 pictures; a shard that is there is not made again, so several processes may share the work
(`--part 0 --parts 2`), and a killed one goes on where it was.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipcil.clip.preprocess import Preprocess, Steps
from reproduce.mini.lite import Lite
from reproduce.mini.pictures import Picture, views

SHARD = 512
_AT_ONCE = 32


def head(lite: Lite, blocks: Tensor) -> Tensor:
    """(B, width, h, w) → (B, 1280, h, w): the head's convolution and ReLU6."""
    kernel, bias = lite.head
    return torch.einsum("oc,bchw->bohw", kernel, blocks).add_(bias[:, None, None]).clamp_(0.0, 6.0)


def fill(pictures: list[Picture], folder: Path, lite: Lite, out: Path, seed: int, part: int = 0, parts: int = 1) -> int:
    """Write the shards of this part that are missing; returns how many pictures were computed."""
    out.mkdir(parents=True, exist_ok=True)
    trunk = lite.trunk()
    student = Preprocess(Steps.from_trunk(lite.spec), trunk)
    width = lite.spec["blocks"][-1]["out"]  # behind these channels the trunk packs averages
    done = 0
    for shard in range(part, -(-len(pictures) // SHARD), parts):
        file = out / f"{shard:04d}.npy"
        if file.exists():
            continue
        chosen = pictures[shard * SHARD : (shard + 1) * SHARD]
        seen = []
        for start in range(0, len(chosen), _AT_ONCE):
            both: list[Tensor] = []
            for index, picture in enumerate(chosen[start : start + _AT_ONCE], start):
                with Image.open(folder / picture.file) as opened:
                    image = opened.convert("RGB")
                rng = random.Random(f"{seed} {shard} {index}")
                both += [student.picture(view) for view in views(image, picture.source, rng)]
            seen.append(trunk(torch.stack(both))[:, :width].half().unflatten(0, (-1, 2)))
        half = file.with_suffix(f".{os.getpid()}.npy")
        np.save(half, torch.cat(seen).numpy())
        half.rename(file)
        done += len(chosen)
    return done
