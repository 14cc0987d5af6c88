"""`vit-mini`: its recipe run for seconds on made pictures, and the folder of the kept weights."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPImageProcessor, CLIPModel

from clipcil.clip import CLIP, load_clip
from clipcil.data.dataset import open_dataset
from reproduce.mini.pictures import Picture
from reproduce.vit_mini import distil
from reproduce.vit_mini.__main__ import write_folder


@pytest.fixture
def made(tmp_path: Path, mini: CLIP, monkeypatch: pytest.MonkeyPatch) -> Callable[[], distil.Lessons]:
    """Lessons from ten made pictures, in shards of four; nothing of them is in memory yet."""
    for name, value in {"SHARD": 4, "BATCH": 4, "OTHERS": 4, "SAVE_EVERY": 3, "STEPS_PER_SHARD": 1}.items():
        monkeypatch.setattr(distil, name, value)
    rng = np.random.default_rng(0)
    for index in range(10):
        Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    found = [Picture(f"{index}.png", "cifar-10", "") for index in range(10)]
    return lambda: distil.Lessons(found, tmp_path, tmp_path / "cache", mini, 0)


def test_a_killed_run_ends_with_the_weights_of_a_whole_one(
    tmp_path: Path, made: Callable[[], distil.Lessons], monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons = made()
    whole = distil.train(lessons, 6, tmp_path, 0).state_dict()
    kept = load_file(tmp_path / "cache" / "0002.safetensors")
    assert lessons.known == 10 and torch.equal(lessons.pixels[8:], kept["pixels"])
    (tmp_path / "checkpoint.pt").unlink()
    times = iter(range(4))
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(
            distil, "losses", lambda *args, losses=distil.losses, **more: (next(times), losses(*args, **more))[1]
        )
        distil.train(made(), 6, tmp_path, 0)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 3
    again = distil.train(made(), 6, tmp_path, 0).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


def test_the_recipe_comes_nearer_to_mini(tmp_path: Path, made: Callable[[], distil.Lessons]) -> None:
    lessons = made()
    lessons.provide(10)
    nearness = []
    for steps in (1, 40):
        tower = distil.train(lessons, steps, tmp_path, 0)
        pixels, _ = distil.moved(lessons.pixels, torch.Generator().manual_seed(0))
        with torch.no_grad():
            features = tower(pixels).features
        nearness.append(float(F.cosine_similarity(features, lessons.features.float()).mean()))
    assert nearness[1] > nearness[0] + 0.1


def test_pictures_are_mirrored_and_shifted_as_a_whole() -> None:
    pixels = torch.randint(256, (64, 64), generator=torch.Generator().manual_seed(1)).byte().expand(8, 3, -1, -1)
    found, mirrored = distil.moved(pixels, torch.Generator().manual_seed(0))
    assert 0 < int(mirrored.sum()) < 8 and found.shape == pixels.shape
    middle = (pixels[0, 0, 8:56, 8:56] / 255 - distil.OPENAI_MEAN[0]) / distil.OPENAI_STD[0]
    places = set()
    for row, turned in zip(found[:, 0], mirrored, strict=True):
        windows = (row.flip(1) if turned else row).unfold(0, 48, 1).unfold(1, 48, 1)  # every square of 48 pixels
        same = torch.isclose(windows, middle).all(-1).all(-1).nonzero().tolist()
        assert len(same) == 1
        places.add(tuple(same[0]))
    assert len(places) > 4


def test_the_kept_weights_load_in_transformers_and_know_pictures(tmp_path: Path, mini: CLIP) -> None:
    write_folder(tmp_path)
    ours, theirs = load_clip(tmp_path), CLIPModel.from_pretrained(tmp_path).float().eval()
    processor = CLIPImageProcessor.from_pretrained(tmp_path)
    test = open_dataset("emoji", None, {}).test
    pictures = [test.image(index) for index in range(0, len(test), 10)]
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(ours.preprocess(pictures), pixels, atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        wanted = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        features = ours.vision(pixels).features
        taught = mini.vision(mini.preprocess(pictures)).features
    torch.testing.assert_close(features, wanted, atol=1e-4, rtol=1e-4)
    texts = ["a photo of an octopus", "a photo of a truck"]
    torch.testing.assert_close(ours.encode_texts(texts), mini.encode_texts(texts))
    assert F.cosine_similarity(features, taught).mean() > 0.5
