"""A reader whose pictures are decoded and encoded by actors on Ray."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.cluster import connect
from clipcil.data.pictures import PictureSet, decode
from clipcil.data.reader import BLOCK, Reader, _Encoded
from clipcil.errors import UserError


class RayReader(Reader):
    """Encodes blocks of pictures on a pool of Ray actors; everything else as `Reader`.

    A picture travels as its path where it is a file (which every node must be able to read), else as its bytes. The
    backbone is sent to the actors once for each version of the vision tower.
    """

    def __init__(
        self,
        clip: CLIP,
        cache: Any,
        device: Any = "cpu",
        *,
        address: str | None = None,
        actors: int = 2,
        gpus: float = 0,
    ) -> None:
        super().__init__(clip, cache, device)
        self._ray = connect(address, num_cpus=actors)
        remote = self._ray.remote(num_cpus=1, num_gpus=gpus)(_Encoder)
        self._actors = [remote.remote("cuda" if gpus else "cpu") for _ in range(actors)]
        self._sent = ""

    @torch.no_grad()
    def _encode(self, table: _Encoded, pictures: PictureSet, blocks: list[int]) -> None:
        if self._sent != self.clip.version:
            clip = self._ray.put(self.clip)
            self._ray.get([actor.use.remote(clip) for actor in self._actors])
            self._sent = self.clip.version
        pool = importlib.import_module("ray.util").ActorPool(self._actors)
        work = [(block, list(range(block * BLOCK, min((block + 1) * BLOCK, len(pictures))))) for block in blocks]
        things = [(block, [(pictures.pictures[int(pictures.rows[row])], pictures.describe(row)) for row in rows])
                  for block, rows in work]  # fmt: skip
        places = dict(work)
        for done, result in enumerate(
            pool.map_unordered(lambda actor, part: actor.encode.remote(*part), things), start=1
        ):
            block, features, levels, error = result
            if error:
                raise UserError(error)
            rows = torch.tensor(places[block])
            table.features[rows], table.levels[rows] = features.to(self.device), levels.to(self.device)
            table.done[block] = table.levels_done[block] = True
            self.counts.encoded += len(rows)
            self.on_progress("encode", done, len(blocks))

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)
        super().close()


class _Encoder:
    """An actor that decodes, preprocesses and encodes pictures."""

    def __init__(self, device: str) -> None:
        self.device = device

    def use(self, clip: CLIP) -> None:
        """Encode with this backbone from now on."""
        self.clip = clip.to(self.device)

    @torch.no_grad()
    def encode(self, block: int, things: list[tuple[Any, str]]) -> tuple[int, Tensor, Tensor, str]:
        """Features and levels of the pictures of a block, or the reason why one of them cannot be read."""
        try:
            ready = [self.clip.preprocess.picture(decode(thing, name)) for thing, name in things]
        except UserError as error:
            return block, torch.empty(0), torch.empty(0), str(error)
        # Through half precision, as in the cache on disk.
        pixels = self.clip.preprocess.finish(torch.stack(ready)).half().float().to(self.device)
        output = self.clip.vision(pixels, class_only=True)
        return block, output.features.float().cpu(), output.levels.float().cpu(), ""
