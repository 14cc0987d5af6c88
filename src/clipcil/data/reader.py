"""From pictures to tensors, each step done once.

A picture is decoded and preprocessed once per machine (`cache.py`) and encoded once per version of the vision tower: in
memory, and in a store that runs share (`tensor_store.py`), where the tower is frozen or runs share trained towers. A
batch gives its `pixels` or its `features` when asked, so a method with a frozen tower never decodes or encodes a
picture twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.clip.vision import VisionOutput
from clipcil.data.cache import PixelStore, pixels_key
from clipcil.data.pictures import PictureSet
from clipcil.distributed import gather, share, world_size
from clipcil.errors import UserError
from clipcil.tensor_store import TensorStore, content_key

MOST_FEATURE_BYTES = 2 * 2**30
"""Maximum bytes of features that runs share in memory; above it all are dropped before the next run."""
FEATURES = 1
"""Changed where the same tower gives other features or depths, so that those on disk are made again."""
TOWER_BATCH = 128
"""Pictures per tower pass. Always whole blocks at fixed places, so that features have the same bits however and
whenever they are asked for (a resumed run asks in another order than the run it continues)."""


@dataclass
class FeatureTable:
    """Features and levels of a picture set by one version of the tower, filled block by block."""

    version: str
    features: Tensor
    levels: Tensor
    done: set[int] = field(default_factory=set)
    """Blocks that were encoded."""
    keys: dict[str, str] = field(default_factory=dict)
    """Keys in the store of "features" and "levels", once they were asked for; empty where nothing is to be saved."""
    found: set[str] = field(default_factory=set)
    """Which of "features" and "levels" come from the store."""


class Reader:
    """Preprocesses and encodes pictures for one CLIP, and keeps the results.

    Args:
        clip: The backbone.
        cache: Folder of preprocessed pictures; None: temporary files.
        device: Where batches are.
        shared: Whether several runs use this reader.
        store: Keeps features for other runs.
        half: Encode with products of bfloat16 numbers.
    """

    def __init__(
        self,
        clip: CLIP,
        cache: Path | None,
        device: torch.device | str = "cpu",
        shared: bool = False,
        store: TensorStore | None = None,
        half: bool = False,
    ) -> None:
        self.clip, self.cache, self.shared, self.store, self.half = clip, cache, shared, store, half
        self.device = torch.device(device)
        self.passed = 0
        """Number of pictures that passed the tower."""
        self.on_progress: Callable[[str, int, int], None] = lambda what, done, total: None
        self._stores: dict[str, PixelStore] = {}
        self._tables: dict[str, FeatureTable] = {}
        self._tower: tuple[str, str] = ("", "")

    def open(self, pictures: PictureSet, gate: Gate | None = None) -> Pictures:
        """All pictures of a set; with a `gate`, until it is closed."""
        return Pictures(self, pictures, torch.arange(len(pictures)), gate or Gate())

    def pixels(self, pictures: PictureSet, rows: Tensor) -> Tensor:
        """(B, C, H, W) float32 preprocessed pictures on the reader's device."""
        store = self._stores.get(pictures.identity)
        if store is None:
            store = self._stores[pictures.identity] = PixelStore(pictures, self.clip.preprocess, self.cache)
        result = store.read(pictures, rows, lambda done, total: self.on_progress("preprocess", done, total))
        return result.to(self.device, non_blocking=True)

    def encoded(self, pictures: PictureSet, rows: Tensor, levels: bool = False) -> FeatureTable:
        """The set's feature table, with at least the blocks that hold `rows` filled by the current tower."""
        table = self._tables.get(pictures.key)
        if table is None or table.version != self.clip.version:
            table = self._tables[pictures.key] = self._new_table(pictures)
        part = "levels" if levels else "features"
        if part not in table.keys:
            table.keys[part] = self._find(table, pictures, part)
        missing = sorted(set((rows // TOWER_BATCH).tolist()) - table.done)
        if missing and part not in table.found:
            self._encode(table, pictures, missing)
        if table.keys[part] and self.store is not None and len(table.done) == -(-len(pictures) // TOWER_BATCH):
            with suppress(UserError):  # a full disk does not stop a run
                self.store.save(table.keys[part], {part: getattr(table, part)})
            table.keys[part] = ""
        return table

    def _new_table(self, pictures: PictureSet) -> FeatureTable:
        sizes = self.clip.config.dim, sum(self.clip.vision.level_sizes)
        features, levels = (torch.empty(len(pictures), size, device=self.device) for size in sizes)
        return FeatureTable(self.clip.version, features, levels)

    def _find(self, table: FeatureTable, pictures: PictureSet, part: str) -> str:
        """Fill a part of the table with what another run with the same tower saved, or else return its key."""
        if self.store is None or self.device.type != "cpu" or world_size() > 1:
            return ""
        if self._tower[0] != self.clip.version:  # the weights are hashed once for each version
            self._tower = (self.clip.version, content_key(self.clip.vision.state_dict().values()))
        how = (FEATURES, self.clip.config, pixels_key(self.clip.preprocess), self.half)
        key = content_key([part, self._tower[1], repr(how), pictures.key])
        found, own = (self.store.load(key) or {}).get(part), getattr(table, part)
        if found is None or found.shape != own.shape or found.dtype != own.dtype:
            return key
        setattr(table, part, found)
        table.found.add(part)
        return ""

    @torch.no_grad()
    def _encode(self, table: FeatureTable, pictures: PictureSet, blocks: list[int]) -> None:
        """Fill `blocks` of the table; where several processes work on a run, each encodes a share of them.

        A loss with mixed precision does not decide the precision: the features are kept for all later uses.
        """
        inside = [torch.arange(block * TOWER_BATCH, min((block + 1) * TOWER_BATCH, len(pictures))) for block in blocks]
        share_of_blocks, cuts = share(len(blocks))
        own = inside[share_of_blocks]
        features, levels = [table.features[:0]], [table.levels[:0]]
        for done, rows in enumerate(own):
            pixels = self.pixels(pictures, rows)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
                output = self.clip.vision(pixels, class_only=True)
            features.append(output.features.float())
            levels.append(output.levels.float())
            self.passed += len(rows)
            self.on_progress("encode", done + 1, len(own))
        bounds = [sum(len(rows) for rows in inside[:cut]) for cut in cuts]
        every = torch.cat(inside).to(self.device)
        table.features[every] = gather(torch.cat(features), bounds)
        table.levels[every] = gather(torch.cat(levels), bounds)
        table.done.update(blocks)

    def close(self) -> None:
        """Release everything; temporary files of this reader are deleted."""
        for store in self._stores.values():
            store.close()
        self._stores.clear()
        self._tables.clear()

    def make_room(self) -> None:
        """Drop all features if they take more than `MOST_FEATURE_BYTES`; they are computed again when needed."""
        if sum(table.features.nbytes + table.levels.nbytes for table in self._tables.values()) > MOST_FEATURE_BYTES:
            self._tables.clear()

    def forget(self, pictures: PictureSet) -> None:
        """Drop the features of a set that is no longer needed, unless other runs share them."""
        if not self.shared:
            self._tables.pop(pictures.key, None)


class Batch(Protocol):
    """A batch of B pictures as `Method.logits` reads it. Nothing is computed before a property is read."""

    def __len__(self) -> int: ...

    @property
    def pixels(self) -> Tensor:
        """(B, C, H, W) float32: preprocessed pictures."""

    @property
    def features(self) -> Tensor:
        """(B, dim): raw (not normalised) features of the vision tower as it is now; no gradient."""

    @property
    def pooled(self) -> Tensor:
        """(B, width): the class token before the projection into the joint space."""

    @property
    def levels(self) -> Tensor:
        """(B, sum of the tower's `level_sizes`): features from several depths of the tower; they end with `pooled`."""


class Pictures(Batch):
    """Pictures of a set that a reader decodes and encodes when their properties are read; a `Batch` with labels."""

    def __init__(self, reader: Reader, pictures: PictureSet, rows: Tensor, gate: Gate) -> None:
        self._reader, self._set, self._rows, self._gate = reader, pictures, rows, gate

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def key(self) -> str:
        """Fingerprint of exactly these pictures in this order, as they are preprocessed."""
        rows = hashlib.sha256(self._rows.numpy().tobytes()).hexdigest()
        return f"{self._set.key}:{rows}:{pixels_key(self._reader.clip.preprocess)}"

    def of_one_task(self, other: Pictures) -> bool:
        """Whether these and `other` are of one task, handed out once."""
        return self._gate is other._gate

    def check(self) -> None:
        """Raise a `UserError` if the task of these pictures has ended."""
        if not self._gate.open:
            raise UserError(f"{self._set.name}: the pictures of a task that has ended cannot be read again")

    @property
    def labels(self) -> Tensor:
        """(B,) int64 class indices, on the reader's device."""
        return self._set.labels[self._rows].to(self._reader.device)

    @property
    def pixels(self) -> Tensor:
        self.check()
        return self._reader.pixels(self._set, self._rows)

    @property
    def features(self) -> Tensor:
        self.check()
        return self._reader.encoded(self._set, self._rows).features[self._rows.to(self._reader.device)]

    @property
    def pooled(self) -> Tensor:
        return self.levels[:, -self._reader.clip.config.vision.width :]

    @property
    def levels(self) -> Tensor:
        self.check()
        return self._reader.encoded(self._set, self._rows, levels=True).levels[self._rows.to(self._reader.device)]

    def __getitem__(self, rows: Tensor | slice) -> Pictures:
        """A part of the batch. Indices on a GPU are copied to the host first, which waits for the GPU."""
        picked = self._rows[rows.cpu() if isinstance(rows, Tensor) else rows]
        return Pictures(self._reader, self._set, picked, self._gate)

    def batches(self, size: int) -> Iterator[Pictures]:
        """The same pictures in order, at most `size` at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


@dataclass
class Gate:
    """Closed when a task ends: its pictures cannot be read after that."""

    open: bool = True


class TensorBatch(Batch):
    """A batch made of preprocessed pictures that are already a tensor."""

    def __init__(self, clip: CLIP, pixels: Tensor) -> None:
        self._clip, self._pixels = clip, pixels

    def __len__(self) -> int:
        return int(self._pixels.shape[0])

    @property
    def pixels(self) -> Tensor:
        return self._pixels

    @cached_property
    def _encoded(self) -> VisionOutput:
        output: VisionOutput = self._clip.vision(self._pixels, class_only=True)
        return output

    @property
    def features(self) -> Tensor:
        return self._encoded.features.float()

    @property
    def pooled(self) -> Tensor:
        return self._encoded.pooled.float()

    @property
    def levels(self) -> Tensor:
        return self._encoded.levels.float()
