"""Crops and flips in training: another result than without, the same for the same seed, and no part in scoring."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from clipcil.experiment.spec import RunSpec, method_settings
from clipcil.methods.base import Method
from clipcil.methods.coda_prompt import CODAPrompt
from clipcil.methods.dmc import DMC, DMCConfig
from clipcil.methods.dualprompt import DualPrompt
from clipcil.methods.l2p import L2P
from clipcil.training.augment import Augment
from clipcil.training.trainer import Training
from support.visual_stream import FAST, all_tests, learnt, stream, tower


@pytest.mark.parametrize("kind", [L2P, DualPrompt, CODAPrompt])
def test_augmented_training(kind: type[Method]) -> None:
    clip = tower()
    source = stream(clip, (2, 2), each=3)
    pictures = all_tests(source)

    def scores(how: Augment) -> torch.Tensor:
        config = replace(kind.Config(), train=replace(FAST, epochs=1, augment=how))
        method = learnt(kind, config, clip, source, tasks=2)
        with torch.no_grad():
            first = method.logits(pictures)
            assert torch.equal(first, method.logits(pictures))  # nothing is drawn when pictures are scored
        return first

    plain, cropped = scores("none"), scores("crop")
    assert not torch.allclose(plain, cropped, atol=1e-4)
    assert torch.equal(cropped, scores("crop"))


@pytest.mark.parametrize("name", ["l2p", "dualprompt", "coda-prompt"])
def test_it_is_an_option_of_the_command_line(name: str) -> None:
    config = method_settings(RunSpec(method=name), {"train": {"augment": "flip"}})
    assert config.train.augment == "flip"


@pytest.mark.parametrize("together", [False, True])
def test_the_tower_of_dmc_sees_augmented_pictures_in_either_way_of_training(together: bool) -> None:
    def weights(how: Augment) -> torch.Tensor:
        clip = tower().with_own_vision_tower()
        stages = {"stage1": replace(FAST, epochs=1, augment=how), "stage2": Training(epochs=1)}
        learnt(DMC, DMCConfig(simultaneous=together, **stages), clip, stream(clip, (2, 2), each=3), tasks=1)
        return clip.vision.visual_projection.weight.clone()

    assert not torch.equal(weights("none"), weights("crop"))
    assert torch.equal(weights("crop"), weights("crop"))
