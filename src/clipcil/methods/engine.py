"""ENGINE: "External Knowledge Injection for CLIP-Based Class-Incremental Learning".

Both towers are frozen. Every task adds one linear adapter for pictures and one for texts; the outputs of all tasks are
summed. A linear discriminant head on the features before the projection carries most of the score, and descriptions of
pairs of classes (from a language model, see `clipcil describe`) re-rank the best five.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, normalize

from clipcil.data.batch import Batch
from clipcil.data.reader import Pictures
from clipcil.data.stream import Task
from clipcil.descriptions.file import Descriptions, average_by_owner, encode_descriptions
from clipcil.heads.discriminant import DiscriminantHead
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import encode_classes
from clipcil.settings import within
from clipcil.training.loop import Training
from clipcil.training.losses import clip_loss

NOISY_BLOCK = 128
"""Noisy pictures per tower pass."""


@dataclass(frozen=True)
class ENGINEConfig:
    """The defaults are those of the authors' code for CIFAR-100."""

    adapters: Training = field(
        default_factory=lambda: Training(epochs=10, lr=0.05, batch_size=64, optimizer="sgd", weight_decay=0.05)
    )
    """Training the two adapters of a task: SGD with momentum 0.9, cosine to 0."""
    descriptions: Path | None = None
    """JSON file of pairwise descriptions. Without it: no text loss, no re-ranking."""
    text_weight: float = 2.0
    """a_t, weight of the text loss; needs descriptions."""
    image_weight: float = 0.5
    """a_v, weight of the image loss; 0 leaves it out."""
    pixel_noise: float = 0.25
    """Deviation of the noise added to preprocessed pictures for the image loss."""
    views: int = 2
    """Noisy views of each picture, encoded once per task. The code encodes a new one at every step."""
    replay_noise: float = 0.25
    """σ of the noise around an old class's mean feature when it is replayed."""
    full_scale: bool = False
    """Multiply the cosines of the contrastive loss by exp(logit_scale) (100) as CLIP does; off: by logit_scale (4.6),
    as the code does and its other values suppose."""
    head: float = 0.8
    """Share of the discriminant head in the final score."""
    rerank: float = 0.5
    """Share of the descriptions in what is left; 0 without descriptions."""
    top: int = 5
    """How many of the best classes are re-ranked."""

    def __post_init__(self) -> None:
        for name in ("text_weight", "image_weight", "pixel_noise", "replay_noise"):
            within(name, getattr(self, name), 0)
        within("views", self.views, 1)
        within("head", self.head, 0, 1)
        within("rerank", self.rerank, 0, 1)
        within("top", self.top, 2, 50)


@register
class ENGINE(Method):
    """score = h·g + (1−h)·(r·d + (1−r)·cos(Σ_k a_k(v), Σ_k b_k(t_c))); g: head, d: re-ranking, h and r their shares.

    Three things differ from the code. The noise of the image loss is not followed by its clamp of already normalised
    pixels to [0, 1], which blackens half of every picture. The head's covariance is the exact pooled one of all
    pictures seen, kept as a running sum, where the code averages inverses over tasks. Descriptions are averaged where
    the code draws three at random for every test batch, so a picture's score is the same every time. Only
    descriptions between classes seen are used: those of later classes would tell their names too early.
    """

    name = "engine"
    title = "ENGINE"
    Config = ENGINEConfig
    scores = "cosine"
    keeps = "class means, covariance"
    config: ENGINEConfig
    texts: Tensor  # (C, dim): unit, first template; what the adapters are trained on
    ensembles: Tensor  # (C, dim): unit, all templates; what is scored
    prototypes: Tensor  # (C, dim): mean raw feature of each class
    pair_texts: Tensor  # (C, C, dim): mean unit sentence of D[a][b]

    def build(self) -> None:
        dim = self.dim
        self.image_adapters, self.text_adapters = nn.ModuleList(), nn.ModuleList()
        for name in ("texts", "ensembles", "prototypes"):
            self.growing_buffer(name, dim)
        self.head = DiscriminantHead(self.clip.config.vision.width, self.device)
        self.register_buffer("pair_texts", torch.zeros(0, 0, dim, device=self.device))
        self._known: Descriptions | None = None

    def allocate(self, names: Sequence[str]) -> None:
        dim, added = self.dim, len(names)
        for adapters in (self.image_adapters, self.text_adapters):
            adapters.append(nn.Linear(dim, dim, device=self.device).requires_grad_(False))
        self.texts[self.old :] = encode_classes(self.clip, names, self.templates[:1])
        self.ensembles[self.old :] = encode_classes(self.clip, names, self.templates)
        self.head.grow(added)
        if self.config.descriptions is not None:
            self.pair_texts = nn.functional.pad(self.pair_texts, (0, 0, 0, added, 0, added))

    def learn_task(self, task: Task) -> None:
        phase, pictures = self.session.monitor.phase, task.pictures
        with phase("descriptions"):
            spoken = self.describe()
        with phase("noisy views"):
            views = self.noisy_views(pictures) if self.config.image_weight else None
        self.train_adapters(pictures, spoken, views)
        with phase("statistics"), torch.no_grad():
            self.add_statistics(pictures)

    def notes(self) -> list[str]:
        if self.config.descriptions is None:
            return [
                "ENGINE ran without descriptions of the classes: no text loss, no re-ranking (see clipcil describe)"
            ]
        return []

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        features, share = batch.features, self.config.head
        texts = normalize(summed(self.text_adapters)(self.ensembles), dim=-1)
        cosines = normalize(summed(self.image_adapters)(features), dim=-1) @ texts.T  # (B, C)
        rest = cosines
        if self.config.descriptions is not None and self.seen > 1:
            ranked = rerank(normalize(features, dim=-1), cosines, self.pair_texts, self.config.top)
            rest = self.config.rerank * ranked + (1 - self.config.rerank) * cosines
        return share * normalize(self.head(normalize(batch.pooled, dim=-1)), dim=-1) + (1 - share) * rest

    def describe(self) -> list[Tensor]:
        """Encode every description that the new classes bring; return those about each new class, (S, dim) each."""
        if self.config.descriptions is None:
            return []
        if self._known is None:
            self._known = Descriptions.read(self.config.descriptions)
        self._known.require(self.names)
        old, seen, dim = self.old, self.seen, self.dim
        places = [(a, b) for a, b in product(range(seen), repeat=2) if max(a, b) >= old]
        vectors, owners = encode_descriptions(
            self.clip, self._known, [(self.names[a], self.names[b]) for a, b in places]
        )
        index = torch.tensor(places, device=vectors.device)
        pair_texts = self.pair_texts.clone()
        pair_texts[index[:, 0], index[:, 1]] = average_by_owner(vectors, owners, len(places)).to(pair_texts)
        self.pair_texts = pair_texts.view(seen, seen, dim)
        subject = index[owners, 0]
        return [vectors[subject == label] for label in range(old, seen)]

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

    def train_adapters(self, pictures: Pictures, spoken: list[Tensor], views: Tensor | None) -> None:
        """L_clip + a_t L_text + a_v L_img. Only the adapters of this task move."""
        features, labels = pictures.features, pictures.labels
        old, device = self.old, self.device
        scale = self.clip.scale if self.config.full_scale else self.clip.logit_scale
        image, text = summed(self.image_adapters), summed(self.text_adapters)
        pool = torch.cat(spoken) if spoken else torch.zeros(0, features.shape[1])
        sizes = torch.tensor([len(vectors) for vectors in spoken], device=device)
        replayed = torch.arange(old, device=device)

        def loss(rows: Tensor) -> Tensor:
            noise = self.config.replay_noise * torch.randn(old, features.shape[1], device=device)
            adapted = normalize(image(torch.cat([features[rows], self.prototypes[:old] + noise])), dim=-1)
            texts = normalize(text(self.texts), dim=-1)  # (C, dim)
            targets = torch.cat([labels[rows], replayed])
            value = clip_loss(scale * adapted @ texts.T, targets)
            own = labels[rows]
            if len(pool) and self.config.text_weight:
                number = sizes[own - old]
                drawn = (torch.rand(len(rows), device=device) * number).long() + (sizes.cumsum(0) - sizes)[own - old]
                value = value + self.config.text_weight * info_nce(texts[own], pool[drawn])
            if views is not None:
                view = torch.randint(len(views), (len(rows),), device=device)
                value = value + self.config.image_weight * info_nce(adapted[: len(rows)], views[view, rows])
            return value

        trained = [*self.image_adapters[-1].parameters(), *self.text_adapters[-1].parameters()]
        self.session.fit("adapters", trained, len(pictures), loss, self.config.adapters)

    def add_statistics(self, pictures: Pictures) -> None:
        """Mean raw features for replay, and the head."""
        features, pooled, labels = pictures.features, normalize(pictures.pooled.double(), dim=-1), pictures.labels
        for label in self.new_labels:
            self.prototypes[label] = features[labels == label].mean(0)
        self.head.add([pooled[labels == label] for label in self.new_labels])


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

        d_a = mean over b in best, b ≠ a, of v · e_ab;   0 for a class that is not among the best

    pictures: (B, dim) unit, not adapted; scores: (B, C); pair_texts e: (C, C, dim).
    """
    count = min(top, scores.shape[1])
    best = scores.topk(count, dim=1).indices  # (B, T)
    pairs = pair_texts[best[:, :, None], best[:, None, :]]  # (B, T, T, dim)
    fits = (pairs @ pictures[:, None, :, None]).squeeze(3)
    fits = fits.masked_fill(torch.eye(count, dtype=torch.bool, device=fits.device), 0.0)
    return torch.zeros_like(scores).scatter(1, best, fits.sum(2) / (count - 1))
