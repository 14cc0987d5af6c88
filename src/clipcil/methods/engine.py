"""ENGINE: linear adapters for every task, a discriminant head, and re-ranking by descriptions of the classes.

https://arxiv.org/abs/2503.08510

Both towers are frozen. Every task adds one linear adapter for pictures and one for texts; the outputs of all tasks are
summed. A linear discriminant head on the features before the projection has most of the weight in the score, and
descriptions of pairs of classes (from a language model, see `clipcil describe`) re-rank the best five.

"External Knowledge Injection for CLIP-Based Class-Incremental Learning". Read at LAMDA-CL/ICCV25-ENGINE, commit
8803d66; `docs/baselines.md` compares whole runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.descriptions.file import Descriptions, average_by_owner, encode_descriptions
from clipcil.heads.lda import RunningHead
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, ensemble, raw_sentences
from clipcil.settings import Share, options
from clipcil.training.losses import clip_loss
from clipcil.training.trainer import Training

NOISY_BLOCK = 128
"""Noisy pictures per tower pass."""


@options
class ENGINEConfig:
    """The defaults are those of the authors' code for CIFAR-100."""

    adapters: Training = field(
        default_factory=lambda: Training(
            epochs=10, lr=0.05, batch_size=64, optimizer="sgd", weight_decay=0.05, schedule="cosine-epoch"
        )
    )
    """Training the two adapters of a task: SGD with momentum 0.9, a cosine to 0 that is lowered once an epoch."""
    descriptions: Path | None = None
    """JSON file of pairwise descriptions. Without it: no text loss, no re-ranking."""
    text_weight: NonNegativeFloat = 2.0
    """a_t, weight of the text loss; needs descriptions."""
    image_weight: NonNegativeFloat = 0.5
    """a_v, weight of the image loss; 0 leaves it out."""
    pixel_noise: NonNegativeFloat = 0.25
    """Standard deviation of the noise added to preprocessed pictures for the image loss."""
    views: PositiveInt = 2
    """Noisy views of each picture, encoded once per task. The code encodes a new one at every step."""
    replay_noise: NonNegativeFloat = 0.25
    """σ of the noise around an old class's mean feature when it is replayed."""
    full_scale: bool = False
    """Multiply the cosines of the contrastive loss by exp(logit_scale) (100) as CLIP does; off: by logit_scale (4.6),
    as the code does, for which its other values were chosen."""
    head: Share = 0.8
    """Share of the discriminant head in the final score."""
    covariance: Literal["averaged", "pooled"] = "averaged"
    """The head's covariance. averaged: the authors', inverse covariances averaged over tasks by their share of the
    classes, scores not centred; pooled: ours, the exact covariance of all pictures seen, scores centred. The latter is
    stronger and is not ENGINE as published; the method `engine-pooled` uses it."""
    rerank: Share = 0.5
    """Share of the re-ranking in the rest of the score; 0 without descriptions."""
    top: Annotated[int, Field(ge=2, le=50)] = 5
    """Number of best classes that are re-ranked."""


@register
class ENGINE(Method):
    """score = h·g + (1−h)·(r·d + (1−r)·cos(Σ_k a_k(v), Σ_k b_k(t_c))); g: head, d: re-ranking, h and r their shares.

    t_c: raw text features; every template is adapted and normalised by itself before the mean over templates is taken.

    What differs from the code:
    - The noise of the image loss is not followed by a clamp to [0, 1]: the code clamps pixels that are normalised
      already, which blackens half of every picture. `views` noisy pictures are drawn a task, not a new one every step.
    - Descriptions D[a][b] are averaged where the code draws one at random, three times for every test batch, so that a
      picture's score is the same every time.
    - Only descriptions of pairs of classes seen are used, in the text loss too: others would reveal the names of
      classes that have not arrived yet.
    - The head is computed in float64.
    """

    name = "engine"
    title = "ENGINE"
    Config = ENGINEConfig
    scores = "cosine"
    keeps = "class means, covariance"
    config: ENGINEConfig
    sentences: Tensor  # (C, T, dim): raw texts of all templates; not in the checkpoint, they follow from the names
    classifier: Tensor  # (C, dim): adapted texts, averaged over templates, unit length
    prototypes: Tensor  # (C, dim): mean raw feature of each class
    pair_texts: Tensor  # (C, C, dim): mean raw sentence of D[a][b]

    def build(self) -> None:
        dim = self.dim
        self.image_adapters, self.text_adapters = nn.ModuleList(), nn.ModuleList()
        for name in ("classifier", "prototypes"):
            self.growing_buffer(name, dim)
        self.head = RunningHead(self.clip.config.vision.width, self.config.covariance == "averaged", self.device)
        self.register_buffer("sentences", torch.zeros(0, 0, dim, device=self.device), persistent=False)
        self.register_buffer("pair_texts", torch.zeros(0, 0, dim, device=self.device))
        self._known: Descriptions | None = None
        self._described: list[tuple[Tensor, Tensor]] = []  # a task each: raw sentences (S, dim), their pairs (S, 2)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, self.templates)

    def allocate(self, names: Sequence[str]) -> None:
        dim, added = self.dim, len(names)
        for adapters in (self.image_adapters, self.text_adapters):
            adapters.append(nn.Linear(dim, dim, device=self.device).requires_grad_(False))
        texts = raw_sentences(self.clip, names, self.templates)
        self.sentences = torch.cat([self.sentences, texts]) if len(self.sentences) else texts
        self.head.grow(added)
        if self.config.descriptions is not None:
            self.pair_texts = nn.functional.pad(self.pair_texts, (0, 0, 0, added, 0, added))

    def learn_task(self, task: Task) -> None:
        phase, pictures = self.trainer.phase, task.pictures
        with phase("descriptions"):
            described = self.encode_new_descriptions()
        with phase("noisy views"):
            views = self.noisy_views(pictures) if self.config.image_weight else None
        self.train_adapters(pictures, described, views)
        with phase("statistics"), torch.no_grad():
            self.add_statistics(pictures)
            self.classifier = ensemble(normalize(summed(self.text_adapters)(self.sentences), dim=-1))

    def notes(self) -> list[str]:
        if self.config.descriptions is None:
            return [
                "ENGINE ran without descriptions of the classes: no text loss, no re-ranking (see clipcil describe)"
            ]
        return []

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        features, share = batch.features, self.config.head
        cosines = normalize(summed(self.image_adapters)(features), dim=-1) @ self.classifier.T  # (B, C)
        rest = cosines
        if self.config.descriptions is not None and self.seen > 1:
            ranked = rerank(normalize(features, dim=-1), cosines, self.pair_texts, self.config.top)
            rest = self.config.rerank * ranked + (1 - self.config.rerank) * cosines
        return share * normalize(self.head(normalize(batch.pooled, dim=-1)), dim=-1) + (1 - share) * rest

    def encode_new_descriptions(self) -> list[Tensor]:
        """Encode the descriptions that each task brings; return the unit sentences about each class, (S, dim) each."""
        if self.config.descriptions is None:
            return []
        if self._known is None:
            self._known = Descriptions.read(self.config.descriptions)
        self._known.require(self.names)
        while len(self._described) < len(self.sizes):  # after a resume: those of earlier tasks, in the same batches
            self._described.append(self.encode_task(self._known, len(self._described)))
        vectors, pairs = self._described[-1]
        places, owners = torch.unique(pairs, dim=0, return_inverse=True)
        self.pair_texts[places[:, 0], places[:, 1]] = average_by_owner(vectors, owners, len(places)).to(self.pair_texts)
        every = normalize(torch.cat([vectors for vectors, _ in self._described]), dim=-1)
        subject = torch.cat([pairs[:, 0] for _, pairs in self._described])
        return [every[subject == label] for label in range(self.seen)]

    def encode_task(self, known: Descriptions, task: int) -> tuple[Tensor, Tensor]:
        """Raw sentences (S, dim) of all pairs that a task brings, and the two classes (S, 2) of each."""
        old, seen = sum(self.sizes[:task]), sum(self.sizes[: task + 1])
        places = [(a, b) for a, b in product(range(seen), repeat=2) if max(a, b) >= old]
        vectors, owners = encode_descriptions(self.clip, known, [(self.names[a], self.names[b]) for a, b in places])
        return vectors, torch.tensor(places, device=vectors.device)[owners]

    @torch.no_grad()
    def noisy_views(self, pictures: Pictures) -> Tensor:
        """(views, N, dim): unit features of the task's pictures with noise on their pixels."""

        def encode(block: Pictures) -> Tensor:
            pixels = block.pixels
            noisy = pixels + self.config.pixel_noise * torch.randn_like(pixels)
            return normalize(self.clip.vision(noisy, class_only=True).features.float(), dim=-1)

        return torch.stack(
            [torch.cat([encode(block) for block in pictures.batches(NOISY_BLOCK)]) for _ in range(self.config.views)]
        )

    def train_adapters(self, pictures: Pictures, described: list[Tensor], views: Tensor | None) -> None:
        """L_clip + a_t L_text + a_v L_img. Only the adapters of this task move."""
        features, labels = pictures.features, pictures.labels
        old, device = self.old, self.device
        scale = self.clip.scale if self.config.full_scale else self.clip.logit_scale
        image, text = summed(self.image_adapters), summed(self.text_adapters)
        pool = torch.cat(described) if described else torch.zeros(0, features.shape[1])
        sizes = torch.tensor([len(vectors) for vectors in described], device=device)
        starts = sizes.cumsum(0) - sizes
        replayed = torch.arange(old, device=device)

        def loss(rows: Tensor) -> Tensor:
            noise = self.config.replay_noise * torch.randn(old, features.shape[1], device=device)
            adapted = normalize(image(torch.cat([features[rows], self.prototypes[:old] + noise])), dim=-1)
            texts = normalize(text(self.sentences[:, 0]), dim=-1)  # (C, dim)
            targets = torch.cat([labels[rows], replayed])
            value = clip_loss(scale * adapted @ texts.T, targets)
            if len(pool) and self.config.text_weight:  # a description for each target, those of replayed classes too
                drawn = (torch.rand(len(targets), device=device) * sizes[targets]).long() + starts[targets]
                value = value + self.config.text_weight * info_nce(texts[targets], pool[drawn])
            if views is not None:
                view = torch.randint(len(views), (len(rows),), device=device)
                value = value + self.config.image_weight * info_nce(adapted[: len(rows)], views[view, rows])
            return value

        trained = [*self.image_adapters[-1].parameters(), *self.text_adapters[-1].parameters()]
        self.trainer.fit("adapters", trained, len(pictures), loss, self.config.adapters)

    def add_statistics(self, pictures: Pictures) -> None:
        """Mean raw features for replay, and the head."""
        features, pooled, labels = pictures.features, normalize(pictures.pooled.double(), dim=-1), pictures.labels
        for label in self.new_labels:
            self.prototypes[label] = features[labels == label].mean(0)
        self.head.add([pooled[labels == label] for label in self.new_labels])


@options
class ENGINEPooledConfig(ENGINEConfig):
    covariance: Literal["averaged", "pooled"] = "pooled"


@register
class ENGINEPooled(ENGINE):
    """ENGINE with our head: the exact pooled covariance of all pictures seen. Not the published method."""

    name = "engine-pooled"
    title = "ENGINE (pooled head)"
    presets = "engine"
    Config = ENGINEPooledConfig


def summed(adapters: nn.ModuleList) -> Callable[[Tensor], Tensor]:
    """Σ_k a_k(x) for x (N, dim): a sum of linear maps is one linear map. The sum without the newest is made once."""
    *older, last = (cast(nn.Linear, adapter) for adapter in adapters)
    weight = sum((adapter.weight for adapter in older), torch.zeros_like(last.weight)).detach()
    bias = sum((adapter.bias for adapter in older), torch.zeros_like(last.bias)).detach()
    return lambda inputs: linear(inputs, weight + last.weight, bias + last.bias)


def info_nce(anchors: Tensor, keys: Tensor) -> Tensor:
    """−log exp(a_i·k_i) / Σ_j exp(a_i·k_j), averaged over i; unit anchors and keys, (B, dim) each. Temperature 1."""
    return cross_entropy(anchors @ keys.T, torch.arange(len(anchors), device=anchors.device))


def rerank(pictures: Tensor, scores: Tensor, pair_texts: Tensor, top: int) -> Tensor:
    """(B, C): for each of the `top` best classes a of a row, how well the picture fits what tells a from the others.

        d_a = v · normalise(mean over b in best, b ≠ a, of e_ab);   0 for a class that is not among the best

    Args:
        pictures: (B, dim) v, unit, not adapted.
        scores: (B, C), by which the best are found.
        pair_texts: (C, C, dim) e, raw.
        top: Number of classes that are re-ranked.
    """
    count = min(top, scores.shape[1])
    best = scores.topk(count, dim=1).indices  # (B, T)
    pairs = pair_texts[best[:, :, None], best[:, None, :]]  # (B, T, T, dim)
    itself = torch.eye(count, dtype=torch.bool, device=pairs.device)[..., None]
    about = normalize(pairs.masked_fill(itself, 0.0).sum(2) / (count - 1), dim=-1)  # (B, T, dim)
    return torch.zeros_like(scores).scatter(1, best, (about @ pictures[:, :, None]).squeeze(2))
