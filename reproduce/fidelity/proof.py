"""PROOF's published loop (zhoudw-zdw/PROOF at 0bb2052), rewritten on cached features.

Kept: fused texts and prototypes are averaged over the batch, in training and at test.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from clipcil.memory.exemplars import herd
from clipcil.methods.proof import PROOFConfig
from reproduce.fidelity.stream import Features, Part, accuracy, add_up, batches, descend


class Attention(nn.Module):
    """Single-headed self-attention: dropout on the weights and after the output layer, residual, LayerNorm.

    Over [picture; shared tokens] for each picture of the batch. The keys, values and scores of the shared tokens are
    the same for all pictures and computed once; everything else is done for every picture.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.out, self.norm, self.drop = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Dropout(0.1)
        for layer in (self.q, self.k, self.v, self.out):
            nn.init.xavier_normal_(layer.weight)

    def forward(self, pictures: Tensor, shared: Tensor) -> Tensor:
        """Pictures (B, d), shared tokens (N, d) → (B, 1 + N, d)."""
        count, size = len(pictures), shared.shape[1] ** 0.5
        queries, keys, values = self.q(shared) / size, self.k(shared), self.v(shared)
        own_query, own_key, own_value = self.q(pictures) / size, self.k(pictures), self.v(pictures)
        first = torch.cat([(own_query * own_key).sum(1, keepdim=True), own_query @ keys.T], 1)  # (B, 1 + N)
        rest = torch.cat([(own_key @ queries.T)[..., None], (queries @ keys.T).expand(count, -1, -1)], 2)
        weights = self.drop(torch.cat([first[:, None], rest], 1).softmax(2))  # (B, 1 + N, 1 + N)
        mixed = weights[..., 1:] @ values + weights[..., :1] * own_value[:, None]
        tokens = torch.cat([pictures[:, None], shared.expand(count, -1, -1)], 1)
        fused: Tensor = self.norm(tokens + self.drop(self.out(mixed)))
        return fused


def run(data: Features, config: PROOFConfig) -> tuple[float, float]:
    """Percent of the test pictures after the last task: scored in class-pure batches, and one by one."""
    dim, how = data.sentences.shape[2], config.train
    image, text, contexts = nn.ModuleList(), nn.ModuleList(), nn.ParameterList()
    block, scale = Attention(dim), nn.Parameter(data.clip.logit_scale.detach().clone())
    prototypes, kept_x, kept_y = torch.zeros(0, dim), torch.zeros(0, dim), torch.zeros(0, dtype=torch.int64)

    def fuse(pictures: Tensor, texts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pictures (B, d), texts (C, d) → fused pictures (B, d), texts and prototypes (B, C, d) each."""
        shared = torch.cat([texts, normalize(add_up(image, prototypes), dim=-1), *contexts])
        fused = block(pictures, shared)
        count = len(texts)
        return fused[:, 0], fused[:, 1 : 1 + count], fused[:, 1 + count : 1 + 2 * count]

    for task, part in enumerate(data.train):
        seen = data.seen(task)
        unit = normalize(part.features, dim=-1)
        new = [unit[part.labels == label].mean(0) for label in range(seen - data.sizes[task], seen)]
        prototypes = torch.cat([prototypes, torch.stack(new)])
        for earlier in (*image.parameters(), *contexts):
            earlier.requires_grad_(False)
        image.append(nn.Linear(dim, dim))
        text.append(nn.Linear(dim, dim))
        contexts.append(nn.Parameter(torch.randn(config.context, dim)))
        x, y = torch.cat([part.features, kept_x]), torch.cat([part.labels, kept_y])
        trained = [*image.parameters(), *text.parameters(), *contexts, *block.parameters(), scale]
        optimizer = torch.optim.SGD(trained, how.lr, momentum=how.momentum, weight_decay=how.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, how.epochs)
        block.train()
        for _ in range(how.epochs):
            for rows in batches(len(y), how.batch_size):
                pictures = normalize(add_up(image, x[rows]), dim=-1)
                texts = normalize(add_up(text, data.sentences[:seen, 0]), dim=-1)
                own, around, protos = fuse(pictures, texts)
                logits, place = scale.exp() * pictures @ texts[y[rows]].T, torch.arange(len(rows))
                loss = (cross_entropy(logits, place) + cross_entropy(logits.T, place)) / 2
                for tokens in (around, protos):
                    loss = loss + cross_entropy(own @ tokens.mean(0).T, y[rows])
                descend(optimizer, loss)
            schedule.step()
        block.eval()
        each, old = config.memory.of_each(seen), seen - data.sizes[task]
        keep = [torch.nonzero(kept_y == label).flatten()[:each] for label in range(old)]
        chosen = [torch.nonzero(part.labels == label).flatten() for label in range(old, seen)]
        picked = [rows[herd(part.features[rows], each)] for rows in chosen]
        kept_x = torch.cat([*(kept_x[rows] for rows in keep), *(part.features[rows] for rows in picked)])
        kept_y = torch.cat([*(kept_y[rows] for rows in keep), *(part.labels[rows] for rows in picked)])

    with torch.no_grad():
        texts = normalize(normalize(add_up(text, data.sentences), dim=-1).mean(1), dim=-1)

    def score(batch: Part, alone: bool) -> Tensor:
        pictures = add_up(image, batch.features)  # not normalised, at test
        own, around, protos = fuse(pictures, texts)
        if alone:
            return pictures @ texts.T + torch.einsum("bd,bcd->bc", own, around + protos)
        return pictures @ texts.T + own @ (around.mean(0) + protos.mean(0)).T

    return (
        accuracy(data, lambda batch: score(batch, alone=False), how.batch_size),
        accuracy(data, lambda batch: score(batch, alone=True), how.batch_size),
    )
