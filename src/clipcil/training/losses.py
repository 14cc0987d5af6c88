"""Losses that several methods share, and the replay of old classes from their Gaussians."""

import math
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from clipcil.memory.gaussians import GaussianMemory
from clipcil.training.trainer import Training

BatchOf = Literal["new", "all"]

NEAREST = 32
"""Nearest old classes that a softmax over some classes has for each replayed class."""


def clip_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """The symmetric CLIP loss, Eq. (1) of DMC, of scores (B, C) of pictures against class texts and labels (B,).

    The B texts of a batch are copies of the class texts: the sum over texts is a sum over classes with + log count, and
    nothing of size B×B is computed. Scores become float32 first: bfloat16 cannot count beyond 256.
    """
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    counts = torch.zeros(scores.shape[1], device=scores.device, dtype=scores.dtype)
    counts = counts.index_add(0, labels, counts.new_ones(len(labels)))
    own = scores.gather(1, labels[:, None]).squeeze(1)
    to_texts = torch.logsumexp(scores + counts.log(), dim=1)  # a class absent from the batch adds exp(−∞) = 0
    to_pictures = torch.logsumexp(scores, dim=0)[labels]
    return (0.5 * (to_texts + to_pictures) - own).mean()


def orthogonality(tasks: Tensor) -> Tensor:
    """Eq. (6) of DMC: 1/(K(K−1)) Σ_{i≠j} (f_t(P_i)ᵀ f_t(P_j))² of unit task texts (K, dim); 0 for one task."""
    count = len(tasks)
    if count < 2:
        return tasks.new_zeros(())
    gram = tasks @ tasks.T
    return (gram.square().sum() - gram.diagonal().square().sum()) / (count * (count - 1))


class Replay(NamedTuple):
    """Features of old classes, drawn for one training step."""

    features: Tensor  # (R, dim), unit
    targets: Tensor  # (R,): their classes, or places in `among`
    among: Tensor | None  # (S,): the classes of the step's softmax; None: all


def draw_replay(
    memory: GaussianMemory, old: int, steps: int, count: int, near: Tensor | None, seen: int
) -> list[Replay]:
    """Draw the replayed features of an epoch from the Gaussians of the first `old` classes, each class equally often.

    Each of the `steps` gets `count` features. `near` is from `nearest_classes` where the softmax is over some of the
    `seen` classes; None: over all.
    """
    turns = -(-steps * count // old)
    classes = torch.cat([torch.randperm(old) for _ in range(turns)])[: steps * count]
    samples = normalize(memory.sample(classes), dim=-1)
    epoch = []
    for own, part in zip(torch.split(samples, count), torch.split(classes, count), strict=True):
        targets, among = (part, None) if near is None else sampled_classes(part, near, seen)
        epoch.append(Replay(own, targets.to(own.device), None if among is None else among.to(own.device)))
    return epoch


def replay_loss(
    scale: Tensor, texts: Tensor, features: Tensor, labels: Tensor, replay: Replay | None, share: float
) -> Tensor:
    """The cross-entropy of DMC's Eq. (7): `share` of it on new features, the rest on replayed ones.

    `scale` is exp(logit_scale); `texts` (C, dim) are unit class vectors, the new classes last; `features` (B, dim) are
    of new pictures, unit, and `labels` (B,) their classes.
    """
    if replay is not None and replay.among is not None:
        texts, labels = texts[replay.among], labels - (len(texts) - len(replay.among))
    weights = scale * texts.T
    value = share * cross_entropy(features @ weights, labels)
    if replay is not None:
        value = value + (1 - share) * cross_entropy(replay.features @ weights, replay.targets)
    return value


def nearest_classes(texts: Tensor, count: int = NEAREST) -> Tensor:
    """Indices (C, min(count, C)) of the classes whose unit texts (C, dim) are nearest to each class and of itself."""
    parts = [part @ texts.T for part in torch.split(texts, 1024)]
    return torch.cat([part.topk(min(count, len(texts)), dim=1).indices for part in parts]).cpu()


def sampled_classes(classes: Tensor, near: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """A softmax over some of `seen` classes: the replayed `classes` (R,), the nearest to them, and all new ones.

    With `near` (C_old, k) from `nearest_classes`. Returns targets (R,) and the classes of the softmax (S,), ascending:
    `classes == among[targets]`.
    """
    among = torch.cat([torch.unique(near[classes]), torch.arange(len(near), seen)])
    return torch.searchsorted(among, classes), among


def replay_budget(how: Training, share: float, batch_of: BatchOf, most: int) -> tuple[Training, int]:
    """How to train where new classes are a `share` of all, and how many features, at `most`, a step replays.

    The batch size counts new pictures (`batch_of` "new"), or new pictures and replayed features together ("all").
    """
    replayed = 0
    if batch_of == "all":
        own = max(1, round(how.batch_size * share))
        replayed = max(1, how.batch_size - own) if share < 1 else 0
        how = replace(how, batch_size=own)
    elif share < 1:
        replayed = math.ceil(how.batch_size * (1 - share) / share - 1e-9)
    return how, min(most, replayed)
