from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from clipcil.clip import CLIP
from clipcil.clip.preprocess import OPENAI_MEAN, OPENAI_STD, Preprocess, Steps
from clipcil.clip.trunk import Trunk
from support.towers import REFERENCE


def noise(high: int, wide: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (high, wide, 3), dtype=np.uint8))


def test_mini_gives_the_reference_trunk_output(mini: CLIP) -> None:
    reference = load_file(REFERENCE)
    images = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in reference["pictures_uint8"]]
    out = mini.preprocess(images)
    assert out.shape == (4, *mini.preprocess.shape) == (4, 384 + 48, 4, 4)
    assert (out[:, :384] - reference["trunk_output"]).abs().max() < 1e-3
    assert mini.preprocess.trunk is not None
    batch = torch.stack([mini.preprocess.picture(image) for image in images])
    hidden, averages = mini.preprocess.trunk.stem(batch), []
    for depth, block in enumerate(mini.preprocess.trunk.blocks):
        hidden = block(hidden)
        if depth in (10, 14, 19, 20):  # the last block of each of the last four widths
            averages.append(hidden.mean((2, 3)))
    expected = torch.cat(averages, dim=1)
    torch.testing.assert_close(out[:, 384:].flatten(1)[:, :768], expected, atol=1e-3, rtol=1e-3)
    assert mini.vision.level_sizes == (88, 120, 208, 352, 384)
    torch.testing.assert_close(mini.vision(out).levels[:, :768], expected, atol=1e-3, rtol=1e-3)
    assert not out.requires_grad


def test_trunk_pads_as_tensorflow_does() -> None:
    """One 3×3 kernel of stride 2 over an even and an odd length: the odd pixel of padding goes to the end."""
    spec = {"stem": {"kernel": 3, "stride": 2, "out": 1}, "blocks": []}
    trunk = Trunk(spec)
    trunk.stem.weight.fill_(0)
    trunk.stem.weight[0, 0, 0, 0] = 1.0  # picks the top left pixel of each window
    for size, expected in ((4, [0, 2]), (5, [None, 1, 3])):
        picture = torch.zeros(1, 3, size, size)
        picture[0, 0] = torch.arange(size * size).view(size, size) / 100 + 0.01
        row = trunk(picture)[0, 0, -1 if size == 4 else 1]
        source = picture[0, 0, 2 if size == 4 else 1]
        for value, column in zip(row, expected, strict=True):
            assert value.item() == pytest.approx(0.0 if column is None else source[column].item())


def test_whatever_the_mode_a_picture_becomes_rgb() -> None:
    preprocess = Preprocess(Steps.plain(8))
    colour = Image.new("RGB", (8, 8), (10, 200, 30))
    expected = (torch.tensor([10, 200, 30]) / 255 - torch.tensor(OPENAI_MEAN)) / torch.tensor(OPENAI_STD)
    for image in (colour, colour.convert("RGBA"), colour.convert("P", palette=Image.Palette.ADAPTIVE)):
        out = preprocess.picture(image)
        assert out.shape == (3, 8, 8)
        assert out.dtype == torch.float32
        assert out.is_contiguous()
        torch.testing.assert_close(out[:, 4, 4], expected, atol=1e-5, rtol=0)
    white = preprocess.picture(Image.new("RGB", (8, 8), "white"))
    torch.testing.assert_close(preprocess.picture(Image.new("RGBA", (8, 8), (9, 9, 9, 0))), white)
    few_colours = Image.new("RGBA", (8, 8), (9, 9, 9, 0)).quantize()  # its palette has four numbers for a colour
    torch.testing.assert_close(preprocess.picture(few_colours), white)
    torch.testing.assert_close(preprocess.picture(Image.new("L", (8, 8), 255)), white)
    torch.testing.assert_close(preprocess.picture(Image.new("1", (8, 8), 1)), white)


def test_a_thread_shares_it_and_the_input_is_left_alone(mini: CLIP) -> None:
    images = [noise(40 + n, 60, n) for n in range(16)]
    before = [image.tobytes() for image in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(mini.preprocess.picture, images))
    for image, pixels in zip(images, together, strict=True):
        assert torch.equal(mini.preprocess.picture(image), pixels)
    assert [image.tobytes() for image in images] == before


def test_a_needle_of_a_picture_needs_no_mountain_of_memory() -> None:
    out = Preprocess(Steps.plain(32)).picture(noise(1, 100_000))
    assert out.shape == (3, 32, 32)
    assert bool(torch.isfinite(out).all())


def test_finish_without_a_trunk_is_the_identity() -> None:
    batch = torch.randn(2, 3, 8, 8)
    preprocess = Preprocess(Steps.plain(8))
    assert preprocess.finish(batch) is batch
    assert preprocess([]).shape == (0, 3, 8, 8)


def test_fingerprint_changes_with_everything(mini: CLIP) -> None:
    steps = Steps.plain(8)
    others = [
        steps,
        replace(steps, short_side=9),
        replace(steps, resample=2),
        replace(steps, mean=(0.5, 0.5, 0.5)),
        replace(steps, std=(0.5, 0.5, 0.5)),
        Steps.plain(9),
        mini.preprocess.steps,
    ]
    prints = {Preprocess(each).fingerprint for each in others}
    spec = {"stem": {"kernel": 3, "stride": 2, "out": 4}, "blocks": []}
    trunk = Trunk(spec)
    prints.add(Preprocess(steps, trunk).fingerprint)
    trunk.stem.bias[0] = 1.0
    prints.add(Preprocess(steps, trunk).fingerprint)
    assert len(prints) == 9
    assert Preprocess(Steps.plain(8)).fingerprint == Preprocess(steps).fingerprint


def test_preprocessor_config_old_and_new_forms_agree() -> None:
    old = Steps.from_hf({"size": 24, "crop_size": 24, "resample": 3}, 24)
    new = Steps.from_hf({"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}, 24)
    assert old == new == Steps.plain(24)
    square = Steps.from_hf({"size": {"height": 24, "width": 24}, "do_center_crop": False, "do_normalize": False}, 24)
    assert (square.exact, square.short_side, square.mean) == ((24, 24), None, (0.0, 0.0, 0.0))
