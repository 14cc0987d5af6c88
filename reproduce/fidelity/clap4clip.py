"""CLAP4CLIP's published loop (srvCodes/clap4clip at 7ff95c2), rewritten on cached features.

Kept: the class texts attend to all pictures of the batch, in training and at test; sampling at test; exemplars are the
first pictures of a class. Not kept: the flips of its training pictures and half precision.
"""

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, normalize, softplus

from clipcil.methods.clap4clip import CLAP4CLIPConfig
from clipcil.training.trainer import Training
from reproduce.fidelity.stream import Features, Part, accuracy, batches, descend


def run(data: Features, config: CLAP4CLIPConfig) -> tuple[float, float]:
    """Percent of the test pictures after the last task: in batches of one task, and one by one."""
    dim, samples, scale = data.sentences.shape[2], config.samples, data.clip.scale
    layer = nn.TransformerDecoderLayer(dim, 1, config.hidden, config.dropout, activation="gelu", batch_first=True)
    mus, sigmas = nn.ModuleList(), nn.ModuleList()
    single = normalize(data.sentences, dim=-1)  # (C, T, d)
    every = normalize(single.mean(1), dim=-1)

    def blocked(tasks: int) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(tasks), torch.tensor(data.sizes[:tasks]))
        return owner[:, None] != owner

    def forward(unit: Tensor, tasks: int, terms: range) -> tuple[Tensor, Tensor]:
        """Logits (M, B, C) of a batch that is attended to together, and the regularisers of the tasks in `terms`."""
        seen = data.seen(tasks - 1)
        texts = every[:seen]
        hidden = texts + layer(texts[None], unit[None], tgt_mask=blocked(tasks))[0]
        logits, value, start = [], torch.zeros(()), 0
        for task in range(tasks):
            rows = slice(start, start + data.sizes[task])
            start += data.sizes[task]
            spread = softplus(sigmas[task](hidden[rows])) * 0.999 + 0.001
            posterior = Normal(mus[task](hidden[rows]), spread)
            drawn = posterior.rsample(torch.Size([samples]))  # (M, c, d)
            logits.append(scale * unit @ (hidden[rows] + drawn).transpose(1, 2))
            if task in terms:
                prior = Normal(torch.zeros_like(spread), torch.ones_like(spread))
                value = value + config.kl * kl_divergence(posterior, prior).mean(0).sum()
                similar = torch.einsum("ctd,med->mcte", single[rows], drawn).mean(2).mean(0)
                value = value + config.language * cross_entropy(similar, torch.arange(len(similar)))
        return torch.cat(logits, -1), value

    def fit(x: Tensor, y: Tensor, tasks: int, terms: range, how: Training) -> None:
        trained = [p for module in (layer, mus, sigmas) for p in module.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, how.lr)
        rates = _rates(how.lr, how.epochs * -(-len(y) // how.batch_size), how.warmup)
        step = 0
        for _ in range(how.epochs):
            for rows in batches(len(y), how.batch_size):
                optimizer.param_groups[0]["lr"] = rates[step]
                step += 1
                logits, value = forward(normalize(x[rows], dim=-1), tasks, terms)
                loss = cross_entropy(logits.flatten(0, 1), y[rows].repeat(samples)) + value
                descend(optimizer, loss)

    kept_x, kept_y = torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64)
    for task, part in enumerate(data.train):
        seen = data.seen(task)
        for module in (mus, sigmas):
            module.requires_grad_(False)
            module.append(nn.Linear(dim, dim))
        with torch.no_grad():
            for module, about in ((mus, single[:seen].mean(1)), (sigmas, single[:seen].var(1))):
                module[-1].weight.copy_(about.T @ about / dim)  # the bias keeps PyTorch's random start
        layer.requires_grad_(True).train()
        x, y = torch.cat([part.features, kept_x]), torch.cat([part.labels, kept_y])
        fit(x, y, task + 1, range(task, task + 1), config.train)
        each = config.memory.of_each(seen)
        x, y = torch.cat([kept_x, part.features]), torch.cat([kept_y, part.labels])
        rows = torch.cat([torch.nonzero(y == label).flatten()[:each] for label in range(seen)])
        kept_x, kept_y = x[rows], y[rows]
        layer.requires_grad_(False).eval()
        if task:
            for module in (mus, sigmas):
                module.requires_grad_(True)
            fit(kept_x, kept_y, task + 1, range(task + 1), config.balance)

    tasks = len(data.sizes)

    def together(batch: Part) -> Tensor:
        return forward(normalize(batch.features, dim=-1), tasks, range(0))[0].mean(0)

    def alone(batch: Part) -> Tensor:
        return torch.cat(
            [forward(one, tasks, range(0))[0].mean(0) for one in normalize(batch.features, dim=-1)[:, None]]
        )

    size = config.train.batch_size
    return accuracy(data, together, size), accuracy(data, alone, size)


def _rates(lr: float, steps: int, share: float) -> np.ndarray:
    """A rise over `share` of the steps, then a cosine down to a thousandth."""
    ramp = int(share * steps)
    rise = np.linspace(0, lr, ramp + 2)[1:-1]
    rest = np.arange(steps - ramp)
    return np.concatenate([rise, lr * 1e-3 + 0.5 * lr * (1 - 1e-3) * (1 + np.cos(np.pi * rest / len(rest)))])
