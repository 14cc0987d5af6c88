from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

from clipcil.clip import CLIP
from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.clip.trunk import Trunk
from support.towers import REFERENCE

SPEC = {"stem": {"kernel": 3, "stride": 2, "out": 1}, "blocks": []}


def noise(high: int, wide: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (high, wide, 3), dtype=np.uint8))


def test_mini_gives_the_reference_trunk_output(mini: CLIP) -> None:
    reference, trunk = load_file(REFERENCE), mini.preprocess.trunk
    images = [Image.fromarray(picture.permute(1, 2, 0).numpy()) for picture in reference["pictures_uint8"]]
    out = mini.preprocess(images)
    assert out.shape == (4, *mini.preprocess.shape) == (4, 384 + 48, 4, 4) and not out.requires_grad
    assert (out[:, :384] - reference["trunk_output"]).abs().max() < 1e-3
    assert trunk is not None
    hidden, averages = trunk.stem(torch.stack([mini.preprocess.picture(image) for image in images])), []
    for depth, block in enumerate(trunk.blocks):
        hidden = block(hidden)
        if depth in (10, 14, 19, 20):  # the last block of each of the last four widths
            averages.append(hidden.mean((2, 3)))
    expected = torch.cat(averages, dim=1)
    torch.testing.assert_close(out[:, 384:].flatten(1)[:, :768], expected, atol=1e-3, rtol=1e-3)
    assert mini.vision.level_sizes == (88, 120, 208, 352, 384)
    torch.testing.assert_close(mini.vision(out).levels[:, :768], expected, atol=1e-3, rtol=1e-3)


def test_the_trunk_pads_as_tensorflow_does() -> None:
    """One 3×3 kernel of stride 2 over an even and an odd length: the odd pixel of padding goes to the end."""
    trunk = Trunk(SPEC)
    trunk.stem.weight.fill_(0)
    trunk.stem.weight[0, 0, 0, 0] = 1.0  # picks the top left pixel of each window
    for size, row in ((4, 2), (5, 1)):  # the row of the picture that the window of the second row begins with
        picture = torch.arange(1.0, 1 + size * size).view(1, 1, size, size).expand(1, 3, -1, -1) / 100
        edge = size % 2  # of zeros before an odd length
        expected = torch.cat([torch.zeros(edge), picture[0, 0, row, edge::2]])
        torch.testing.assert_close(trunk(picture)[0, 0, 1], expected)


def test_threads_share_it_and_the_input_is_left_alone(mini: CLIP) -> None:
    images = [noise(40 + n, 60, n) for n in range(16)]
    before = [image.tobytes() for image in images]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(mini.preprocess.picture, images))
    for image, pixels in zip(images, together, strict=True):
        assert torch.equal(mini.preprocess.picture(image), pixels)
    assert [image.tobytes() for image in images] == before


def test_a_needle_of_a_picture_needs_no_mountain_of_memory() -> None:
    out = Preprocess(Steps.plain(32)).picture(noise(1, 100_000))
    assert out.shape == (3, 32, 32) and bool(torch.isfinite(out).all())


def test_finish_without_a_trunk_is_the_identity() -> None:
    batch, preprocess = torch.randn(2, 3, 8, 8), Preprocess(Steps.plain(8))
    assert preprocess.finish(batch) is batch
    assert preprocess([]).shape == (0, 3, 8, 8)


def test_the_fingerprint_changes_with_everything(mini: CLIP) -> None:
    steps = Steps.plain(8)
    changes = ({"short_side": 9}, {"resample": 2}, {"mean": (0.5,) * 3}, {"std": (0.5,) * 3})
    others = [steps, Steps.plain(9), mini.preprocess.steps, *(replace(steps, **change) for change in changes)]
    prints = {Preprocess(each).fingerprint for each in others}
    trunk = Trunk(SPEC)
    prints.add(Preprocess(steps, trunk).fingerprint)
    trunk.stem.bias[0] = 1.0
    prints.add(Preprocess(steps, trunk).fingerprint)
    assert len(prints) == 9
    assert Preprocess(Steps.plain(8)).fingerprint == Preprocess(steps).fingerprint


def test_the_old_form_of_a_preprocessor_config() -> None:
    """The new one is compared with transformers, in tests/oracle."""
    assert Steps.from_hf({"size": 24, "crop_size": 24, "resample": 3}, 24) == Steps.plain(24)
