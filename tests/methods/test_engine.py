"""ENGINE: sums of adapters, frozen old ones, losses and re-ranking by hand, with and without descriptions."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.data.tasks import TaskStream
from clipcil.errors import UserError
from clipcil.methods.engine import ENGINE, ENGINEConfig, info_nce, rerank, summed
from clipcil.training.trainer import Trainer, Training
from support.visual_stream import FAST, Recorder, all_tests, assert_rows_stand_alone, learnt, stream, tower

QUICK = ENGINEConfig(adapters=replace(FAST, epochs=6), views=2)

ANIMALS = {
    "lynx": {
        "wolf": ["tufts on the ears", "a short tail"],
        "crow": ["four legs", "spotted fur"],
        "hen": ["four legs", "sharp teeth"],
    },
    "wolf": {
        "lynx": ["a long muzzle", "a bushy tail"],
        "crow": ["four legs", "grey fur"],
        "hen": ["four legs"],
    },
    "crow": {
        "lynx": ["black feathers", "two wings"],
        "wolf": ["black feathers", "a beak"],
        "hen": ["black feathers", "a slim body"],
    },
    "hen": {
        "lynx": ["brown feathers", "a red comb"],
        "wolf": ["two legs", "a red comb"],
        "crow": ["a red comb", "a round body"],
    },
}


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return tower()


def renamed(source: TaskStream) -> TaskStream:
    source.names = list(ANIMALS)
    return source


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    path = tmp_path / "animals.json"
    path.write_text(json.dumps(ANIMALS), encoding="utf-8")
    return path


def test_adapters_are_summed() -> None:
    adapters = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
    inputs = torch.randn(4, 5)
    torch.testing.assert_close(summed(adapters)(inputs), sum(adapter(inputs) for adapter in adapters))
    summed(adapters)(inputs).sum().backward()  # type: ignore[no-untyped-call]
    assert adapters[2].weight.grad is not None
    assert adapters[0].weight.grad is None and adapters[1].weight.grad is None


def test_info_nce_by_hand() -> None:
    anchors, keys = normalize(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    terms = [-torch.log(torch.exp(anchors[i] @ keys[i]) / torch.exp(anchors[i] @ keys.T).sum()) for i in range(3)]
    torch.testing.assert_close(info_nce(anchors, keys), torch.stack(terms).mean())


def test_rerank_by_hand() -> None:
    generator = torch.Generator().manual_seed(1)
    pictures, texts = torch.randn(3, 4, generator=generator), torch.randn(6, 6, 4, generator=generator)
    scores = torch.randn(3, 6, generator=generator)
    result = rerank(pictures, scores, texts, 3)
    for row in range(3):
        best = sorted(range(6), key=lambda c: -float(scores[row, c]))[:3]
        for c in range(6):
            about = normalize(torch.stack([texts[c, b] for b in best if b != c]).mean(0), dim=0)
            assert float(result[row, c]) == pytest.approx(float(pictures[row] @ about) if c in best else 0.0, abs=1e-5)


def test_loss_of_the_second_task_by_hand(clip: CLIP) -> None:
    """Without descriptions: in-batch contrast of pictures and noisy prototypes with their texts, plus a_v · L_img."""
    session, source = Recorder(), stream(clip)
    method = ENGINE(QUICK, clip, session)
    tasks = source.tasks()
    method.learn(next(tasks))
    task = next(tasks)
    method.grow(task.names)
    torch.manual_seed(0)
    views = method.noisy_views(task.pictures)
    assert views.shape == (2, len(task.pictures), clip.config.dim)
    method.train_adapters(task.pictures, [], views)
    assert {id(p) for p in session.trained} == {
        id(p) for a in (method.image_adapters, method.text_adapters) for p in a[-1].parameters()
    }
    rows = torch.tensor([0, 3, 7])
    torch.manual_seed(5)
    value = session.loss(rows)
    torch.manual_seed(5)
    old = method.prototypes[:3] + 0.25 * torch.randn(3, clip.config.dim)
    inputs = torch.cat([task.pictures.features[rows], old])
    targets = torch.cat([task.pictures.labels[rows], torch.arange(3)])
    adapted = normalize(sum(adapter(inputs) for adapter in method.image_adapters), dim=-1)
    texts = normalize(sum(adapter(method.sentences[targets, 0]) for adapter in method.text_adapters), dim=-1)
    logits, places = clip.logit_scale * adapted @ texts.T, torch.arange(6)
    contrast = nn.functional.cross_entropy(logits, places) + nn.functional.cross_entropy(logits.T, places)
    view = torch.randint(2, (3,))
    noisy = torch.stack([views[int(v), int(r)] for v, r in zip(view, rows, strict=True)])
    torch.testing.assert_close(value, contrast / 2 + 0.5 * info_nce(adapted[:3], noisy))


def test_replay_centres_and_head_come_from_the_task(clip: CLIP) -> None:
    source = stream(clip)
    tasks = source.tasks()
    method = ENGINE(QUICK, clip, Recorder())
    pictures = next(tasks)
    method.learn(pictures)
    features, labels = pictures.pictures.features, pictures.pictures.labels
    torch.testing.assert_close(method.prototypes[2], features[labels == 2].mean(0))
    pooled = normalize(pictures.pictures.pooled.double(), dim=-1)
    torch.testing.assert_close(method.head.centres[1], pooled[labels == 1].mean(0))


def test_old_adapters_and_towers_keep_their_bits(clip: CLIP) -> None:
    towers = {key: value.clone() for key, value in clip.state_dict().items()}
    method = ENGINE(QUICK, clip, Trainer())
    kept: list[dict[str, torch.Tensor]] = []
    for task in stream(clip).tasks():
        method.learn(task)
        for index, state in enumerate(kept):
            for name, value in state.items():
                assert torch.equal(value, method.image_adapters[index].state_dict()[name])
        kept.append({key: value.clone() for key, value in method.image_adapters[-1].state_dict().items()})
    assert all(torch.equal(value, towers[key]) for key, value in clip.state_dict().items())
    assert not any(parameter.requires_grad for parameter in method.parameters())


def test_without_descriptions(clip: CLIP) -> None:
    source = stream(clip)
    method = learnt(ENGINE, QUICK, clip, source)
    pictures = all_tests(source)
    assert_rows_stand_alone(method, pictures)
    assert (method.logits(pictures).argmax(1) == pictures.labels).float().mean() > 0.5  # chance: 0.125
    assert len(method.notes()) == 1 and "without descriptions" in method.notes()[0]


def test_with_descriptions_the_best_are_reranked(clip: CLIP, animals: Path) -> None:
    config = replace(QUICK, descriptions=animals, top=3, head=0.0, rerank=1.0)
    source = renamed(stream(clip, (2, 2), each=20))
    method = learnt(ENGINE, config, clip, source, tasks=2)
    assert isinstance(method, ENGINE) and method.notes() == []
    for a, b in permutations(range(4), 2):
        first, second = method.names[a], method.names[b]
        sentences = [f"{first} with {phrase}" for phrase in ANIMALS[first][second]]
        expected = clip.encode_texts(sentences).mean(0)
        torch.testing.assert_close(method.pair_texts[a, b], expected)
    pictures = all_tests(source)[:20]
    scores = method.logits(pictures)
    assert ((scores != 0).sum(1) == 3).all()  # only the best three have a score when re-ranking is all there is
    cosines = learnt_cosines(method, pictures)
    torch.testing.assert_close(
        scores, rerank(normalize(pictures.features, dim=-1), cosines, method.pair_texts, 3), atol=1e-6, rtol=0
    )


def learnt_cosines(method: ENGINE, pictures: Any) -> torch.Tensor:
    return normalize(summed(method.image_adapters)(pictures.features), dim=-1) @ method.classifier.T


def test_descriptions_are_encoded_while_learning_and_never_while_scoring(
    clip: CLIP, animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = renamed(stream(clip, (2, 2), each=20))
    method = learnt(ENGINE, replace(QUICK, descriptions=animals), clip, source, tasks=2)

    def refuse(texts: Any) -> Any:
        raise AssertionError(f"encoded {texts} at test time")

    monkeypatch.setattr(clip, "encode_texts", refuse, raising=False)
    pictures = all_tests(source)
    whole = method.logits(pictures)
    parts = torch.cat([method.logits(batch) for batch in pictures.batches(7)])
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)
    torch.testing.assert_close(method.logits(pictures), whole, atol=0, rtol=0)


def test_a_class_that_is_not_described_is_named(clip: CLIP, tmp_path: Path) -> None:
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"lynx": {"wolf": ["tufts"]}, "wolf": {"lynx": ["a muzzle"]}}), encoding="utf-8")
    with pytest.raises(UserError, match="'crow'"):
        learnt(ENGINE, replace(QUICK, descriptions=path), clip, renamed(stream(clip, (2, 2))), tasks=2)


@pytest.mark.parametrize("described", [False, True])
def test_checkpoint_gives_equal_logits(clip: CLIP, animals: Path, described: bool) -> None:
    config = replace(QUICK, descriptions=animals if described else None)
    source = renamed(stream(clip, (2, 2)))
    method = learnt(ENGINE, config, clip, source, tasks=2)
    animals.unlink()  # a checkpoint must not need the file again
    fresh = ENGINE(config, clip, Trainer())
    fresh.grow(method.names[:2])
    fresh.grow(method.names[2:])
    fresh.load_state_dict(method.state_dict())
    pictures = all_tests(source)
    assert torch.equal(fresh.logits(pictures), method.logits(pictures))


def test_descriptions_are_the_same_after_a_resume(clip: CLIP, animals: Path) -> None:
    """The sentences of earlier tasks are no part of a checkpoint: they are encoded again, in the same batches."""
    config, source = replace(QUICK, descriptions=animals), renamed(stream(clip, (2, 2)))
    torch.manual_seed(0)
    whole, tasks = ENGINE(config, clip, Trainer()), source.tasks()
    whole.learn(next(tasks))
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    task = next(tasks)
    torch.manual_seed(1)
    whole.learn(task)
    resumed = ENGINE(config, clip, Trainer())
    resumed.grow(whole.names[:2])
    resumed.load_state_dict(state)
    torch.manual_seed(1)
    resumed.learn(task)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key


def test_a_first_task_of_one_class(clip: CLIP, animals: Path) -> None:
    config = replace(QUICK, descriptions=animals, adapters=Training(epochs=1, optimizer="sgd"))
    source = renamed(stream(clip, (1, 3), each=2))
    for tasks in (1, 2):
        method = learnt(ENGINE, config, clip, source, tasks)
        scores = method.logits(all_tests(source))
        assert scores.shape[1] == method.seen and torch.isfinite(scores).all()
