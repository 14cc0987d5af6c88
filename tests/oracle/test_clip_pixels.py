"""Our pixels against transformers' CLIPImageProcessor (the PIL one) on odd sizes and modes."""

import json

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from clipcil.clip.preprocess import Preprocess, Steps

# Without torchvision, transformers 5 has the PIL processor under a name of its own; before, it was the only one.
Processor = getattr(transformers, "CLIPImageProcessorPil", None) or transformers.CLIPImageProcessor
SIZES = [
    (1, 1), (1, 7), (7, 1), (2, 3), (3, 2), (16, 16), (31, 33), (33, 31), (32, 32), (64, 64), (100, 37), (37, 100),
    (224, 224), (225, 224), (224, 225), (223, 227), (500, 375), (375, 500), (301, 299), (97, 640), (640, 97), (13, 401),
    (255, 256), (448, 449),
]  # fmt: skip


def picture(high: int, wide: int) -> Image.Image:
    """Smooth colours with sharp edges and noise: what a wrong filter or a shifted crop shows at once."""
    rng = np.random.default_rng(high * 1000 + wide)
    rows, columns = np.mgrid[0:high, 0:wide]
    planes = [rows * 255 / high, columns * 255 / wide, ((rows // 5 + columns // 3) % 2) * 255]
    return Image.fromarray((0.7 * np.stack(planes, -1) + 0.3 * rng.integers(0, 256, (high, wide, 3))).astype(np.uint8))


def close(processor, preprocess: Preprocess, image: Image.Image) -> None:
    expected = torch.as_tensor(np.asarray(processor(image)["pixel_values"][0]))
    torch.testing.assert_close(preprocess.picture(image), expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("side", [224, 33])
def test_plain_clip_on_odd_sizes(side: int) -> None:
    processor = Processor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    preprocess = Preprocess(Steps.plain(side))
    for high, wide in SIZES:
        close(processor, preprocess, picture(high, wide))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1"])
def test_pictures_of_every_mode(mode: str) -> None:
    image = picture(61, 47)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(np.tile(np.arange(47, dtype=np.uint8) * 5, (61, 1))))
    close(Processor(), Preprocess(Steps.plain(224)), image.convert(mode))


CROP = {"crop_size": {"height": 40, "width": 40}}
SETTINGS = {
    "squash": {"size": {"height": 40, "width": 40}, **CROP},
    "larger-bilinear": {"size": {"shortest_edge": 48}, **CROP, "resample": 2},
    "smaller": {"size": {"shortest_edge": 30}, **CROP},  # than the crop: black rim
    "unnormalised": {"size": {"shortest_edge": 40}, **CROP, "do_normalize": False},
    "other-values": {"size": {"shortest_edge": 40}, **CROP, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    | {"rescale_factor": 1 / 127},
    "no-resize": {"do_resize": False, **CROP},
    "no-crop": {"size": {"height": 40, "width": 40}, "do_center_crop": False},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_preprocessor_config(settings: dict, tmp_path) -> None:
    processor = Processor(**settings)
    processor.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "preprocessor_config.json").read_text())
    preprocess = Preprocess(Steps.from_hf(raw, 40))
    for high, wide in ((61, 47), (35, 90), (40, 40), (200, 120)):
        close(processor, preprocess, picture(high, wide))
