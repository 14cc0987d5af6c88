"""Both sides of every benchmark give the same, at small sizes. No time is measured here."""

from __future__ import annotations

import pytest
import torch

from benchmarks import p1_prompt_step, p3_memory, s2_herding, s4_decode_ahead, s5_text_batches
from benchmarks.harness import difference
from benchmarks.live import Live
from benchmarks.p2_features_once import METHODS, OneTask
from benchmarks.shapes import SMALL_TEXT, SMALL_VISION, names, random_clip
from clipcil.clip import CLIP
from clipcil.memory.exemplars import herd


@pytest.mark.parametrize("weight_gradients", [True, False])
def test_prompt_gradients(weight_gradients: bool) -> None:
    step = p1_prompt_step.Step(random_clip(SMALL_VISION, SMALL_TEXT), classes=7, length=4, batch=5)
    ours = step.ours()
    assert float(ours.abs().max()) > 0
    assert difference(ours, step.theirs(weight_gradients)) < 1e-5
    assert all(parameter.grad is None for parameter in step.clip.text.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_features_once_or_at_every_step(name: str, tiny_clip: CLIP) -> None:
    """The second task, so that there are exemplars and things to replay."""
    settings = {"image_weight": 0.0} if name == "engine" else {}
    sides = {}
    for side in ("ours", "theirs"):
        task = OneTask(name, 1, tiny_clip, epochs=2, **settings)
        sides[side] = getattr(task, side)()
    assert sides["ours"].shape == (40, 20)
    assert difference(sides["ours"], sides["theirs"]) < 1e-3


def test_the_peers_way_encodes_every_picture_in_every_epoch(tiny_clip: CLIP) -> None:
    passes: list[int] = []
    handle = tiny_clip.vision.register_forward_hook(lambda tower, given, output: passes.append(len(given[0])))
    try:
        memory = {"pictures": 2, "per": "class"}
        task = OneTask("coop", 1, tiny_clip, epochs=3, memory=memory)
        passes.clear()
        task.theirs()
        theirs = sum(passes)
        task = OneTask("coop", 1, tiny_clip, epochs=3, memory=memory)
        passes.clear()
        task.ours()
        ours = sum(passes)
    finally:
        handle.remove()
    new, exemplars, test = 60, 20, 40
    herding = new + 20  # each picture, then those that were chosen
    assert theirs == 3 * (new + exemplars) + herding + test
    assert ours == new + test // 2  # the other half was encoded after the first task


def test_live_features_apply_functions_when_they_are_read() -> None:
    stored, reads = torch.arange(6.0).view(3, 2) + 1, []

    def fetch(rows: torch.Tensor) -> torch.Tensor:
        reads.append(rows.tolist())
        return stored[rows]

    live = torch.tensor(2.0) * torch.nn.functional.normalize(Live(fetch, 3, 2), dim=-1)  # type: ignore[arg-type]
    assert not reads
    expected = 2 * torch.nn.functional.normalize(stored, dim=-1)
    assert torch.equal(live[torch.tensor([False, True, True])], expected[1:])
    assert reads == [[1, 2]]


def test_moments_after_many_maps() -> None:
    dense, ours = p3_memory.both(tasks=3, classes=6, dim=12, count=5)
    map = p3_memory.near_identity(12)
    dense.transport(map)
    ours.transport(map)
    assert p3_memory.moment_error(dense, ours) < 1e-10
    dense.covariances[2, 0, 0] *= 1.001
    assert p3_memory.moment_error(dense, ours) > 1e-5


def test_herding() -> None:
    torch.manual_seed(0)
    features = torch.randn(40, 8)
    assert torch.equal(herd(features, 40), s2_herding.greedy(features, 40))


def test_decoding_ahead(mini: CLIP) -> None:
    pictures = s4_decode_ahead.jpegs(3, 48)
    assert difference(s4_decode_ahead.ahead(mini, pictures), s4_decode_ahead.in_turn(mini, pictures)) < 1e-3


def test_sorted_texts(tiny_clip: CLIP) -> None:
    texts = [("a photo of a {}." if i % 2 else "{}").format(name) for i, name in enumerate(names(9))]
    assert difference(tiny_clip.encode_texts(texts), s5_text_batches.as_they_come(tiny_clip, texts, 4)) < 1e-5


def test_names_are_all_different() -> None:
    assert len(set(names(1000))) == 1000
