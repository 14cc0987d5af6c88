"""ENGINE (https://arxiv.org/abs/2503.08510): adapters for every task, a discriminant, re-ranking by descriptions.

    score = h·g + (1−h)·(r·d + (1−r)·cos(Σ_k a_k(v), Σ_k b_k(t_c)))

Both towers are frozen. Every task adds a linear adapter a_k for pictures and one, b_k, for texts. g is a linear
discriminant on the features before the projection; d re-ranks the best five classes by descriptions of pairs of classes
(from a language model, see `clipcil describe`); h and r are their shares.

Read at LAMDA-CL/ICCV25-ENGINE, commit 8803d66; `docs/baselines.md` lists what differs and compares whole runs. That
code clamps noisy pixels to [0, 1] although they are normalised, which blackens half of every picture; here they are not
clamped. Only descriptions of pairs of classes seen are used, in the text loss too: others would reveal the names of
classes that have not arrived yet.
"""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize, pad

from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.descriptions.file import Table, average_by_owner, encode_descriptions, read_descriptions, require_pairs
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
    """Defaults: the authors' code for CIFAR-100."""

    adapters: Training = Training(
        epochs=10, lr=0.05, batch_size=64, optimizer="sgd", weight_decay=0.05, schedule="cosine-epoch"
    )
    """Training of the two adapters of a task."""
    descriptions: Path | None = None
    """JSON file of pairwise descriptions. Without it: no text loss, no re-ranking."""
    text_weight: NonNegativeFloat = 2.0
    """a_t, weight of the text loss; needs descriptions."""
    image_weight: NonNegativeFloat = 0.5
    """a_v, weight of the image loss; 0 leaves it out."""
    pixel_noise: NonNegativeFloat = 0.25
    """Standard deviation of the noise added to preprocessed pictures for the image loss."""
    views: PositiveInt = 2
    """Noisy views of each picture, encoded once per task."""
    replay_noise: NonNegativeFloat = 0.25
    """σ of the noise around an old class's mean feature when it is replayed."""
    full_scale: bool = False
    """Multiply the cosines of the contrastive loss by exp(logit_scale), as CLIP does; off: by logit_scale."""
    head: Share = 0.8
    """h, share of the discriminant head in the final score."""
    covariance: Literal["averaged", "pooled"] = "averaged"
    """Of the head. averaged: the authors', inverses averaged over tasks; pooled: ours, exact over all pictures seen."""
    rerank: Share = 0.5
    """r, share of the re-ranking in the rest of the score; 0 without descriptions."""
    top: Annotated[int, Field(ge=2, le=50)] = 5
    """Number of best classes that are re-ranked."""


@register
class ENGINE(Method):
    name = "engine"
    title = "ENGINE"
    Config = ENGINEConfig
    scores = "cosine"
    keeps = "class means, covariance"
    config: ENGINEConfig
    sentences: Tensor  # (C, T, dim): raw texts of all templates, each adapted and normalised before their mean is taken
    classifier: Tensor  # (C, dim): adapted texts, averaged over templates, unit length
    prototypes: Tensor  # (C, dim): mean raw feature of each class
    pair_texts: Tensor  # (C, C, dim): mean raw sentence of D[a][b]

    def build(self) -> None:
        self.image_adapters, self.text_adapters = nn.ModuleList(), nn.ModuleList()  # a task each
        self.head = RunningHead(self.clip.config.vision.width, self.config.covariance == "averaged")
        self.growing_buffer("classifier", self.dim)
        self.growing_buffer("prototypes", self.dim)
        self.growing_buffer("sentences", len(self.templates), self.dim, persistent=False)
        self.register_buffer("pair_texts", torch.zeros(0, 0, self.dim, device=self.device))
        self._known: Table | None = None
        self._described: list[tuple[Tensor, Tensor]] = []  # a task each: raw sentences (S, dim), their pairs (S, 2)

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, self.templates)

    def allocate(self, names: Sequence[str]) -> None:
        for adapters in (self.image_adapters, self.text_adapters):
            adapters.append(nn.Linear(self.dim, self.dim, device=self.device).requires_grad_(False))
        self.sentences[self.old :] = raw_sentences(self.clip, names, self.templates)
        self.head.grow(len(names))
        if self.config.descriptions is not None:
            self.pair_texts = pad(self.pair_texts, (0, 0, 0, len(names), 0, len(names)))

    def learn_task(self, task: Task) -> None:
        with self.trainer.phase("descriptions"):
            described = self.encode_new_descriptions()
        with self.trainer.phase("noisy views"):
            views = self.noisy_views(task.pictures) if self.config.image_weight else None
        self.train_adapters(task.pictures, described, views)
        with self.trainer.phase("statistics"), torch.no_grad():
            pooled, labels = normalize(task.pictures.pooled.double(), dim=-1), task.pictures.labels
            groups = self.by_new_class(task.pictures.features, labels)
            self.prototypes[self.old :] = torch.stack([group.mean(0) for group in groups])
            self.head.add(self.by_new_class(pooled, labels))
            self.classifier = ensemble(normalize(summed(self.text_adapters)(self.sentences), dim=-1))

    def logits(self, batch: Batch) -> Tensor:
        rest = cosines = normalize(summed(self.image_adapters)(batch.features), dim=-1) @ self.classifier.T  # (B, C)
        if self.config.descriptions is not None and self.seen > 1:
            ranked = rerank(normalize(batch.features, dim=-1), cosines, self.pair_texts, self.config.top)
            rest = self.config.rerank * ranked + (1 - self.config.rerank) * cosines
        head = normalize(self.head(normalize(batch.pooled, dim=-1)), dim=-1)
        return self.config.head * head + (1 - self.config.head) * rest

    def encode_new_descriptions(self) -> list[Tensor]:
        """Encode the descriptions that each task brings; return the unit sentences about each class, (S, dim) each."""
        if self.config.descriptions is None:
            return []
        if self._known is None:  # read once: the file may be moved while a run goes on
            self._known = read_descriptions(self.config.descriptions)
        require_pairs(self._known, self.names, self.config.descriptions)
        while len(self._described) < len(self.sizes):  # after a resume: earlier tasks too, in the same batches
            task = len(self._described)
            old, seen = sum(self.sizes[:task]), sum(self.sizes[: task + 1])
            places = [(a, b) for a, b in product(range(seen), repeat=2) if max(a, b) >= old]
            names = [(self.names[a], self.names[b]) for a, b in places]
            vectors, owners = encode_descriptions(self.clip, self._known, names)
            self._described.append((vectors, torch.tensor(places, device=vectors.device)[owners]))
        vectors, pairs = self._described[-1]
        unique, owners = torch.unique(pairs, dim=0, return_inverse=True)
        self.pair_texts[unique[:, 0], unique[:, 1]] = average_by_owner(vectors, owners, len(unique)).to(self.pair_texts)
        every = normalize(torch.cat([vectors for vectors, _ in self._described]), dim=-1)
        subject = torch.cat([pairs[:, 0] for _, pairs in self._described])
        return [every[subject == label] for label in range(self.seen)]

    @torch.no_grad()
    def noisy_views(self, pictures: Pictures) -> Tensor:
        """(views, N, dim): unit features of the task's pictures with noise on their pixels."""

        def encode(pixels: Tensor) -> Tensor:
            noisy = pixels + self.config.pixel_noise * torch.randn_like(pixels)
            return normalize(self.clip.vision(noisy, class_only=True).features.float(), dim=-1)

        views = [[encode(block.pixels) for block in pictures.batches(NOISY_BLOCK)] for _ in range(self.config.views)]
        return torch.stack([torch.cat(view) for view in views])

    def train_adapters(self, pictures: Pictures, described: list[Tensor], views: Tensor | None) -> None:
        """L_clip + a_t L_text + a_v L_img. Only the adapters of this task move."""
        features, labels, old, device = pictures.features, pictures.labels, self.old, self.device
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
            if len(pool) and self.config.text_weight:  # a description for each target, replayed classes too
                drawn = (torch.rand(len(targets), device=device) * sizes[targets]).long() + starts[targets]
                value = value + self.config.text_weight * info_nce(texts[targets], pool[drawn])
            if views is not None:
                view = torch.randint(len(views), (len(rows),), device=device)
                value = value + self.config.image_weight * info_nce(adapted[: len(rows)], views[view, rows])
            return value

        trained = [*self.image_adapters[-1].parameters(), *self.text_adapters[-1].parameters()]
        self.trainer.fit("adapters", trained, len(pictures), loss, self.config.adapters)

    def notes(self) -> list[str]:
        if self.config.descriptions is not None:
            return []
        return ["ENGINE ran without descriptions of the classes: no text loss, no re-ranking (see clipcil describe)"]


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
