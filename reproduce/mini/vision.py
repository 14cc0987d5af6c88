"""The vision tower: starts as a linear map of the pooled trunk output, is trained first along that path, then whole.

The start. In the first block the class token asks every token alike (no queries) and receives the mean of the patches;
the other blocks add nothing yet. So the class token is a linear map of the pooled patches followed by the blocks' MLPs,
and this path alone (`class_path`) costs a thirtieth of the tower: it is trained for many epochs from pooled patches,
then the whole tower goes on from there.

The losses, on unit-length features f:
    names      cross-entropy of the label among all class names
    head       KL divergence from the trunk's own classifier over the names of its 1,000 classes
    place      1 − cosine to the average of the names the classifier believes in, and the label's
    captions   cross-entropy of the caption among the batch's captions
    relations  KL divergence between rows of the batch's similarity matrices, of the pooled trunk output and of f
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from clipcil.clip.config import VisionConfig
from clipcil.clip.vision import VisionTower
from reproduce.mini.fitting import fit
from reproduce.mini.lite import Lite, head
from reproduce.mini.pictures import SHARD, Picture
from reproduce.mini.texts import Corpus

CONFIG = VisionConfig(384, 3, 6, 1024, "gelu", channels=384, image_size=4, patch_size=1)
SCALE = 32.0
RATE_PATH, RATE_WHOLE = 1e-3, 2e-4
PATH_WEIGHTS = {"names": 1.0, "head": 1.0, "place": 3.0, "captions": 0.3, "relations": 4.0}
WHOLE_WEIGHTS = {"names": 1.0, "head": 1.0, "place": 1.0, "captions": 0.3, "relations": 2.0}


@dataclass(frozen=True)
class Lessons:
    """The training data: a row for each picture, and the class names."""

    patches: Tensor
    """(N, 2, channels, 4, 4) half: two views through the trunk."""
    pooled: Tensor
    """(N, width) half: the pooled output of the first view, unit length."""
    head: Tensor
    """(N, 1000) half: the classifier's logits on the first view."""
    label: Tensor
    """(N,): index into `names`, or -1."""
    caption: Tensor
    """(N, dim): the target of its caption, zero where there is none."""
    names: Tensor
    """(classes, dim): targets of the class names, the classifier's 1,000 first."""


def read(
    lite: Lite, reduce: tuple[Tensor, Tensor], shards: Sequence[Path], pictures: Sequence[Picture], corpus: Corpus
) -> Lessons:
    """All shards there are, through head and reduction."""
    kernel, bias = reduce
    weight, offset = lite.classifier
    patches, pooled, logits, chosen = [], [], [], []
    for file in shards:
        blocks = torch.from_numpy(np.load(file))
        first = int(file.stem) * SHARD
        chosen += pictures[first : first + len(blocks)]  # the last shard may end before the list does
        wide = head(lite, blocks.flatten(0, 1))
        small = torch.einsum("oc,bchw->bohw", kernel, wide) + bias[:, None, None]
        mean = wide.mean((2, 3))[::2]
        patches.append(small.half().unflatten(0, (-1, 2)))
        pooled.append(F.normalize(mean @ kernel.T + bias, dim=-1).half())
        logits.append((mean @ weight.T + offset).half())
    order = list(corpus.classes)
    index = {name: position for position, name in enumerate(order)}
    label = torch.tensor([index.get(picture.label, -1) for picture in chosen])
    names = torch.stack([corpus.classes[name] for name in order])
    nothing = torch.zeros(names.shape[1])
    caption = torch.stack([corpus.captions.get(picture.label.split("\n")[0], nothing) for picture in chosen])
    return Lessons(torch.cat(patches), torch.cat(pooled), torch.cat(logits), label, caption, names)


def start(config: VisionConfig, dim: int, seed: int, lift: float = 0.0) -> VisionTower:
    """The tower as described above; `lift`, a constant in every patch, keeps the first norm from levelling them."""
    torch.manual_seed(seed)
    tower = VisionTower(config, dim)
    model = tower.vision_model
    model.embeddings.patch_embedding.weight.data = torch.eye(config.width, config.channels)[:, :, None, None]
    torch.nn.init.normal_(model.embeddings.class_embedding, std=0.02)
    torch.nn.init.normal_(model.embeddings.position_embedding.weight, std=0.02)
    model.embeddings.position_embedding.weight.data[1:, -1] = lift
    for index, block in enumerate(model.encoder.blocks()):
        attention, mlp = block.self_attn, block.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, mlp.fc1, mlp.fc2):
            torch.nn.init.normal_(linear.weight, std=config.width**-0.5)
            torch.nn.init.zeros_(linear.bias)
        torch.nn.init.zeros_(mlp.fc2.weight)
        if index == 0:
            torch.nn.init.zeros_(attention.q_proj.weight)
            torch.nn.init.eye_(attention.v_proj.weight)
            attention.out_proj.weight.data = 3.0 * torch.eye(config.width)
        else:
            torch.nn.init.zeros_(attention.out_proj.weight)
    torch.nn.init.orthogonal_(tower.visual_projection.weight)
    return tower


@torch.no_grad()
def align(tower: VisionTower, mixed: Tensor, places: Tensor) -> None:
    """Turn the tower's output towards `places`, where each picture belongs among the texts: the best rotation.

    A rotation (orthogonal Procrustes) keeps every similarity between pictures as it is; the mean is taken off.
    """
    norm = tower.vision_model.post_layernorm
    weight = tower.visual_projection.weight
    weight.copy_(torch.eye(*weight.shape))
    pooled = class_path(tower, mixed)
    norm.bias.sub_(pooled.mean(0))
    left, _, right = torch.linalg.svd((pooled - pooled.mean(0)).T @ places)
    weight.copy_((left @ right).T)


def place(lessons: Lessons, rows: Tensor) -> Tensor:
    """(B, dim), unit length: the average of the names the classifier believes in, plus the label's or the caption."""
    believed = F.softmax(lessons.head[rows].float() / 2, dim=-1)
    found = F.normalize(believed @ lessons.names[: believed.shape[1]], dim=-1)
    label = lessons.label[rows]
    known = torch.where(label[:, None] >= 0, lessons.names[label.clamp(min=0)], lessons.caption[rows])
    return F.normalize(found + known, dim=-1)


@torch.no_grad()
def pooled_patches(tower: VisionTower, patches: Tensor) -> Tensor:
    """(B, channels, 4, 4) → (B, width): the mean input of the first block's attention, class token included."""
    model = tower.vision_model
    block = model.encoder.blocks()[0]
    mixed: Tensor = block.layer_norm1(model.pre_layrnorm(model.embeddings(patches))).mean(1)
    return mixed


def class_path(tower: VisionTower, mixed: Tensor) -> Tensor:
    """The tower's features from `pooled_patches`: exact as long as its attention is as `start` left it."""
    model = tower.vision_model
    embeddings = model.embeddings
    first = model.pre_layrnorm(embeddings.class_embedding + embeddings.position_embedding.weight[0])
    blocks = model.encoder.blocks()
    attention = blocks[0].self_attn
    hidden: Tensor = first + attention.out_proj(attention.v_proj(mixed))
    for block in blocks:
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
    features: Tensor = tower.visual_projection(model.post_layernorm(hidden))
    return features


def losses(features: Tensor, rows: Tensor, lessons: Lessons) -> dict[str, Tensor]:
    """The five losses of a batch; `rows` says which pictures it holds."""
    features = F.normalize(features, dim=-1)
    logits = SCALE * features @ lessons.names.T
    label, head = lessons.label[rows], lessons.head[rows].float()
    labelled = label >= 0
    believed = F.softmax(head / 2, dim=-1)
    found = {"head": F.kl_div(F.log_softmax(logits[:, : head.shape[1]], dim=-1), believed, reduction="batchmean")}
    if labelled.any():
        found["names"] = F.cross_entropy(logits[labelled], label[labelled])
    found["place"] = (1 - (features * place(lessons, rows)).sum(-1)).mean()
    captions = lessons.caption[rows]
    told = captions.abs().sum(-1) > 0
    if told.sum() > 1:
        scores = SCALE * features[told] @ captions[told].T
        found["captions"] = F.cross_entropy(scores, torch.arange(len(scores)))
    known = lessons.pooled[rows].float()
    apart = torch.eye(len(rows), dtype=torch.bool) * -1e4
    wanted = F.softmax(10 * known @ known.T + apart, dim=-1)
    given = F.log_softmax(10 * features @ features.T + apart, dim=-1)
    found["relations"] = F.kl_div(given, wanted, reduction="batchmean")
    return found


@torch.no_grad()
def held_out(tower: VisionTower, lessons: Lessons, rows: Tensor) -> str:
    """How often the second view of a held-out picture is nearest to its own class name, among all of them."""
    rows = rows[lessons.label[rows] >= 0]
    features = torch.cat(
        [tower(lessons.patches[part, 1].float(), class_only=True).features for part in rows.split(256)]
    )
    hits = (features @ lessons.names.T).argmax(1) == lessons.label[rows]
    return f"held out: {100 * hits.double().mean().item():.1f} % of {len(rows)}"


def lift(patches: Tensor) -> float:
    """The usual length of a patch."""
    return patches[:512, 0].float().square().sum(1).mean().sqrt().item()


def train(
    tower: VisionTower, lessons: Lessons, rows: Tensor, steps: int, save: Path, *, whole: bool, seed: int, batch: int
) -> None:
    """Train the whole tower, or only its class path, for `steps`; the averaged weights are saved and kept."""
    draw = torch.Generator().manual_seed(seed)
    rate, weights = (RATE_WHOLE, WHOLE_WEIGHTS) if whole else (RATE_PATH, PATH_WEIGHTS)
    model = tower.vision_model
    blocks = model.encoder.blocks()
    if whole:  # small random weights where `start` left zeros, so that every attention learns (and prompts reach it)
        trained = [*tower.parameters()]
        for linear in (blocks[0].self_attn.q_proj, *(block.self_attn.out_proj for block in blocks[1:])):
            torch.nn.init.normal_(linear.weight, std=0.2 * tower.config.width**-0.5)
    else:
        parts = [model.post_layernorm, tower.visual_projection, blocks[0].self_attn.out_proj]
        parts += [part for block in blocks for part in (block.mlp, block.layer_norm2)]
        trained = [weight for part in parts for weight in part.parameters()]
        flat = lessons.patches[rows].flatten(0, 1)
        mixed = torch.cat([pooled_patches(tower, part.float()) for part in flat.split(512)]).unflatten(0, (-1, 2))
        some = torch.randperm(len(rows), generator=draw)[:8192]
        align(tower, mixed[some, 0], place(lessons, rows[some]))
    tower.requires_grad_(False)
    for weight in trained:
        weight.requires_grad_(True)

    def drawn() -> dict[str, Tensor]:
        picked = torch.randint(len(rows), (batch,), generator=draw)
        view = torch.randint(2, (batch,), generator=draw)
        if whole:
            kept = torch.randperm(lessons.patches[0, 0, 0].numel(), generator=draw)
            features = _some_patches(tower, lessons.patches[rows[picked], view].float(), kept[: len(kept) // 2])
        else:
            features = class_path(tower, F.dropout(mixed[picked, view], 0.1))
        return losses(features, rows[picked], lessons)

    fit(tower, rate, 0.99 if whole else 0.998, steps, save, drawn, weights)
    tower.requires_grad_(True)


def _some_patches(tower: VisionTower, patches: Tensor, kept: Tensor) -> Tensor:
    """The tower's features from the class token and only the patches `kept`: half the work, and no loss of accuracy."""
    model = tower.vision_model
    hidden = model.embeddings(patches)[:, [0, *(kept + 1).tolist()]]
    hidden = model.pre_layrnorm(hidden)
    *blocks, last = model.encoder.blocks()
    for block in blocks:
        hidden = block(hidden)
    features: Tensor = tower.visual_projection(model.post_layernorm(last.at(hidden, 0)))
    return features
