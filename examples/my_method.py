"""Class means of whitened features (in the spirit of https://arxiv.org/abs/1909.01520): a method in a few lines.

clipcil run examples/my_method.py --tasks 5
clipcil bench --methods examples/my_method.py simplecil --data emoji
"""

import torch
from torch.nn.functional import normalize

import clipcil


class Whitened(clipcil.Method):
    """The nearest class mean, after the spread that all pictures share is divided out."""

    name, title, scores, keeps = "whitened", "Whitened means", "cosine", "class means, one covariance"

    def build(self) -> None:
        self.growing_buffer("means", self.dim)
        self.register_buffer("scatter", torch.eye(self.dim))

    def learn_task(self, task) -> None:
        features, labels = task.pictures.features, task.pictures.labels
        for label in self.new_labels:
            own = features[labels == label]
            self.means[label] = own.mean(0)
            self.scatter += (own - own.mean(0)).T @ (own - own.mean(0))

    def logits(self, batch):
        values, vectors = torch.linalg.eigh(self.scatter)
        whiten = vectors * (values + values.mean()).rsqrt()
        centre = self.means.mean(0)
        means = normalize((self.means - centre) @ whiten, dim=-1)
        return normalize((batch.features - centre) @ whiten, dim=-1) @ means.T
