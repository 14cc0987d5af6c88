"""DMC and DMC-OT (https://arxiv.org/abs/2511.10974): adapt the vision tower, then train text prompts with replay.

Stage 1 adapts the vision tower to frozen hard-prompt texts. Stage 2 freezes it and trains soft text prompts over all
classes seen, replaying the old ones from stored Gaussians. DMC-OT also transports the Gaussians when the tower changes
(optimal transport) and adds a task prompt to the class prompts. The ablations of the paper are options.

Examples:
    >>> import clipcil
    >>> experiment = clipcil.Experiment("dmc-ot", data="emoji", tasks=20)
    >>> experiment.learn(next(iter(experiment)))
    >>> experiment.evaluate().last >= 60  # percent; chance is 20
    True
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor, nn
from torch.nn.functional import normalize

from clipcil.data.names import Template
from clipcil.data.reader import Batch, Pictures
from clipcil.data.tasks import Task
from clipcil.distributed import spread
from clipcil.memory.gaussians import GaussianMemory
from clipcil.memory.rows import without
from clipcil.methods.base import Method
from clipcil.methods.registry import register
from clipcil.prompts.templates import check_sentences, encode_classes
from clipcil.prompts.text import PromptTexts, encode_prompts, tokenize_names
from clipcil.settings import options
from clipcil.training import losses
from clipcil.training.augment import Augment, TowerTraining, augmented
from clipcil.training.own_random import own_random
from clipcil.training.trainer import Training
from clipcil.training.tuning import Tuned, average_with, tuned
from clipcil.transport import CalibrationName, transport_memory


@options
class DMCConfig:
    """Values that the paper does not give are explained in docs/paper.md."""

    stage1: TowerTraining = TowerTraining(epochs=3, lr=1e-5, weight_decay=1e-4)
    """Training of the vision tower on hard-prompt texts, Eq. (1)."""
    slow_down: bool = False
    """Whether stage 1 of task k has its learning rate divided by k."""
    tuned: Tuned = "tower"
    """Part of the tower that stage 1 trains."""
    tuned_blocks: int = 2
    """Number of last blocks that train, where tuned=blocks."""
    lora_rank: PositiveInt = 8
    """Rank of the update, where tuned=lora."""
    template: Template = "a photo of {}"
    """Hard prompt of stage 1; {} is the class name."""
    stage2: Training = Training(epochs=5, steps=50, most_steps=320, lr=2e-3, weight_decay=1e-4)
    """Training of the text prompts, Eq. (7)."""
    batch_of: losses.BatchOf = "new"
    """What the batch size of stage 2 counts: the new pictures, or new pictures and replayed features together."""
    average_tower: bool = False
    """Average the tower before task k, weight (k−1)/k, with the tower after stage 1, weight 1/k. Not in the paper."""
    prompt_length: PositiveInt = 10
    """M, the number of vectors of a prompt."""
    prompt_std: NonNegativeFloat = 0.02
    """Standard deviation of the initial prompt vectors."""
    suffix: str = ""
    """Text after the class name in a soft prompt."""
    train_old_prompts: bool = True
    """Whether prompts of old classes continue to train."""
    max_replay: PositiveInt = 512
    """Maximum number of replayed features per step; old and new classes have equal weight for any value."""
    softmax_classes: NonNegativeInt = 4096
    """Above this many classes the softmax of a step is over new, replayed and nearest old classes; 0: over all."""
    max_spaces: PositiveInt = 64
    """Maximum number of maps in the memory; classes of older spaces are folded into the current one."""
    calibration: CalibrationName = "none"
    """Map of stored Gaussians: of the task (Eq. 4), averaged over classes, of pairs (LDC) or shifts of means (SDC)."""
    task_prompt: bool = False
    """Whether a prompt shared by the task is added, Eq. (5)."""
    beta: NonNegativeFloat = 0.1
    """β, the weight of the task prompt, Eq. (5)."""
    ortho: NonNegativeFloat = 0.1
    """λ, the weight of the orthogonality loss, Eq. (7)."""
    normalise_parts: bool = False
    """Whether f_t(P) is normalised before the sum of Eq. (5)."""
    simultaneous: bool = False
    """Ablation: train tower and prompts together, by the loss and for the epochs of stage 2."""


@options
class DMCOTConfig(DMCConfig):
    calibration: CalibrationName = "task"
    task_prompt: bool = True


@register
class DMC(Method):
    name = "dmc"
    title = "DMC"
    Config = DMCConfig
    keeps = "class Gaussians"
    tunes_tower = True
    class_vectors = "classifier"
    config: DMCConfig
    classifier: Tensor  # (C, dim): w of Eq. (5) for every class seen, unit length
    task_texts: Tensor  # (K, dim): f_t of every task prompt, unit length

    def build(self) -> None:
        self.tower = self.clip.vision
        self.memory = GaussianMemory()
        self.class_prompts = nn.ParameterList()  # a task each: (C_k, M, width)
        self.task_prompts = nn.ParameterList()  # a task each: (1, M, width)
        self.class_texts = nn.ModuleList()  # a task each: the names around the prompts
        self.task_text = PromptTexts(self.clip, [""], self.config.prompt_length)
        self.growing_buffer("classifier", self.dim)
        self.register_buffer("task_texts", torch.zeros(0, self.dim, device=self.device))

    def allocate(self, names: Sequence[str]) -> None:
        length, width = self.config.prompt_length, self.clip.config.text.width
        self.class_texts.append(PromptTexts(self.clip, names, length, self.config.suffix))
        for prompts, count in ((self.class_prompts, len(names)), (self.task_prompts, int(self.config.task_prompt))):
            vectors = torch.randn(count, length, width, device=self.device) * self.config.prompt_std
            prompts.append(nn.Parameter(vectors, requires_grad=False))
        if self.config.task_prompt:
            self.task_texts = torch.cat([self.task_texts, self.task_texts.new_zeros(1, self.dim)])

    def check_names(self, names: Sequence[str]) -> None:
        check_sentences(self.clip, names, [self.config.template])
        tokenize_names(self.clip, names, self.config.prompt_length, self.config.suffix)

    def learn_task(self, task: Task) -> None:
        """Algorithm 1 of the paper."""
        moves = self.config.calibration != "none" and len(self.memory) > 0
        before = self.class_features(task.pictures, "before") if moves else []
        self.adapt_tower(task)  # stage 1, Eq. (1)
        after = self.class_features(task.pictures, "after")
        if moves:
            self.calibrate(before, after)  # Eq. (4)
        self.train_prompts(task.pictures)  # stage 2, Eq. (7)
        self.memory.add(after)  # μ and Σ of each new class
        self.store_texts(self.config.train_old_prompts)  # Eq. (5)

    def class_features(self, pictures: Pictures, when: str) -> list[Tensor]:
        """Unit features of each new class by the current tower, (n_c, dim) float64; §3.1 normalises z_v."""
        with self.trainer.phase(f"statistics {when}"):
            return self.by_new_class(normalize(pictures.features, dim=-1).double(), pictures.labels)

    def adapt_tower(self, task: Task) -> None:
        """Stage 1, Eq. (1): pictures against the frozen texts of the task's classes."""
        if self.config.simultaneous:
            self.train_together(task.pictures)
            return
        texts = encode_classes(self.clip, task.names, [self.config.template])
        scale, labels = self.clip.scale, task.pictures.labels - self.old
        how, place = self.config.stage1, int(self.memory.tasks) + 1  # k; `sizes` forgets a task with its last class
        how = replace(how, lr=how.lr / place) if self.config.slow_down else how

        def loss(rows: Tensor, batch: Pictures) -> Tensor:
            return losses.clip_loss(scale * self.encode(batch, how.augment) @ texts.T, labels[rows])

        average = self.config.average_tower  # otherwise nothing is copied
        past = {k: v.detach().clone() if average else v.detach() for k, v in self.tower.named_parameters()}
        what = (self.config.tuned, self.config.tuned_blocks, self.config.lora_rank)
        given: list[Tensor | str] = [repr(what), repr(self.clip.config), task.pictures.key, labels, texts, scale]
        given += past.values()
        with own_random("stage1", task.index), tuned(self.clip, *what) as parameters:
            self.trainer.fit("stage1", parameters, task.pictures, loss, how, depends_on=given)
        if average:
            average_with(self.tower, past, 1 / place)

    def encode(self, batch: Pictures, augment: Augment) -> Tensor:
        """Unit features (B, dim) of the tower as it is now, with gradients."""
        if augment != "none":
            pixels = augmented(batch.pixels, augment)  # the whole batch, so that every process draws the same
            return normalize(spread(lambda part: self.tower(part, class_only=True).features, pixels), dim=-1)
        return normalize(spread(lambda part: self.tower(part.pixels, class_only=True).features, batch), dim=-1)

    def calibrate(self, before: list[Tensor], after: list[Tensor]) -> None:
        """Transport the stored Gaussians into the space of the adapted tower, Eq. (4)."""
        with self.trainer.phase("calibration"):
            transport_memory(self.config.calibration, self.memory, before, after)
            self.memory.fold(self.config.max_spaces)

    def train_prompts(self, pictures: Pictures) -> None:
        """Stage 2, Eq. (7): the task's features and features drawn from the Gaussians of all old classes."""
        if not self.config.simultaneous:  # else the prompts were trained with the tower
            self.fit_prompts(pictures, self.prompt_parameters(self.config.train_old_prompts), self.old)

    def prompt_parameters(self, all_classes: bool) -> list[nn.Parameter]:
        """The prompts of all tasks, or of the newest alone."""
        lists = [self.class_prompts, self.task_prompts] if self.config.task_prompt else [self.class_prompts]
        return [prompts for group in lists for prompts in (group if all_classes else group[-1:])]

    def fit_prompts(self, pictures: Pictures, parameters: Sequence[Any], old: int, frozen: bool = True) -> None:
        """Train by Eq. (7): CE on pictures and on features of the first `old` classes, + λ · orthogonality, Eq. (6).

        Args:
            pictures: New pictures; of known classes where all classes are old.
            parameters: What is trained, or groups with their own learning rates.
            old: Number of classes that are replayed.
            frozen: Whether the tower stays as it is.
        """
        features, labels = normalize(pictures.features, dim=-1) if frozen else None, pictures.labels
        new, again = len(torch.unique(labels)), old == self.seen
        share = new / (new + old)  # every class has the same weight, however few features are replayed
        how, count = losses.replay_budget(self.config.stage2, share, self.config.batch_of, self.config.max_replay)
        sampled = not again and 0 < self.config.softmax_classes < self.seen
        near = losses.nearest_classes(self.classifier[:old]) if sampled and old else None
        epoch: list[losses.Replay] = []

        def draw() -> None:
            steps = -(-len(labels) // how.batch_size)
            epoch[:] = losses.draw_replay(self.memory, old, steps, count, near, self.seen) if old else []

        def loss(rows: Tensor, *batch: Pictures) -> Tensor:
            texts, tasks = self.text_classifier(again or self.config.train_old_prompts)
            inputs = self.encode(batch[0], self.config.stage1.augment) if features is None else features[rows]
            replay = epoch.pop() if old else None
            value = losses.replay_loss(self.clip.scale, texts, inputs, labels[rows], replay, share)
            return value + self.config.ortho * losses.orthogonality(tasks) if self.config.task_prompt else value

        self.trainer.fit("stage2", parameters, len(labels) if frozen else pictures, loss, how, each_epoch=draw)

    @torch.no_grad()
    def store_texts(self, all_classes: bool) -> None:
        """Keep the class vectors and task texts; frozen prompts keep theirs."""
        self.classifier, self.task_texts = self.text_classifier(all_classes)

    def text_classifier(self, all_classes: bool) -> tuple[Tensor, Tensor]:
        """The unit vectors w = f_t(class prompt) + β f_t(task prompt) of Eq. (5), (C, dim); unit task texts, (K, dim).

        Without `all_classes` only the newest task is encoded; the others are taken as they were stored.
        """
        first = 0 if all_classes else len(self.sizes) - 1
        prompts = [self.class_texts[i](self.class_prompts[i]) for i in range(first, len(self.sizes))]
        if self.config.task_prompt:
            prompts += [self.task_text(vectors) for vectors in self.task_prompts[first:]]
        encoded = encode_prompts(self.clip, prompts)
        if self.config.normalise_parts:
            encoded = normalize(encoded, dim=-1)
        count = sum(self.sizes[first:])
        classes, tasks = encoded[:count], encoded[count:]
        if self.config.task_prompt:
            # Views and one copy: an index made from the list of sizes would have to cross to the device at every step.
            of_class = torch.cat([task.expand(size, -1) for task, size in zip(tasks[:, None], self.sizes[first:])])
            classes = classes + self.config.beta * of_class
        texts, tasks = normalize(classes, dim=-1), normalize(tasks, dim=-1)
        if first:
            texts = torch.cat([self.classifier[:-count], texts])
            tasks = torch.cat([self.task_texts[:-1], tasks])
        return texts, tasks

    def logits(self, batch: Batch) -> Tensor:
        return self.clip.scale * normalize(batch.features, dim=-1) @ self.classifier.T

    def train_together(self, pictures: Pictures) -> None:
        """Ablation: the loss of stage 2 with the tower free to move."""
        with tuned(self.clip, self.config.tuned, self.config.tuned_blocks, self.config.lora_rank) as tower:
            prompts = {"params": self.prompt_parameters(self.config.train_old_prompts), "lr": self.config.stage2.lr}
            self.fit_prompts(
                pictures, [prompts, {"params": tower, "lr": self.config.stage1.lr}], self.old, frozen=False
            )

    def learn_again(self, task: Task) -> None:
        """Merge more pictures of known classes into their Gaussians and train the prompts further.

        They are replayed too, so that one new picture does not outweigh the many earlier ones. The tower stays frozen.
        """
        features, labels = normalize(task.pictures.features, dim=-1), task.pictures.labels
        for label in torch.unique(labels).tolist():
            self.memory.merge(label, features[labels == label].double())
        self.fit_prompts(task.pictures, self.prompt_parameters(all_classes=True), old=self.seen)
        self.store_texts(all_classes=True)

    @torch.no_grad()
    def forget(self, index: int) -> None:
        task, place = self.drop_class(index)
        self.memory.remove(index)
        prompts = self.class_prompts[task]
        if len(prompts) > 1:
            names = self.names[sum(self.sizes[:task]) :][: self.sizes[task]]
            self.class_prompts[task] = nn.Parameter(without(prompts, place), requires_grad=False)
            self.class_texts[task] = PromptTexts(self.clip, names, self.config.prompt_length, self.config.suffix)
        else:  # the last class of its task
            keep = [other for other in range(len(self.class_prompts)) if other != task]
            self.class_prompts = nn.ParameterList(self.class_prompts[other] for other in keep)
            self.task_prompts = nn.ParameterList(self.task_prompts[other] for other in keep)
            self.class_texts = nn.ModuleList(self.class_texts[other] for other in keep)
            self.task_texts = self.task_texts[keep] if self.config.task_prompt else self.task_texts


@register
class DMCOT(DMC):
    name = "dmc-ot"
    title = "DMC-OT"
    Config = DMCOTConfig
