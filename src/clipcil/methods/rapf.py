"""RAPF (https://arxiv.org/abs/2407.14143): one linear adapter, fused with its predecessor after each task.

    score(x, c) = s · cos(A v(x), t_c),    v raw, t_c the frozen text

Both towers are frozen. The matrix A is trained with replay from Gaussians of the features before A is applied, so
nothing stored ever drifts. Old classes whose texts lie close to a new class are pushed away from it, and after each
task A is fused with the A before it, direction by direction.

Read at linlany/RAPF, commit 81d41df; `docs/baselines.md` lists what differs and compares whole runs. A starts as a
Kaiming-uniform matrix, not as the identity, as in that code.
"""

from collections.abc import Sequence

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.data.names import Template
from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.memory.gaussians import GaussianMemory
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, encode_classes
from clipcil.settings import Share, options
from clipcil.training.trainer import Training


@options
class RAPFConfig:
    """Defaults: the authors' code for CIFAR-100 (β = 2)."""

    adapter: Training = Training(
        epochs=15, lr=1e-3, batch_size=100, optimizer="adam", weight_decay=0, schedule="multistep", milestones=(4, 10)
    )
    """Training of A."""
    template: Template = "a good photo of a {}."
    """The sentence of a class."""
    replay_classes: PositiveInt = 2
    """Old classes replayed in a step; they take turns, in an order drawn anew for each epoch."""
    replay_each: PositiveInt = 20
    """Features drawn for each of them, the code's 10β."""
    replay_epoch: NonNegativeInt = 1900
    """Features replayed in an epoch, about; a task too small for that replays more classes in a step."""
    threshold: NonNegativeFloat = 0.55
    """τ: an old and a new class whose unit texts are closer than this are a hard pair."""
    pair_each: PositiveInt = 40
    """Features of the old class drawn for each hard pair in a step, the code's 20β."""
    margin: NonNegativeFloat = 0.1
    """Margin of the hinge loss on hard pairs."""
    fusion: Share = 0.6
    """b of the fusion: the minimum share of the new A in every entry; 1 takes the new A as it is."""
    widen: bool = False
    """Whether the Gaussians are widened before sampling (the code's `shrink`, on for ImageNet-R and CUB)."""


@register
class RAPF(Method):
    name = "rapf"
    title = "RAPF"
    Config = RAPFConfig
    keeps = "class Gaussians"
    config: RAPFConfig
    texts: Tensor  # (C, dim), unit length
    spreads: Tensor  # (C, 2): mean of the diagonal and of the rest of each Σ, for `widen`

    def build(self) -> None:
        self.memory = GaussianMemory()
        self.adapter = nn.Linear(self.dim, self.dim, bias=False, device=self.device)  # Kaiming-uniform is its default
        self.adapter.requires_grad_(False)
        self.growing_buffer("texts", self.dim)
        self.growing_buffer("spreads", 2)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, [self.config.template])

    def allocate(self, names: Sequence[str]) -> None:
        self.texts[self.old :] = encode_classes(self.clip, names, [self.config.template])

    def learn_task(self, task: Task) -> None:
        before = self.adapter.weight.detach().clone()
        self.train_adapter(task.pictures)
        with self.trainer.phase("statistics"), torch.no_grad():
            self.memory.add(self.by_new_class(task.pictures.features.double(), task.pictures.labels))
            for label in self.new_labels:
                self.spreads[label] = average_entries(self.memory.moments(label)[1])
        if self.old:
            with self.trainer.phase("fusion"), torch.no_grad():
                self.adapter.weight.copy_(fuse(before, self.adapter.weight, self.config.fusion))

    def logits(self, batch: Batch) -> Tensor:
        return self.score(batch.features)

    def score(self, features: Tensor) -> Tensor:
        """Raw features (B, dim) → s · cos(A v, t_c), (B, C)."""
        return self.clip.scale * normalize(self.adapter(features), dim=-1) @ self.texts.T

    def train_adapter(self, pictures: Pictures) -> None:
        """Cross-entropy over all classes seen on the task's and the replayed features, plus the hinge on hard pairs,
        mean max(0, m − cos(A x, t_i) + cos(A x, t_j)) over draws x of old classes i with a new class j near them."""
        features, labels, how, old = pictures.features, pictures.labels, self.config.adapter, self.old
        steps = -(-len(pictures) // how.batch_size)
        apart = torch.cdist(self.texts[:old], self.texts[old:], compute_mode="donot_use_mm_for_euclid_dist")
        pairs = torch.nonzero(apart < self.config.threshold).cpu() + torch.tensor([0, old])  # old, new: (P, 2)
        paired = pairs[:, 0].repeat_interleave(self.config.pair_each)  # the old class of every draw for a hard pair
        own, rival = (self.texts[column.to(self.texts.device)] for column in pairs.T)  # (P, dim) each
        wanted = round(self.config.replay_epoch / (steps * self.config.replay_each))
        each_step = min(old, max(self.config.replay_classes, wanted))
        drawn: list[tuple[Tensor, Tensor]] = []

        def draw() -> None:
            """Draw the replayed features of an epoch at once, which is faster than step by step."""
            if old:
                turns = torch.randperm(old)[torch.arange(steps * each_step) % old].view(steps, each_step)
                classes = turns.repeat_interleave(self.config.replay_each, dim=1)  # (steps, R)
                samples = self.replay(classes.flatten()).view(*classes.shape, -1)
                drawn[:] = zip(samples, classes.to(labels.device), strict=True)

        def loss(rows: Tensor) -> Tensor:
            inputs, targets = features[rows], labels[rows]
            if old:
                samples, classes = drawn.pop()
                inputs, targets = torch.cat([inputs, samples]), torch.cat([targets, classes])
            value = cross_entropy(self.score(inputs), targets)
            if len(pairs):  # many draws each, so not kept for a whole epoch
                turned = normalize(self.adapter(self.replay(paired)), dim=-1).view(len(pairs), -1, own.shape[1])
                lead = turned @ (own - rival)[:, :, None]  # cos(A x, t_i) − cos(A x, t_j), (P, n, 1)
                value = value + torch.relu(self.config.margin - lead.squeeze(2)).mean()
            return value

        self.trainer.fit("adapter", list(self.adapter.parameters()), len(pictures), loss, how, each_epoch=draw)

    def replay(self, classes: Tensor) -> Tensor:
        """One raw feature for each entry of `classes` (N,): (N, dim)."""
        samples = self.memory.sample(classes)
        if self.config.widen:
            samples = samples + widening(self.spreads[classes.to(self.spreads.device)], samples.shape[1])
        return samples


def average_entries(covariance: Tensor) -> Tensor:
    """(2,): mean of the diagonal, and of all other entries, of a covariance (d, d)."""
    dim, trace = len(covariance), covariance.trace()
    return torch.stack([trace / dim, (covariance.sum() - trace) / max(1, dim * (dim - 1))])


def widening(spreads: Tensor, dim: int) -> Tensor:
    """(N, d): draws from N(0, a I + b (11ᵀ − I)) for each (a, b) of `spreads` (N, 2), to be added to a class's draws.

    Σ' = Σ + a I + b (11ᵀ − I), where a and b are the means of Σ's diagonal and of the rest. The added matrix has the
    eigenvalue a + (d−1) b along 1 and a − b across it; both are ≥ 0 because Σ is positive semi-definite.
    """
    a, b = spreads[:, :1], spreads[:, 1:]
    noise = torch.randn(len(spreads), dim, device=spreads.device, dtype=spreads.dtype)
    along = noise.mean(1, keepdim=True)
    return (a - b).clamp(min=0).sqrt() * (noise - along) + (a + (dim - 1) * b).clamp(min=0).sqrt() * along


def fuse(old: Tensor, new: Tensor, bias: float) -> Tensor:
    """Decomposed parameter fusion of two matrices (d, d).

        W_old = U S Vᵀ,   R = S Vᵀ,   P = Uᵀ W_new,   Δ = |P − R|,
        m = min(Δ / max Δ + b, 1),   W = U (m ⊙ P + (1 − m) ⊙ R)

    In the directions U of the old matrix, entries that changed most are taken from the new one. Equal matrices have
    no largest change; they give W_old.
    """
    left, values, right = torch.linalg.svd(old.double(), full_matrices=False)
    before, after = values[:, None] * right, left.T @ new.double()
    change = (after - before).abs()
    if not bool(change.max() > 1e-12 * values.max()):  # a change of rounding alone
        return old.clone()
    mask = (change / change.max() + bias).clamp(max=1)
    fused: Tensor = left @ (mask * after + (1 - mask) * before)
    return fused.to(new.dtype)
