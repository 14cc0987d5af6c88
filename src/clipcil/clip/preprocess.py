"""From a picture to what the vision tower reads: RGB, resize, centre crop, mean/std, then the trunk if there is one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from clipcil.clip.config import Side
from clipcil.clip.trunk import Trunk
from clipcil.errors import UserError
from clipcil.limits import LONGEST_SHAPE
from clipcil.settings import typed

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
Mean = Annotated[float, Field(ge=-1000, le=1000)]
Factor = Annotated[float, Field(ge=1e-6, le=1000)]
"""Far from every CLIP's: with such values pixels are finite, and their products with weights too."""


@dataclass(frozen=True)
class Steps:
    """The steps from a picture to pixels, as in transformers' CLIPImageProcessor, with its defaults."""

    crop: tuple[Side, Side]
    """(height, width) of the result."""
    short_side: Side | None = None
    """Resize so that the shorter side has this length."""
    exact: tuple[Side, Side] | None = None
    """Or resize to (height, width) without keeping the shape."""
    resample: Literal[0, 1, 2, 3, 4, 5] = 3
    """A filter of `PIL.Image.Resampling`; 3 is bicubic."""
    mean: tuple[Mean, Mean, Mean] = OPENAI_MEAN
    std: tuple[Factor, Factor, Factor] = OPENAI_STD
    rescale: Factor = 1 / 255

    @classmethod
    def plain(cls, image_size: int) -> Steps:
        """CLIP's own: short side to `image_size`, centre crop."""
        return cls(crop=(image_size, image_size), short_side=image_size)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], image_size: int) -> Steps:
        """From the content of a `preprocessor_config.json`; old files give sizes as one number."""
        size = raw.get("size", image_size) if raw.get("do_resize", True) else None
        short = size.get("shortest_edge") if isinstance(size, Mapping) else size if isinstance(size, int) else None
        exact = None if size is None or short is not None else _pair(size)
        crop = _pair(raw.get("crop_size", image_size)) if raw.get("do_center_crop", True) else exact
        if crop not in (None, (image_size, image_size)):
            raise UserError(f"it makes pictures of {crop}, config.json wants {image_size}×{image_size}")
        normalise, rescale = raw.get("do_normalize", True), raw.get("do_rescale", True)
        values = {
            "crop": (image_size, image_size),
            "short_side": short,
            "exact": exact,
            "resample": raw.get("resample", 3),
            "mean": raw.get("image_mean", OPENAI_MEAN) if normalise else (0.0, 0.0, 0.0),
            "std": raw.get("image_std", OPENAI_STD) if normalise else (1.0, 1.0, 1.0),
            "rescale": raw.get("rescale_factor", 1 / 255) if rescale else 1.0,
        }
        steps: Steps = typed(values, cls)
        return steps

    @classmethod
    def from_trunk(cls, spec: Mapping[str, Any]) -> Steps:
        """From the content of a `trunk.json`."""
        side, filters = (spec["image_size"], spec["image_size"]), Image.Resampling
        resample: Any = int(filters[spec["resample"].upper()])
        values = {"crop": side, "exact": side, "resample": resample}
        steps: Steps = typed({**values, "mean": spec["image_mean"], "std": spec["image_std"]}, cls)
        return steps


class Preprocess:
    """`picture` per picture (threads may share it), `finish` per batch, `preprocess(images)` for both."""

    def __init__(self, steps: Steps, trunk: Trunk | None = None) -> None:
        self.steps = steps
        self.trunk = trunk
        self.shape = (3, *steps.crop) if trunk is None else trunk.output_shape(steps.crop[0])
        self.fingerprint = _fingerprint(steps, trunk)
        self._mean = torch.tensor(steps.mean).view(3, 1, 1)
        self._std = torch.tensor(steps.std).view(3, 1, 1)

    def picture(self, image: Image.Image) -> Tensor:
        """A picture of any size and mode → (3, h, w) float32. Transparent parts become white."""
        cropped = _centre_crop(self._resize(_rgb(image)), *self.steps.crop)
        values = torch.from_numpy(np.array(cropped))  # (h, w, 3) uint8
        pixels = values.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.mul_(self.steps.rescale).sub_(self._mean).div_(self._std)

    def finish(self, batch: Tensor) -> Tensor:
        """(B, 3, h, w) → (B, *shape): through the frozen trunk, or unchanged where the backbone has none."""
        if self.trunk is None:
            return batch
        return self.trunk.to(batch.device)(batch)

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """Pictures → (B, *shape)."""
        if not images:
            return torch.zeros(0, *self.shape)
        return self.finish(torch.stack([self.picture(image) for image in images]))

    def _resize(self, image: Image.Image) -> Image.Image:
        steps = self.steps
        if steps.exact is not None:
            size = (steps.exact[1], steps.exact[0])
        elif steps.short_side is not None:
            longest = LONGEST_SHAPE * min(image.size)
            image = _centre_crop(image, min(image.height, longest), min(image.width, longest))
            other = int(steps.short_side * max(image.size) / min(image.size))
            size = (steps.short_side, other) if image.width <= image.height else (other, steps.short_side)
        else:
            return image
        return image if size == image.size else image.resize(size, Image.Resampling(steps.resample))


def _pair(size: Any) -> tuple[int, int]:
    """(height, width) from one number, a pair or a mapping."""
    if isinstance(size, Mapping):
        return size["height"], size["width"]
    high, wide = (size, size) if isinstance(size, int) else size
    return high, wide


def _rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _centre_crop(image: Image.Image, high: int, wide: int) -> Image.Image:
    """The middle of the picture; a smaller picture gets a black rim, as in CLIPImageProcessor."""
    left, top = (image.width - wide) // 2, (image.height - high) // 2
    if (left, top) == (0, 0) and image.size == (wide, high):
        return image
    return image.crop((left, top, left + wide, top + high))


def _fingerprint(steps: Steps, trunk: Trunk | None) -> str:
    digest = hashlib.sha256(json.dumps(asdict(steps), sort_keys=True).encode())
    if trunk is not None:
        digest.update(f"averages of blocks {trunk.depths}".encode())
        for name, tensor in sorted(trunk.state_dict().items()):
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]
