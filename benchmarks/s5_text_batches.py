"""S5: many texts of different lengths: batches as they come against batches sorted by length."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.harness import Row, alternate, difference, versus
from benchmarks.shapes import names
from clipcil.clip import CLIP, load_clip


@torch.no_grad()
def as_they_come(clip: CLIP, texts: list[str], size: int) -> Tensor:
    parts = []
    for start in range(0, len(texts), size):
        ids, ends = clip.tokenizer(texts[start : start + size])
        parts.append(clip.text(clip.text.embed(ids), ends))
    return torch.cat(parts)


def run(quick: bool) -> list[Row]:
    clip = load_clip("mini")
    sentences = ("{}", "a photo of a {}.", "a {} with a long tail, bright eyes and many small dark spots on its back")
    texts = [sentences[i % 3].format(name) for i, name in enumerate(names(60 if quick else 3000))]
    size = 16 if quick else 256
    error = difference(clip.encode_texts(texts), as_they_come(clip, texts, size))
    sides = {"theirs": lambda: as_they_come(clip, texts, size), "ours": lambda: clip.encode_texts(texts)}
    seconds = alternate(sides, 3)
    return [
        versus("S5", f"{len(texts)} texts of 3 to 20 words, sorted by length", seconds, error=error, tolerance=1e-5)
    ]
