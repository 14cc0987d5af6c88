"""Strata: closed-form heads on features from several depths of the frozen tower, mixed by leave-one-out.

    logits = a · discriminant(x) + b · ridge([x, ReLU(R x)]) + c · CLIP's text logits,    x: levels of the tower

Our own method, not in the paper. Nothing has to be set for a dataset or a backbone. Its parts are known:

- Features from several depths of a frozen tower (LayUP, https://arxiv.org/abs/2312.08888): features that later layers
  discard still distinguish classes, and the tower never changes, so nothing has to be calibrated.
- A linear discriminant, a ridge regression on the features and random ReLU features of them (RanPAC,
  https://arxiv.org/abs/2307.02251), and CLIP's texts.
- Ridge parameters and the weights a, b, c are chosen on exact leave-one-out scores (stacked generalisation).
- The features are stored with one byte per number (`memory/rows.py`), in fewer bytes than the Gaussians of DMC-OT.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("strata", data="emoji", tasks=10)
    >>> experiment.learn(next(iter(experiment)))
    >>> experiment.evaluate().last
    100.0
"""

from collections.abc import Sequence
from dataclasses import field

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.data.reader import Batch
from clipcil.data.tasks import Task
from clipcil.heads.lda import Background, fit_rows, relative_distance
from clipcil.heads.stacked import Head, fit_ridge, mix, spreads
from clipcil.memory.rows import FeatureRows
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, encode_classes
from clipcil.settings import options


@options
class StrataConfig:
    random_features: PositiveInt = field(default=2048, metadata={"in_checks": 64})
    """Random ReLU features beside the linear ones; more are slightly better, and the work grows with their square."""
    rows_per_dim: PositiveInt = 2
    """Pictures of a class whose features are kept, for each dimension of the joint space."""
    leave_one_out_rows: PositiveInt = 1500
    """Stored pictures, equally many of each class, on which the ridge parameters and the weights are chosen."""


@register
class Strata(Method):
    name = "strata"
    title = "Strata"
    Config = StrataConfig
    keeps = "features, one byte a number"
    keeps_exemplars = True
    config: StrataConfig
    texts: Tensor  # (C, dim): unit
    discriminant: Tensor  # (C, 1 + D): bias, weight
    ridge: Tensor  # (C, 1 + D + F): bias, weight
    centre: Tensor  # (D,): mean of the memory
    scale: Tensor  # (D,): 1 / (deviation · √D)
    weights: Tensor  # (3,): a, b, c
    directions: Tensor  # (D, F): R, the same everywhere
    penalties: Tensor  # (2,) float64: of the discriminant and of the regression, as chosen
    background: Tensor  # (C, C): see `heads.lda.Background`

    def build(self) -> None:
        sizes = self.clip.vision.level_sizes
        levels, count = sum(sizes), self.config.random_features
        self.memory = FeatureRows(sizes, self.config.rows_per_dim * self.dim).to(self.device)
        self.growing_buffer("texts", self.dim)
        self.growing_buffer("discriminant", 1 + levels)
        self.growing_buffer("ridge", 1 + levels + count)
        self.register_buffer("centre", torch.zeros(levels, device=self.device))
        self.register_buffer("scale", torch.ones(levels, device=self.device))
        self.register_buffer("weights", torch.ones(3, device=self.device))
        self.register_buffer("penalties", torch.ones(2, dtype=torch.float64, device=self.device))
        self.register_buffer("background", torch.zeros(0, 0, device=self.device))
        # The same numbers wherever the method is built: a checkpoint leaves the directions out.
        directions = torch.randn(levels, count, generator=torch.Generator().manual_seed(0))
        self.register_buffer("directions", directions.to(self.device), persistent=False)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, self.templates)

    def allocate(self, names: Sequence[str]) -> None:
        self.texts[self.old :] = encode_classes(self.clip, names, self.templates)
        self.background = self.background.new_zeros(self.seen, self.seen)

    def learn_task(self, task: Task) -> None:
        """The same bits as if all pictures had been learnt at once: the heads are fitted to the memory from scratch."""
        self.memory.add(task.pictures.levels, task.pictures.labels)
        self.fit()

    learn_again = learn_task

    def forget(self, index: int) -> None:
        """As if the class had never been learnt."""
        self.drop_class(index)
        self.memory.remove(index)
        self.background = self.background.new_zeros(self.seen, self.seen)
        if self.seen:
            self.fit()

    def logits(self, batch: Batch) -> Tensor:
        rows = self.memory.unit(batch.levels)
        scores = (self.discriminant_scores(rows), self.ridge_scores(rows), self.text_scores(batch.features))
        return torch.einsum("h,hbc->bc", self.weights, torch.stack(scores))

    def novelty(self, batch: Batch) -> Tensor:
        """The distance to the nearest class, relative to one Gaussian of everything (`heads.lda.Background`)."""
        scores = self.discriminant_scores(self.memory.unit(batch.levels))
        return relative_distance(scores, self.discriminant[:, 0], self.background)

    def discriminant_scores(self, rows: Tensor) -> Tensor:
        """(B, C) for unit levels (B, D)."""
        return (rows - self.centre) @ self.discriminant[:, 1:].T + self.discriminant[:, 0]

    def ridge_scores(self, rows: Tensor) -> Tensor:
        """(B, C) for unit levels (B, D)."""
        return self.expand(rows - self.centre) @ self.ridge[:, 1:].T + self.ridge[:, 0]

    def expand(self, rows: Tensor) -> Tensor:
        """Centred levels (B, D) → (B, D + F): standardised, and random ReLU features of comparable size."""
        scaled = rows * self.scale
        hidden = torch.relu(scaled @ self.directions) / self.directions.shape[1] ** 0.5
        return torch.cat([scaled, hidden], dim=1)

    def text_scores(self, features: Tensor) -> Tensor:
        return self.clip.scale * normalize(features, dim=-1) @ self.texts.T

    @torch.no_grad()
    def fit(self) -> None:
        """Fit everything to the memory; nothing of earlier fits is used."""
        rows, labels = self.memory.rows(), self.memory.labels
        self.centre = rows.mean(0)
        rows = rows - self.centre
        deviation = rows.square().mean(0).sqrt().clamp(min=1e-6)
        self.scale = 1 / (deviation * len(deviation) ** 0.5)
        left_out_rows = self.choose_rows(labels)
        discriminant = fit_rows(rows, labels, self.seen, left_out_rows)
        ridge = fit_ridge(self.expand(rows), labels, self.seen, left_out_rows)
        self.discriminant, self.ridge = as_rows(discriminant).to(rows), as_rows(ridge).to(rows)
        self.penalties = torch.tensor([discriminant.penalty, ridge.penalty]).to(self.penalties)
        self.weights = torch.ones_like(self.weights)
        if self.seen > 1:
            self.weights = self.choose_weights(rows, discriminant.left_out, ridge.left_out, left_out_rows).to(rows)
        self.background = Background.of(discriminant, self.memory.counts).matrix.to(self.background)

    def choose_weights(self, rows: Tensor, discriminant: Tensor, ridge: Tensor, left_out_rows: Tensor) -> Tensor:
        """(3,): the weights that make the left-out pictures likeliest. With one picture per class none can be left out;
        then the scores of the three get the same spread over the memory, which is also where `mix` starts."""
        if len(left_out_rows):
            texts = self.kept_text_scores(rows[left_out_rows])
            return mix([discriminant, ridge, texts.double()], self.memory.labels[left_out_rows])
        kept = rows + self.centre
        tables = (self.discriminant_scores(kept), self.ridge_scores(kept), self.kept_text_scores(rows))
        return 1 / spreads(tables)

    def kept_text_scores(self, rows: Tensor) -> Tensor:
        """Text logits (B, C) of centred rows (B, D) of the memory, whose last part is projected to the joint space."""
        pooled = (rows + self.centre)[:, -self.clip.config.vision.width :]
        return self.text_scores(self.clip.vision.visual_projection(pooled))

    @torch.no_grad()
    def leave_one_out(self, batch: Batch, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) and `novelty` (B,) of pictures that were learnt as `labels` (B,), each by heads without it.

        Penalties and weights are those of all pictures. A picture that is alone in its class gets the lowest score for
        it, and its distance to the nearest other class; one that the memory does not keep was not used by the heads and
        is scored like any other picture.
        """
        logits, strange = self.logits(batch), self.novelty(batch)
        places, many = self.memory.find(batch.levels, labels), self.memory.counts[labels] > 1
        alone, kept = (torch.nonzero((places >= 0) & each).flatten() for each in (~many, many))
        if len(alone):
            logits[alone, labels[alone]] = logits[alone].amin(1) - 1
            if self.seen > 1:
                scores = self.discriminant_scores(self.memory.unit(batch.levels)[alone])
                others = scores.scatter(1, labels[alone, None], -torch.inf)
                strange[alone] += 2 * (scores.amax(1) - others.amax(1))
        if len(kept):
            rows, own = self.memory.rows() - self.centre, self.memory.labels
            first, second = self.penalties.tolist()
            head = fit_rows(rows, own, self.seen, places[kept], [first])
            everything = Background.of(head, self.memory.counts).left_out(head, len(rows))
            strange[kept] = (-2 * head.left_out.amax(1) - everything).to(strange)
            if self.seen > 1:
                ridge = fit_ridge(self.expand(rows), own, self.seen, places[kept], [second])
                texts = self.kept_text_scores(rows[places[kept]]).double()
                scores = torch.stack([head.left_out, ridge.left_out, texts])
                logits[kept] = torch.einsum("h,hbc->bc", self.weights.double(), scores).to(logits)
        return logits, strange

    def choose_rows(self, labels: Tensor) -> Tensor:
        """(R,): the first rows of each class that has two or more. The memory is in the order of hashes, so these are a
        sample."""
        counts = self.memory.counts
        place = torch.arange(len(labels), device=labels.device) - (counts.cumsum(0) - counts)[labels]
        share = max(1, self.config.leave_one_out_rows // self.seen)
        return torch.nonzero((place < share) & (counts[labels] > 1)).flatten()


def as_rows(head: Head) -> Tensor:
    """(C, 1 + D): bias and weight of a head."""
    return torch.cat([head.bias[:, None], head.weight.T], dim=1)
