"""Pictures with labels, decoded only when somebody asks for them."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from PIL import Image, ImageOps
from torch import Tensor

from clipcil.errors import UserError

Picture = Path | bytes | Image.Image
"""Where a picture comes from: a file, an encoded file's bytes, or a picture already in memory."""

MAX_PIXELS = 100_000_000
"""A picture that claims more pixels than this is refused before it is decoded (a decompression bomb)."""


@dataclass(frozen=True, eq=False)
class PictureSet:
    """A fixed list of pictures and the class index of each. `subset` shares the list, so caches are shared too."""

    name: str
    pictures: Sequence[Picture]
    labels: Tensor
    """(N,) int64, one class index for each row."""
    identity: str
    """Fingerprint of the whole list of pictures; the key of what is cached about them."""
    rows: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """(N,) int64: which pictures of the list these are."""

    def __post_init__(self) -> None:
        if len(self.rows) == 0 and len(self.labels) > 0:
            object.__setattr__(self, "rows", torch.arange(len(self.pictures)))
        if len(self.rows) != len(self.labels):
            raise UserError(f"{self.name}: {len(self.rows)} pictures but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def key(self) -> str:
        """Fingerprint of exactly these rows in this order."""
        return f"{self.identity}:{hashlib.sha256(self.rows.numpy().tobytes()).hexdigest()[:16]}"

    def subset(self, keep: Tensor, labels: Tensor | None = None) -> PictureSet:
        """The rows `keep` (indices into this set), with new labels where they are given."""
        labels = self.labels[keep] if labels is None else labels
        return PictureSet(self.name, self.pictures, labels, self.identity, self.rows[keep])

    def describe(self, index: int) -> str:
        """What to call picture `index` in a message: its file, or its place in the set."""
        picture = self.pictures[int(self.rows[index])]
        return str(picture) if isinstance(picture, Path) else f"picture {int(self.rows[index])} of {self.name}"

    def image(self, index: int) -> Image.Image:
        """Picture `index`, decoded, upright, RGB on white."""
        return decode(self.pictures[int(self.rows[index])], self.describe(index))


def decode(picture: Picture, called: str) -> Image.Image:
    """Decode to RGB: the first frame of an animation, turned upright by its EXIF tag, transparency laid on white."""
    if isinstance(picture, Image.Image):
        return _to_rgb(picture)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns about harmless metadata; what matters raises
            with Image.open(io.BytesIO(picture) if isinstance(picture, bytes) else picture) as image:
                if image.width * image.height > MAX_PIXELS:
                    size = f"{image.width}×{image.height}"
                    raise UserError(f"{called}: {size} pixels is too large to decode safely; make it smaller")
                image.load()
                return _to_rgb(ImageOps.exif_transpose(image))
    except UserError:
        raise
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError, MemoryError) as error:
        raise UserError(f"{called} is not a picture that can be read ({_short(error)}); mend or remove it") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":
        # 16-bit greys: PIL's convert would clip them to white instead of scaling.
        low, high = image.getextrema()
        top = 65535.0 if float(high) > 255 else 255.0  # type: ignore[arg-type]
        image = image.point(lambda value: value * (255.0 / top)).convert("L")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        page = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(page, image)
    return image.convert("RGB")


def _short(error: BaseException) -> str:
    text = str(error).split("\n")[0].split(" <_io")[0].split(" '/")[0]
    return f"{type(error).__name__}: {text}"[:120]


def identity_of_files(paths: Sequence[Path]) -> str:
    """Fingerprint of a list of files by name, size and time of change; no file is read."""
    digest = hashlib.sha256()
    for path in paths:
        status = path.stat()
        digest.update(f"{path.parent.name}/{path.name}|{status.st_size}|{status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:24]
