"""Zero-shot CLIP as the paper's row: "a photo of a {}." (its section 3.1) on every dataset, scores s · cos(v, t).

The sentences of the datasets, which other methods average over, are those of zhoudw-zdw/PROOF, commit 0bb2052
(utils/templates.json): 18 for CIFAR-100, 7 for ImageNet-R beginning with "itap of a {}.", 48 for UCF-101, 1 for
CUB-200.
"""

import importlib

import pytest
import torch
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.methods.zero_shot import ZeroShot, ZeroShotConfig
from clipcil.training.trainer import Trainer
from support.features import learn_all, make_tasks, make_test

LISTS = {
    "cifar100": ("cifar100", 18, "a photo of a {}.", "a photo of the big {}."),
    "imagenet-r": ("imagenet_r", 7, "itap of a {}.", "a photo of the small {}."),
    "ucf101": ("ucf101", 48, "a photo of a person {}.", "a demonstration of the person practicing {}."),
    "cub200": ("cub200", 1, "a photo of a {}, a type of bird.", "a photo of a {}, a type of bird."),
}


@pytest.mark.parametrize("data", LISTS)
def test_sentences_of_the_datasets_are_the_authors(data: str) -> None:
    module, count, first, last = LISTS[data]
    templates = importlib.import_module(f"clipcil.data.datasets.{module}").TEMPLATES
    assert (len(templates), templates[0], templates[-1]) == (count, first, last)
    assert len(set(templates)) == count and all(template.count("{}") == 1 for template in templates)


def test_score_is_the_reference(tiny_clip: CLIP) -> None:
    """One sentence, or with `ensemble` the mean over those of the dataset."""
    tasks, pictures = make_tasks(tiny_clip, [3, 2]), make_test(tiny_clip, 5)
    icons = ("an icon of a {}.", "a drawing of a {}.")
    for config, sentences in ((ZeroShotConfig(), ["a photo of a {}."]), (ZeroShotConfig(ensemble=True), icons)):
        method = learn_all(ZeroShot(config, tiny_clip, Trainer(), icons), tasks)
        texts = [normalize(tiny_clip.encode_texts([s.format(n) for s in sentences]), dim=-1) for n in method.names]
        unit = normalize(torch.stack(texts).mean(1), dim=-1)
        expected = tiny_clip.logit_scale.exp() * normalize(pictures.features, dim=-1) @ unit.T
        torch.testing.assert_close(method.logits(pictures), expected, atol=1e-4, rtol=1e-4)
