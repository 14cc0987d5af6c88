"""Features the way the peers have them: computed from the picture files anew each time they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.data.pictures import PictureSet


class Live:
    """A tensor (N, dim) that does not exist: reading rows of it decodes and encodes those pictures.

    Functions that work row by row (normalise, scale, change the dtype) may be applied to it; they are applied to the
    rows when these are read. So a method's own training code runs on it unchanged, re-encoding every batch.
    """

    def __init__(self, fetch: Callable[[Tensor], Tensor], count: int, dim: int) -> None:
        self.fetch, self.shape, self.device = fetch, torch.Size((count, dim)), torch.device("cpu")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.fetch(torch.nonzero(rows).flatten() if rows.dtype == torch.bool else rows)

    def double(self) -> Live:
        return Live(lambda rows: self.fetch(rows).double(), *self.shape)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Live:
        like = next(value for value in args if isinstance(value, Live))

        def fetch(rows: Tensor) -> Tensor:
            result: Tensor = function(*(v.fetch(rows) if isinstance(v, Live) else v for v in args), **(kwargs or {}))
            return result

        return Live(fetch, *like.shape)


class LivePictures:
    """Rows of picture sets for a method to learn from, nothing kept. Threads decode, as the peers' loaders do."""

    def __init__(self, clip: CLIP, sets: Sequence[PictureSet], rows: Sequence[Tensor], labels: Tensor) -> None:
        self.clip, self.labels = clip, labels
        self._where = [(part, int(row)) for part, own in zip(sets, rows, strict=True) for row in own]
        self._pool = ThreadPoolExecutor(4)
        self.decoded = 0

    def __len__(self) -> int:
        return len(self._where)

    @property
    def features(self) -> Live:
        return Live(lambda rows: self.encode(rows).features, len(self), self.clip.config.dim)

    @property
    def pooled(self) -> Live:
        return Live(lambda rows: self.encode(rows).pooled, len(self), self.clip.config.vision.width)

    @torch.no_grad()
    def pixels(self, rows: Tensor) -> Tensor:
        def decode(row: int) -> Tensor:
            part, place = self._where[row]
            return self.clip.preprocess.picture(part.image(place))

        self.decoded += len(rows)
        batch = torch.stack(list(self._pool.map(decode, rows.tolist())))
        return self.clip.preprocess.finish(batch).half().float()  # rounded as the cache rounds, to compare the results

    @torch.no_grad()
    def encode(self, rows: Tensor) -> Any:
        return self.clip.vision(self.pixels(rows), class_only=True)

    def batches(self, size: int) -> Iterator[Any]:
        """For evaluation: one fresh pass gives all that is asked of a batch."""
        for rows in torch.split(torch.arange(len(self)), size):
            output = self.encode(rows)
            asked = {"features": output.features, "pooled": output.pooled, "levels": output.levels}
            yield SimpleNamespace(**asked, labels=self.labels[rows])
