"""From cached block outputs to what the vision tower learns from: reduced patches, and the trunk's own knowledge."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from reproduce.mini.cache import SHARD, head
from reproduce.mini.lite import Lite
from reproduce.mini.pictures import Picture
from reproduce.mini.texts import Corpus
from reproduce.mini.vision import Lessons


def reduction(lite: Lite, shards: Sequence[Path], width: int) -> tuple[Tensor, Tensor]:
    """Kernel (width, 1280) and bias: the principal axes of the pooled head output, each divided by the square root of
    its deviation. Between none and full whitening: the nearest class mean gains 2 to 3 points by it.
    """
    sample = torch.cat([_pool(lite, torch.from_numpy(np.load(file)[:, 0])) for file in shards]).double()
    mean = sample.mean(0)
    spread, axes = torch.linalg.eigh((sample - mean).T @ (sample - mean) / len(sample))
    spread = spread.clamp(min=1e-4 * float(spread.max()))  # an axis that few pictures move is not amplified
    kernel = axes.flip(1)[:, :width].T / spread.flip(0)[:width, None].pow(0.25)
    return kernel.float(), (-kernel @ mean).float()


def read(
    lite: Lite, reduce: tuple[Tensor, Tensor], shards: Sequence[Path], pictures: Sequence[Picture], corpus: Corpus
) -> Lessons:
    """All shards there are, through head and reduction."""
    kernel, bias = reduce
    weight, offset = lite.classifier
    patches, pooled, logits, chosen = [], [], [], []
    for file in shards:
        blocks = torch.from_numpy(np.load(file))
        first = int(file.stem) * SHARD
        chosen += pictures[first : first + len(blocks)]  # the last shard may end before the list does
        wide = torch.cat([head(lite, part.float()) for part in blocks.flatten(0, 1).split(64)])
        small = torch.einsum("oc,bchw->bohw", kernel, wide) + bias[:, None, None]
        mean = wide.mean((2, 3))[::2]
        patches.append(small.half().unflatten(0, (-1, 2)))
        pooled.append(F.normalize(mean @ kernel.T + bias, dim=-1).half())
        logits.append((mean @ weight.T + offset).half())
    order = list(corpus.classes)
    index = {name: position for position, name in enumerate(order)}
    label = torch.tensor([index.get(picture.label, -1) for picture in chosen])
    names = torch.stack([corpus.classes[name] for name in order])
    nothing = torch.zeros(names.shape[1])
    caption = torch.stack([corpus.captions.get(picture.label.split("\n")[0], nothing) for picture in chosen])
    return Lessons(torch.cat(patches), torch.cat(pooled), torch.cat(logits), label, caption, names)


def _pool(lite: Lite, blocks: Tensor) -> Tensor:
    return torch.cat([head(lite, part.float()).mean((2, 3)) for part in blocks.split(64)])
