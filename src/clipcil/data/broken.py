"""Finding the pictures that cannot be decoded, so that a run may go on without them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet, decoding_pool
from clipcil.errors import UserError

BATCH = 1024


def drop_broken(
    dataset: Dataset, on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
) -> tuple[Dataset, list[str]]:
    """The dataset without the pictures that cannot be decoded, and a line for each of them.

    Every picture is decoded once to find out (and again when it is preprocessed for the first time). Labels and class
    names stay as they are; a class that loses its last training picture is reported when the stream is made.
    """
    total = len(dataset.train) + len(dataset.test)
    lines: list[str] = []
    kept: list[PictureSet] = []
    for before, pictures in ((0, dataset.train), (len(dataset.train), dataset.test)):
        broken = _broken(pictures, lambda done, start=before: on_progress("check", start + done, total))  # type: ignore[misc]
        lines += broken.values()
        if broken:
            whole = [row for row in range(len(pictures)) if row not in broken]
            pictures = pictures.subset(torch.tensor(whole, dtype=torch.int64))
        kept.append(pictures)
    return replace(dataset, train=kept[0], test=kept[1]), lines


def _broken(pictures: PictureSet, on_progress: Callable[[int], None]) -> dict[int, str]:
    def attempt(row: int) -> str | None:
        try:
            pictures.image(row)
        except UserError as error:
            return str(error)
        return None

    found: dict[int, str] = {}
    with decoding_pool() as pool:
        for start in range(0, len(pictures), BATCH):
            rows = range(start, min(start + BATCH, len(pictures)))
            for row, line in zip(rows, pool.map(attempt, rows), strict=True):
                if line is not None:
                    found[row] = line
            on_progress(rows.stop)
    return found
