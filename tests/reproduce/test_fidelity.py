"""The rewrites of the published loops run, learn, and agree with ours on easy features."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.registry import find_method
from clipcil.prompts.templates import raw_sentences
from clipcil.training.trainer import Trainer
from reproduce.fidelity.__main__ import PUBLISHED
from reproduce.fidelity.proof import Attention
from reproduce.fidelity.stream import Features, Part, accuracy
from support.features import WORDS, draw, make_tasks

SIZES = [2, 3]
TEMPLATES = ("a photo of a {}.", "a drawing of a {}.")


def part(clip: CLIP, pictures: Any) -> Part:
    """With something that stands for the features before the projection."""
    back = torch.randn(clip.config.dim, clip.config.vision.width, generator=torch.Generator().manual_seed(5))
    pictures.pooled = pictures.features @ back
    return Part(pictures.features, pictures.pooled, pictures.labels, pictures)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_loop_and_ours_learn_the_same_easy_features(name: str, tiny_clip: CLIP) -> None:
    tasks = make_tasks(tiny_clip, SIZES, per_class=20)
    train = [part(tiny_clip, task.pictures) for task in tasks]
    labels = (torch.arange(0, 2), torch.arange(2, 5))
    test = [part(tiny_clip, draw(tiny_clip, own.repeat_interleave(8), seed=9)) for own in labels]
    sentences = raw_sentences(tiny_clip, WORDS[:5], TEMPLATES)
    data = Features(tiny_clip, train, test, SIZES, WORDS[:5], sentences)
    given = {"image_weight": 0.0} if name == "engine" else {"hidden": 32} if name == "clap4clip" else {}
    config = method_settings(RunSpec(method=name, data="cifar100"), given)
    for stage in ("train", "balance", "adapter", "adapters"):  # more steps than so few pictures would make
        if hasattr(config, stage):
            config = replace(config, **{stage: replace(getattr(config, stage), batch_size=8, lr=0.01)})
    torch.manual_seed(0)
    batched, alone = PUBLISHED[name](data, config)
    torch.manual_seed(0)
    method = find_method(name)(config, tiny_clip, Trainer(), TEMPLATES)
    for task in tasks:
        method.learn(task)
    ours = accuracy(data, lambda batch: method.logits(batch), 8)  # type: ignore[arg-type]
    assert min(batched, alone, ours) > 60, (batched, alone, ours)  # chance: 20
    assert abs(alone - ours) < 20


def test_attention_is_plain_self_attention() -> None:
    torch.manual_seed(0)
    block = Attention(16).eval()
    pictures, shared = torch.randn(3, 16), torch.randn(5, 16)
    fused = block(pictures, shared)
    for picture, one in zip(pictures, fused, strict=True):
        x = torch.cat([picture[None], shared])
        mixed = (block.q(x) @ block.k(x).T / 4).softmax(1) @ block.v(x)
        torch.testing.assert_close(one, block.norm(x + block.out(mixed)), atol=1e-5, rtol=1e-5)
