"""The equations of the paper against their literal form, in float64."""

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.methods.dmc import DMC, DMCConfig, DMCOTConfig
from clipcil.training.augment import TowerTraining
from clipcil.training.losses import BatchOf, clip_loss, orthogonality, replay_budget
from clipcil.training.trainer import Callback, Trainer, Training
from clipcil.training.tuning import tuned
from support.visual_stream import Recorder, learnt, stream, tower

FAST = Training(epochs=1, lr=1e-3)
FAST_TOWER = TowerTraining(epochs=1, lr=1e-3)


def literal_clip_loss(images: torch.Tensor, texts: torch.Tensor, scale: float) -> torch.Tensor:
    """Eq. (1) as printed: two sums over the batch, one text per picture."""
    total = images.new_zeros(())
    for i in range(len(images)):
        forward = torch.stack([scale * images[i] @ texts[j] for j in range(len(texts))])
        backward = torch.stack([scale * texts[i] @ images[j] for j in range(len(images))])
        total = total + torch.log(forward[i].exp() / forward.exp().sum())
        total = total + torch.log(backward[i].exp() / backward.exp().sum())
    return -total / (2 * len(images))


@pytest.mark.parametrize("seed", range(5))
def test_eq_1_from_class_scores_equals_the_batch_form(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = normalize(torch.randn(13, 8, generator=generator, dtype=torch.float64), dim=-1).requires_grad_()
    classes = normalize(torch.randn(5, 8, generator=generator, dtype=torch.float64), dim=-1)
    labels = torch.randint(0, 4, (13,), generator=generator)  # class 4 is absent, the others repeat
    ours = clip_loss(7.0 * images @ classes.T, labels)
    theirs = literal_clip_loss(images, classes[labels], 7.0)
    assert torch.allclose(ours, theirs, atol=1e-12)
    (gradient,) = torch.autograd.grad(ours, images, retain_graph=True)
    (expected,) = torch.autograd.grad(theirs, images)
    assert torch.allclose(gradient, expected, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_eq_1_counts_scores_of_mixed_precision_exactly(kind: torch.dtype) -> None:
    labels = torch.tensor([0] * 900 + [1] * 300)
    rounded = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0)).to(kind).requires_grad_()
    exact = rounded.detach().float().requires_grad_()
    value, wanted = clip_loss(rounded, labels), clip_loss(exact, labels)
    torch.testing.assert_close(value.float(), wanted, rtol=1e-6, atol=0)
    (gradient,), (steep,) = torch.autograd.grad(value, rounded), torch.autograd.grad(wanted, exact)
    assert (gradient - steep).norm() < 0.01 * steep.norm()  # the gradient itself is rounded to the scores' precision


def test_eq_6_is_the_mean_squared_product_of_distinct_tasks() -> None:
    tasks = torch.randn(4, 6, dtype=torch.float64)
    pairs = [(tasks[i] @ tasks[j]) ** 2 for i in range(4) for j in range(4) if i != j]
    assert torch.allclose(orthogonality(tasks), torch.stack(pairs).sum() / (4 * 3))
    assert orthogonality(tasks[:1]) == 0
    assert orthogonality(torch.eye(3)) == 0


@pytest.fixture
def method(tiny_clip: CLIP) -> DMC:
    torch.manual_seed(3)
    method = DMC(DMCOTConfig(beta=0.7), tiny_clip, Recorder())
    method.grow(["octopus", "fire engine"])
    method.grow(["apple"])
    return method


def test_eq_5_adds_the_task_text_to_the_class_texts(method: DMC) -> None:
    texts, tasks = method.text_classifier(all_classes=True)
    clip, tokens = method.clip, method.clip.tokenizer

    def encode(vectors: torch.Tensor, name: str) -> torch.Tensor:
        ids, ends = tokens([name])
        embedded = clip.text.embed(ids)
        row = torch.cat([embedded[:, :1], vectors[None], embedded[:, 1:]], dim=1)
        return clip.text(row, ends + len(vectors))[0]

    for index, (task, within, name) in enumerate([(0, 0, "octopus"), (0, 1, "fire engine"), (1, 0, "apple")]):
        own = encode(method.class_prompts[task][within], name)
        shared = encode(method.task_prompts[task][0], "")
        expected = own + 0.7 * shared
        assert torch.allclose(texts[index], expected / expected.norm(), atol=1e-5)
        assert torch.allclose(tasks[task], shared / shared.norm(), atol=1e-5)
    with torch.no_grad():  # frozen old prompts give the same texts without encoding them
        method.classifier, method.task_texts = texts, tasks
        again, same_tasks = method.text_classifier(all_classes=False)
    assert torch.allclose(again, texts, atol=1e-6) and torch.allclose(same_tasks, tasks, atol=1e-6)


def learn(tasks: int = 2, **options: Any) -> DMC:
    clip = tower()
    config = DMCOTConfig(**{"stage1": FAST_TOWER, "stage2": FAST, **options})
    return cast(DMC, learnt(DMC, config, clip, stream(clip, (3, 3)), tasks))


def test_both_readings_of_the_batch() -> None:
    """Two old classes and a new one; a batch of 30 holds 30 new pictures and replay, or 10 new ones and 20 replayed."""
    stage2 = replace(FAST, batch_size=30)
    readings: tuple[tuple[BatchOf, int, int], ...] = (("new", 30, 60), ("all", 10, 20))
    for reading, own, replayed in readings:
        how, count = replay_budget(stage2, 1 / 3, reading, 512)
        assert (how.batch_size, count) == (own, replayed)
        assert replay_budget(stage2, 1.0, reading, 512) == (stage2, 0)  # the first task replays nothing
        assert replay_budget(stage2, 0.1, reading, 8)[1] == 8
        how, count = replay_budget(replace(stage2, batch_size=1), 1 / 3, reading, 512)
        assert how.batch_size == 1 and count >= 1  # never without a new picture or without an old one


def test_the_tower_is_the_mean_of_what_the_tasks_made_of_it() -> None:
    """After two tasks: half of the tower before the second, half of what stage 1 made of it. A task that was forgotten
    counts too: the tower still has its share."""

    class Moving(Trainer):
        def fit(self, stage, parameters, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
            if stage == "stage1":
                with torch.no_grad():
                    for parameter in parameters:
                        parameter.add_(1.0)

    clip = tower()
    start, source = copy.deepcopy(clip.vision.state_dict()), stream(clip, (2, 2))
    method, moved = DMC(DMCConfig(average_tower=True), clip, Moving()), iter([1.0, 1.5, 1.5 + 1 / 3])
    for first in (0, 1):
        for task in source.tasks(first):
            method.learn(task)
            share = next(moved)
            for name, value in clip.vision.state_dict().items():
                torch.testing.assert_close(value, start[name] + share)
        method.forget(3)
        method.forget(2)


def test_stage_1_slows_down() -> None:
    """The rate of task k is 1/k of the first one's."""

    class Rates(Callback):
        def __init__(self) -> None:
            self.seen: list[list[float]] = []

        def begin_stage(self, stage: str, epochs: int, steps: int) -> None:
            self.seen += [[]] if stage == "stage1" else []

        def step(self, stage: str, epoch: int, step: int, loss: torch.Tensor, rate: float) -> None:
            if stage == "stage1":
                self.seen[-1].append(rate)

    def rates(**options: Any) -> list[list[float]]:
        clip, watch = tower(), Rates()
        how = replace(FAST_TOWER, batch_size=4, schedule="constant", epochs=2)
        method = DMC(DMCOTConfig(stage1=how, stage2=FAST, **options), clip, Trainer(callbacks=[watch]))
        for task in stream(clip, (2, 2, 2)).tasks():
            method.learn(task)
        return watch.seen

    assert rates() == [[1e-3] * 6] * 3
    assert rates(slow_down=True) == [pytest.approx([1e-3 / place] * 6) for place in (1, 2, 3)]


@pytest.mark.parametrize("what", ["tower", "blocks", "norms", "projection", "lora"])
def test_what_is_tuned_moves_and_the_rest_does_not(what: str) -> None:
    method, before = learn(tuned=what, tuned_blocks=1), dict(tower().vision.named_parameters())
    moved = {name for name, value in method.tower.named_parameters() if not torch.equal(value, before[name])}
    assert set(dict(method.tower.named_parameters())) == set(before), "low-rank updates must be merged"
    allowed = {
        "tower": lambda name: True,
        "blocks": lambda name: "layers.5." in name or "post_layernorm" in name or "projection" in name,
        "norms": lambda name: "norm" in name,
        "projection": lambda name: name.startswith("visual_projection"),
        "lora": lambda name: name.endswith(("q_proj.weight", "v_proj.weight")),
    }[what]
    assert moved and all(allowed(name) for name in moved)


def test_a_low_rank_update_is_merged_exactly() -> None:
    clip = tower()
    version, pixels = clip.version, torch.randn(2, *clip.preprocess.shape)
    with tuned(clip, "lora", rank=3) as parameters, torch.no_grad():
        for parameter in parameters:
            parameter.copy_(torch.randn_like(parameter) * 0.1)
        inside = clip.vision(pixels).features
    assert torch.allclose(clip.vision(pixels).features, inside, atol=1e-5)
    assert clip.version != version  # cached features of the tower before are stale


def test_ablations_run_and_differ() -> None:
    classifiers = [learn().classifier]
    for change in (
        *({"calibration": "none"}, {"calibration": "class"}, {"task_prompt": False}, {"simultaneous": True}),
        {"stage1": replace(FAST_TOWER, augment="flip")},
    ):
        found = learn(**change).classifier
        assert torch.isfinite(found).all() and not any(torch.equal(found, other) for other in classifiers), change
        classifiers.append(found)


def test_old_prompts_stay_when_told_to() -> None:
    trained, frozen, first = learn(), learn(train_old_prompts=False), learn(1, train_old_prompts=False)
    for name in ("class_prompts", "task_prompts"):
        old = getattr(first, name)[0]
        assert torch.equal(getattr(frozen, name)[0], old) and not torch.equal(getattr(trained, name)[0], old)
    for name in ("classifier", "task_texts"):
        assert torch.equal(getattr(frozen, name)[: len(getattr(first, name))], getattr(first, name))


def test_replay_weighs_every_class_alike(method: DMC, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of replayed rows, the loss is the mean over classes of the expected loss of the class."""
    seen: list[torch.Tensor] = []

    def sample(classes: torch.Tensor) -> torch.Tensor:
        seen.append(classes)
        return normalize(torch.ones(len(classes), 24), dim=-1)

    monkeypatch.setattr(method.memory, "sample", sample)
    features, session = normalize(torch.ones(3, 24), dim=-1), cast(Recorder, method.trainer)
    pictures = SimpleNamespace(features=features, labels=torch.tensor([2, 2, 2]))
    method.config = replace(method.config, task_prompt=False, ortho=0.0)
    method.fit_prompts(pictures, [], old=2)  # type: ignore[arg-type]
    session.each_epoch()
    value = session.stages["stage2"][0](torch.arange(3))
    texts, _ = method.text_classifier(all_classes=True)
    scores = torch.log_softmax(method.clip.scale * features[:1] @ texts.T, dim=1)[0]
    counts = torch.bincount(seen[0], minlength=2)
    assert counts[0] == counts[1]  # both old classes as often
    torch.testing.assert_close(value, -scores.mean(), rtol=1e-4, atol=0)
