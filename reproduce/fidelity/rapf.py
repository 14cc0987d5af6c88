"""RAPF's published loop (linlany/RAPF at 81d41df), rewritten on cached features.

Kept: sample covariances plus 10⁻⁴ I; their Cholesky factors are made once, not for every draw. The number of old
classes in a step follows the authors' advice for other task sizes: about 2000 replayed features an epoch.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.methods.rapf import RAPFConfig
from clipcil.prompts.templates import fill
from reproduce.fidelity.stream import Features, accuracy, batches, descend


def run(data: Features, config: RAPFConfig) -> tuple[float, float]:
    """Percent of the test pictures after the last task; nothing depends on the test batch, so both are the same."""
    dim, how, scale = data.sentences.shape[2], config.adapter, data.clip.scale
    adapter = nn.Linear(dim, dim, bias=False)
    every = normalize(data.clip.encode_texts([fill(config.template, name) for name in data.names]), dim=-1)
    means: list[Tensor] = []
    factors: list[Tensor] = []

    def draw(label: int, count: int) -> Tensor:
        return torch.randn(count, dim) @ factors[label].T + means[label]

    for task, part in enumerate(data.train):
        seen = data.seen(task)
        old, texts = seen - data.sizes[task], every[:seen]
        before = adapter.weight.detach().clone()
        pairs = [
            (i, j) for i in range(old) for j in range(old, seen) if (texts[i] - texts[j]).norm() < config.threshold
        ]
        optimizer = torch.optim.Adam(adapter.parameters(), how.lr)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(how.milestones), 0.1)
        steps = -(-len(part.labels) // how.batch_size)
        turns = max(config.replay_classes, round(2000 / (steps * config.replay_each)))
        for _ in range(how.epochs):
            order = torch.randperm(old).tolist()
            for step, rows in enumerate(batches(len(part.labels), how.batch_size)):
                x, y = part.features[rows], part.labels[rows]
                if old:
                    now = [order[(step * turns + i) % old] for i in range(turns)]
                    x = torch.cat([x, *(draw(label, config.replay_each) for label in now)])
                    y = torch.cat([y, torch.tensor(now).repeat_interleave(config.replay_each)])
                loss = cross_entropy(scale * normalize(adapter(x), dim=-1) @ texts.T, y)
                if pairs:
                    edge = torch.cat([draw(i, config.pair_each) for i, _ in pairs])
                    edge = normalize(adapter(edge), dim=-1)
                    own = texts[[i for i, _ in pairs]].repeat_interleave(config.pair_each, 0)
                    rival = texts[[j for _, j in pairs]].repeat_interleave(config.pair_each, 0)
                    loss = loss + torch.relu(-(edge * own).sum(-1) + (edge * rival).sum(-1) + 0.1).mean()
                descend(optimizer, loss)
            schedule.step()
        for label in range(old, seen):
            group = part.features[part.labels == label]
            means.append(group.mean(0))
            factors.append(torch.linalg.cholesky(torch.cov(group.T) + 1e-4 * torch.eye(dim)))
        if old:
            left, values, right = torch.linalg.svd(before)
            new, kept = left.T @ adapter.weight.detach(), torch.diag(values) @ right
            mask = ((new - kept).abs() / (new - kept).abs().max() + config.fusion).clamp(max=1)
            adapter.weight.data = left @ (new * mask + kept * (1 - mask))
    percent = accuracy(data, lambda batch: normalize(adapter(batch.features), dim=-1) @ every.T, 128)
    return percent, percent
