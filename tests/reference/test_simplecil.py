"""SimpleCIL, facts read at zhoudw-zdw/PROOF, commit 0bb2052 (models/simplecil.py).

A class's prototype is the mean of the projected, unnormalised features of its training pictures; scores are cosines.
"""

from __future__ import annotations

import torch

from clipcil.clip import CLIP
from clipcil.methods.base import NoConfig
from clipcil.methods.simplecil import SimpleCIL
from clipcil.training.trainer import Trainer
from support.features import learn_all, make_tasks, make_test


def test_score_is_the_reference(tiny_clip: CLIP) -> None:
    tasks, pictures = make_tasks(tiny_clip, [3, 2]), make_test(tiny_clip, 5)
    method = learn_all(SimpleCIL(NoConfig(), tiny_clip, Trainer()), tasks)
    features = torch.cat([task.pictures.features for task in tasks])
    labels = torch.cat([task.pictures.labels for task in tasks])
    expected = torch.empty(len(pictures), 5)
    for label in range(5):
        prototype = features[labels == label].mean(0)
        for row, feature in enumerate(pictures.features):
            expected[row, label] = feature @ prototype / (feature.norm() * prototype.norm())
    torch.testing.assert_close(method.logits(pictures), expected, atol=1e-5, rtol=0)  # type: ignore[arg-type]
