"""Flips and crops: each picture by itself, inside its borders, the same for the same random state."""

import torch
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.training.augment import _crops, augmented, training_inputs


def ramps(count: int, side: int = 16) -> Tensor:
    """(count, 2, side, side): the column's and the row's place in [−1, 1], so that a pixel says where it came from."""
    places = (torch.arange(side) + 0.5) / side * 2 - 1
    one = torch.stack([places.expand(side, -1), places[:, None].expand(-1, side)])
    return one.expand(count, -1, -1, -1)


def test_flip_exchanges_left_and_right_for_about_half() -> None:
    torch.manual_seed(0)
    pixels = ramps(400)
    result = augmented(pixels, "flip")
    mirrored = torch.tensor([torch.equal(one, pixels[0].flip(2)) for one in result])
    kept = torch.tensor([torch.equal(one, pixels[0]) for one in result])
    assert (mirrored ^ kept).all() and 160 < int(mirrored.sum()) < 240


def test_a_crop_is_a_stretched_part_of_the_picture() -> None:
    """On a ramp, bilinear sampling is exact away from the border: place = centre + half width × place in the result."""
    torch.manual_seed(0)
    pixels = ramps(300)
    state = torch.get_rng_state()
    result = augmented(pixels, "crop")
    assert not torch.equal(augmented(pixels, "crop"), result)
    torch.set_rng_state(state)
    assert torch.equal(augmented(pixels, "crop"), result)
    torch.set_rng_state(state)
    maps = _crops(torch.rand(300) < 0.5, pixels.shape[2:])
    wide, tall = maps[:, 0, 0], maps[:, 1, 1]
    factors, centres = torch.stack([wide, tall], dim=1), maps[:, :, 2]
    expected = factors[:, :, None, None] * pixels + centres[:, :, None, None]
    inside = 1 - 1 / 16  # the centre of the outermost pixel; beyond it the border is repeated
    torch.testing.assert_close(result, expected.clamp(-inside, inside), atol=1e-5, rtol=0)
    area, ratio = (wide * tall).abs(), (wide / tall).abs()
    assert 0.05 < float(area.min()) < 0.15 and 0.9 < float(area.max()) <= 1
    assert float(ratio.min()) >= 0.74 and float(ratio.max()) <= 1.34
    assert (centres.abs() + factors.abs() <= 1 + 1e-6).all() and (tall > 0).all()
    assert 100 < int((wide < 0).sum()) < 200


def test_queries_are_those_of_the_augmented_pictures(tiny_clip: CLIP) -> None:
    inputs, tower = torch.randn(5, *tiny_clip.preprocess.shape), tiny_clip.vision
    with torch.no_grad():
        cached = tower(inputs, class_only=True).features
    plain, queries = training_inputs(tower, inputs, cached, "none")
    assert plain is inputs and queries is cached
    torch.manual_seed(0)
    pixels, queries = training_inputs(tower, inputs, cached, "crop")
    torch.manual_seed(0)
    assert torch.equal(pixels, augmented(inputs, "crop")) and not queries.requires_grad
    with torch.no_grad():
        torch.testing.assert_close(queries, tower(pixels, class_only=True).features)
    assert not torch.allclose(queries, cached, atol=1e-3)
