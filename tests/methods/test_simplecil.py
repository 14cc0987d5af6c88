"""SimpleCIL: the nearest class mean by cosine, of raw features (zhoudw-zdw/PROOF, commit 0bb2052)."""

import numpy as np
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import NearestCentroid

from clipcil.clip import CLIP
from clipcil.methods.base import NoConfig
from clipcil.methods.simplecil import SimpleCIL
from clipcil.training.trainer import Trainer
from support.features import learn_all, make_tasks, make_test


def test_equals_scikit_learn(tiny_clip: CLIP) -> None:
    tasks = make_tasks(tiny_clip, [3, 1, 4], per_class=[12, 1, 2, 5, 9, 3, 30, 7])
    method = learn_all(SimpleCIL(NoConfig(), tiny_clip, Trainer()), tasks)
    features = np.concatenate([task.pictures.features.double().numpy() for task in tasks])
    labels = np.concatenate([task.pictures.labels.numpy() for task in tasks])
    centroids = NearestCentroid().fit(features, labels).centroids_  # means of raw features, one for each class
    pictures = make_test(tiny_clip, 8)
    expected = cosine_similarity(pictures.features.double().numpy(), centroids)
    ours = method.logits(pictures)
    np.testing.assert_allclose(ours.numpy(), expected, atol=1e-5)
    assert (ours.argmax(1).numpy() == expected.argmax(1)).all()
