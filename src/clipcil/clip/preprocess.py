"""From a picture to what the vision tower reads: RGB, resize, centre crop, mean/std, then the trunk if there is one."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipcil.clip.trunk import Trunk
from clipcil.errors import UserError

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
_LARGEST = 10**4  # of a side that pictures are resized to
_SLIM = 32  # a picture this many times as long as it is high is cropped before it is resized, to bound the memory


@dataclass(frozen=True)
class Steps:
    """What is done to a picture; the names are those of transformers' CLIPImageProcessor, the values its defaults."""

    crop: tuple[int, int]
    """(height, width) of the result."""
    short_side: int | None = None
    """Resize so that the shorter side has this length."""
    exact: tuple[int, int] | None = None
    """Or resize to (height, width), whatever the shape."""
    resample: int = int(Image.Resampling.BICUBIC)
    mean: tuple[float, ...] = OPENAI_MEAN
    std: tuple[float, ...] = OPENAI_STD
    rescale: float = 1 / 255

    def __post_init__(self) -> None:
        sides = [*self.crop, *(self.exact or ()), *([] if self.short_side is None else [self.short_side])]
        if not all(1 <= side <= _LARGEST for side in sides):
            raise ValueError(f"pictures of size {min(sides)} to {max(sides)}")
        Image.Resampling(self.resample)  # a ValueError, where there is no such filter
        if len(self.mean) != 3 or len(self.std) != 3 or 0 in self.std:
            raise ValueError("mean and std are not three numbers each, those of std not 0")
        if not all(math.isfinite(value) for value in (*self.mean, *self.std, self.rescale)):
            raise ValueError("mean, std or rescale is not finite")

    @classmethod
    def plain(cls, image_size: int) -> Steps:
        """CLIP's own: short side to `image_size`, centre crop."""
        return cls(crop=(image_size, image_size), short_side=image_size)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], image_size: int) -> Steps:
        """From the content of a `preprocessor_config.json`; old files give sizes as one number."""
        size = raw.get("size", image_size) if raw.get("do_resize", True) else None
        short, exact = None, None
        if isinstance(size, int):
            short = size
        elif isinstance(size, Mapping) and isinstance(size.get("shortest_edge"), int):
            short = int(size["shortest_edge"])
        elif size is not None:
            exact = _pair(size)
        crop = raw.get("crop_size", image_size) if raw.get("do_center_crop", True) else exact or image_size
        if _pair(crop) != (image_size, image_size):
            raise UserError(
                f"preprocessor_config.json makes pictures of {crop}, config.json wants {image_size}×{image_size}; "
                "take both files from the same backbone"
            )
        normalise = raw.get("do_normalize", True)
        return cls(
            crop=(image_size, image_size),
            short_side=short,
            exact=exact,
            resample=int(raw.get("resample", Image.Resampling.BICUBIC)),
            mean=tuple(raw.get("image_mean", OPENAI_MEAN)) if normalise else (0.0,) * 3,
            std=tuple(raw.get("image_std", OPENAI_STD)) if normalise else (1.0,) * 3,
            rescale=float(raw.get("rescale_factor", 1 / 255)) if raw.get("do_rescale", True) else 1.0,
        )

    @classmethod
    def from_trunk(cls, spec: Mapping[str, Any]) -> Steps:
        side = int(spec["image_size"])
        resample = Image.Resampling[str(spec["resample"]).upper()]
        mean, std = tuple(spec["image_mean"]), tuple(spec["image_std"])
        return cls(crop=(side, side), exact=(side, side), resample=int(resample), mean=mean, std=std)


class Preprocess:
    """`picture` per picture (threads may share it), `finish` per batch, `preprocess(images)` for both."""

    def __init__(self, steps: Steps, trunk: Trunk | None = None, shape: tuple[int, int, int] | None = None) -> None:
        self.steps = steps
        self.trunk = trunk
        self.shape = shape or (3, *steps.crop)
        self.fingerprint = _fingerprint(steps, trunk)
        self._mean = torch.tensor(steps.mean).view(3, 1, 1)
        self._std = torch.tensor(steps.std).view(3, 1, 1)

    def picture(self, image: Image.Image) -> Tensor:
        """A picture of any size and mode → (3, h, w) float32. What is transparent becomes white."""
        cropped = _centre_crop(self._resize(_rgb(image)), *self.steps.crop)
        values = torch.from_numpy(np.array(cropped))  # (h, w, 3) uint8
        pixels = values.permute(2, 0, 1).to(torch.float32, memory_format=torch.contiguous_format)
        return pixels.mul_(self.steps.rescale).sub_(self._mean).div_(self._std)

    def finish(self, batch: Tensor) -> Tensor:
        """(B, 3, h, w) → (B, *shape): through the frozen trunk, or unchanged where the backbone has none."""
        if self.trunk is None:
            return batch
        out: Tensor = self.trunk.to(batch.device)(batch, inner=True)
        return out

    def __call__(self, images: Sequence[Image.Image]) -> Tensor:
        """Pictures → (B, *shape)."""
        if not images:
            return torch.zeros(0, *self.shape)
        return self.finish(torch.stack([self.picture(image) for image in images]))

    def _resize(self, image: Image.Image) -> Image.Image:
        steps = self.steps
        wide, high = image.size
        if steps.exact is not None:
            size = (steps.exact[1], steps.exact[0])
        elif steps.short_side is not None:
            short, long = min(wide, high), max(wide, high)
            if long > _SLIM * short:
                image = _centre_crop(image, min(high, _SLIM * short), min(wide, _SLIM * short))
                wide, high = image.size
                long = max(wide, high)
            other = int(steps.short_side * long / short)
            size = (steps.short_side, other) if wide <= high else (other, steps.short_side)
        else:
            return image
        return image if size == image.size else image.resize(size, Image.Resampling(steps.resample))


def _pair(size: Any) -> tuple[int, int]:
    """(height, width) from one number, a pair or a mapping."""
    if isinstance(size, Mapping):
        size = (size.get("height"), size.get("width"))
    high, wide = (size, size) if isinstance(size, int) else size
    if not isinstance(high, int) or not isinstance(wide, int):
        raise UserError(f"preprocessor_config.json: size {size} is neither a shortest_edge nor a height and a width")
    return high, wide


def _rgb(image: Image.Image) -> Image.Image:
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _centre_crop(image: Image.Image, high: int, wide: int) -> Image.Image:
    """The middle of the picture; what lies outside a smaller picture is black, as in CLIPImageProcessor."""
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
