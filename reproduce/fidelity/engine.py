"""ENGINE's published loop without descriptions (LAMDA-CL/ICCV25-ENGINE at 8803d66), rewritten on cached features.

Not kept: its clamp of normalised pixels to [0, 1]; noisy views are drawn `views` times a task, not at every step.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.methods.engine import ENGINEConfig
from reproduce.fidelity.stream import Features, Part, accuracy, add_up, batches, descend


def run(data: Features, config: ENGINEConfig) -> tuple[float, float]:
    """Percent of the test pictures after the last task; nothing depends on the test batch, so both are the same."""
    dim, how = data.sentences.shape[2], config.adapters
    image, text = nn.ModuleList(), nn.ModuleList()
    prototypes = torch.zeros(0, dim)
    means, inverse = torch.zeros(0, data.train[0].pooled.shape[1]), torch.zeros(())

    def contrast(anchors: Tensor, keys: Tensor) -> Tensor:
        return cross_entropy(anchors @ keys.T, torch.arange(len(anchors)))

    for task, part in enumerate(data.train):
        seen = data.seen(task)
        old = seen - data.sizes[task]
        means, inverse = head(means, inverse, normalize(part.pooled, dim=-1), part.labels, old, seen)
        for adapters in (image, text):
            adapters.requires_grad_(False)
            adapters.append(nn.Linear(dim, dim))
        trained = [*image[-1].parameters(), *text[-1].parameters()]
        optimizer = torch.optim.SGD(trained, how.lr, momentum=how.momentum, weight_decay=how.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs)
        views = noisy(data, part, config) if config.image_weight else None
        for _ in range(how.epochs):
            for rows in batches(len(part.labels), how.batch_size):
                replay = prototypes + torch.randn(old, dim) * config.replay_noise
                adapted = normalize(add_up(image, torch.cat([part.features[rows], replay])), dim=-1)
                labels = torch.cat([part.labels[rows], torch.arange(old)])
                texts = normalize(add_up(text, data.sentences[labels, 0]), dim=-1)
                scale = data.clip.logit_scale.detach()
                loss = (contrast(scale * adapted, texts) + contrast(scale * texts, adapted)) / 2
                if views is not None:
                    view = views[torch.randint(len(views), (len(rows),)), rows]
                    loss = loss + config.image_weight * contrast(adapted[: len(rows)], view)
                descend(optimizer, loss)
            schedule.step()
        new = [part.features[part.labels == label].mean(0) for label in range(old, seen)]
        prototypes = torch.cat([prototypes, torch.stack(new)])

    weight = means @ inverse
    bias = torch.log(torch.tensor(1 / len(means))) - (weight * means).sum(1) / 2
    with torch.no_grad():
        texts = normalize(normalize(add_up(text, data.sentences), dim=-1).mean(1), dim=-1)

    def score(batch: Part) -> Tensor:
        cosines = normalize(add_up(image, batch.features), dim=-1) @ texts.T
        discriminant = normalize(normalize(batch.pooled, dim=-1) @ weight.T + bias, dim=-1)
        return config.head * discriminant + (1 - config.head) * cosines

    percent = accuracy(data, score, how.batch_size)
    return percent, percent


@torch.no_grad()
def noisy(data: Features, part: Part, config: ENGINEConfig) -> Tensor:
    """(views, n, dim): unit features of the pictures with noise on the input of the transformer."""

    def view(rows: Tensor) -> Tensor:
        inputs = data.clip.vision.start(part.pictures[rows].pixels)
        drawn = inputs + config.pixel_noise * torch.randn_like(inputs)
        return normalize(data.clip.vision.encode(drawn, class_only=True).features, dim=-1)

    blocks = torch.split(torch.arange(len(part.labels)), 128)
    return torch.stack([torch.cat([view(rows) for rows in blocks]) for _ in range(config.views)])


def head(means: Tensor, inverse: Tensor, unit: Tensor, labels: Tensor, old: int, seen: int) -> tuple[Tensor, Tensor]:
    """Class means and the averaged inverse covariance after one more task of unit features (n, width)."""
    new = torch.stack([unit[labels == label].mean(0) for label in range(old, seen)])
    centred = unit - new[labels - old]
    count, width = centred.shape
    covariance = torch.cov(centred.T)
    fresh = width * torch.linalg.pinv((count - 1) * covariance + covariance.trace() * torch.eye(width))
    if not old:
        return new, fresh
    apart = (means.mean(0) - new.mean(0))[:, None]
    share = old / seen
    rank_one = share * (seen - old) / seen**2 * apart @ apart.T
    return torch.cat([means, new]), share * inverse + (1 - share) * fresh + rank_one
