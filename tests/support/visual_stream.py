"""A small stream of coloured pictures for a tiny tower deep enough for every layer of DualPrompt and CODA-Prompt."""

from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.data.pictures import PictureSet
from clipcil.data.reader import Pictures, Reader
from clipcil.data.tasks import TaskStream
from clipcil.methods.base import Method
from clipcil.training.augment import TowerTraining
from clipcil.training.trainer import Trainer, Training
from support.towers import make_tiny_clip

FAST = TowerTraining(epochs=3, lr=5e-3, batch_size=8, optimizer="adam", weight_decay=0, schedule="constant")


def tower() -> CLIP:
    return make_tiny_clip(layers=6)


def coloured(classes: int, each: int, seed: int, name: str) -> PictureSet:
    """`each` pictures of every class: the class's colour and some noise."""
    generator = np.random.default_rng(seed)
    colours = np.random.default_rng(7).uniform(40, 215, (classes, 1, 1, 3))
    noisy = np.repeat(colours, each, 0) + generator.normal(0, 20, (classes * each, 16, 16, 3))
    pictures = [Image.fromarray(one) for one in np.clip(noisy, 0, 255).astype(np.uint8)]
    labels = torch.arange(classes).repeat_interleave(each)
    return PictureSet(name, pictures, labels, f"{name}-{classes}-{each}-{seed}")


def stream(clip: CLIP, sizes: tuple[int, ...] = (3, 2, 3), each: int = 6) -> TaskStream:
    classes = sum(sizes)
    train, test = coloured(classes, each, 0, "train"), coloured(classes, 9, 1, "test")
    dataset = Dataset("coloured", [f"thing {i}" for i in range(classes)], train, test)
    return TaskStream(dataset, Reader(clip, None), list(range(classes)), sizes)


def learnt(kind: type[Method], config: Any, clip: CLIP, source: TaskStream, tasks: int = 3) -> Method:
    """A method that has learnt the first `tasks` tasks."""
    torch.manual_seed(0)
    method = kind(config, clip, Trainer())
    for task in source.tasks():
        method.learn(task)
        if task.index + 1 == tasks:
            break
    return method


def all_tests(source: TaskStream) -> Pictures:
    """The test pictures of every task in one."""
    return source._reader.open(source.dataset.test)


class Recorder(Trainer):
    """Trains nothing and keeps the loss of the last stage, so that a test can call it with rows, and of every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, tuple[Any, list[Tensor]]] = {}

    def fit(self, stage: str, parameters: Any, data: Any, loss: Any, how: Training, each_epoch: Any = None) -> None:
        self.loss = loss if isinstance(data, int) else lambda rows: loss(rows, data[rows])
        self.trained, self.each_epoch = list(parameters), each_epoch
        self.stages[stage] = (self.loss, self.trained)


def encode_by_hand(
    clip: CLIP,
    pixels: Tensor,
    extra: Tensor | None = None,
    prefixes: dict[int, tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """The last layer's tokens (1 + L + N, width) of one picture (C, H, W), head by head with a written-out softmax."""
    model = clip.vision.vision_model
    hidden = model.embeddings(pixels[None])[0]
    if extra is not None:
        hidden = torch.cat([hidden[:1], extra, hidden[1:]])
    hidden = model.pre_layrnorm(hidden)
    for index, block in enumerate(model.encoder.blocks()):
        normed, attention = block.layer_norm1(hidden), block.self_attn
        q, k, v = attention.q_proj(normed), attention.k_proj(normed), attention.v_proj(normed)
        if prefixes and index in prefixes:
            k, v = torch.cat([prefixes[index][0], k]), torch.cat([prefixes[index][1], v])
        size = q.shape[1] // attention.heads
        mixed = []
        for head in range(attention.heads):
            part = slice(head * size, (head + 1) * size)
            scores = q[:, part] @ k[:, part].T / size**0.5
            mixed.append(torch.softmax(scores, dim=1) @ v[:, part])
        hidden = hidden + attention.out_proj(torch.cat(mixed, dim=1))
        hidden = hidden + block.mlp(block.layer_norm2(hidden))
    return hidden


def project(clip: CLIP, tokens: Tensor) -> Tensor:
    """The picture's feature (dim,) from its last tokens."""
    feature: Tensor = clip.vision.visual_projection(clip.vision.vision_model.post_layernorm(tokens[0]))
    return feature
