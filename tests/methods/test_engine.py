"""ENGINE, facts read at LAMDA-CL/ICCV25-ENGINE, commit 8803d66 (models/engine.py, utils/inc_net.py, utils/loss.py).

- One linear adapter (with bias) of pictures and one of texts for each task, outputs summed; inputs are raw features,
  and each template is adapted and normalised before the mean over templates is taken and normalised.
- Loss: CLIP's symmetric in-batch loss times the *raw* logit_scale, the batch extended by one noisy prototype (mean
  raw feature + σ noise) of every old class; + a_t · InfoNCE of the adapted texts of *all targets, the replayed ones
  too*, with the unit text of "<name> with <one of the class's descriptions>"; + a_v · InfoNCE of adapted pictures
  with the unit features of noisy pictures. Temperature 1.
- Head on unit features before the projection: μ class means; Ω = d · pinv((n − 1) Cov + tr(Cov) I) of the task's
  centred features; from the second task on Ω ← k/C Ω + (C − k)/C Ω_new + (k/C)(C − k)/C² (m − m_new)(m − m_new)ᵀ with
  m the means of the class means; W = Ω μ, b = log(1/C) − ½ μᵀ Ω μ; scores divided by their norm, not centred.
- Re-ranking of the five best: texts "a with D[a][b]" averaged over the four rivals b, *then normalised*, times the
  unit picture; 0 for the rest.
- final = stat · head + (1 − stat) · (rerank · r + (1 − rerank) · cosine); (0.8, 0.5) on CIFAR-100.

The code draws one description for every pair, three times; with one description for each pair there is nothing to
draw.
"""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.clip import CLIP
from clipcil.data.tasks import TaskStream
from clipcil.errors import UserError
from clipcil.heads.lda import RunningHead
from clipcil.methods.base import method_state, restore_method
from clipcil.methods.engine import ENGINE, ENGINEConfig
from clipcil.training.trainer import Trainer
from reproduce.fidelity import engine as fidelity
from reproduce.fidelity.stream import add_up
from support.visual_stream import FAST, Recorder, all_tests, learnt, stream, tower

TEMPLATES = ("a photo of a {}.", "a drawing of a {}.")
NAMES = ["lynx", "wolf", "crow", "hen", "carp", "pike", "moth", "bee"]


def phrase(a: str, b: str) -> str:
    return f"the mark of {a} beside {b}"


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return tower()


@pytest.fixture
def two_tasks(clip: CLIP, tmp_path: Path) -> tuple[ENGINE, Recorder, Any, Any]:
    """Two tasks of 3 and 2 classes with random adapters, and the second task, still open."""
    path = tmp_path / "marks.json"
    table = {a: {b: [phrase(a, b)] for b in NAMES if b != a} for a in NAMES}
    path.write_text(json.dumps(table), encoding="utf-8")
    session, source = Recorder(), stream(clip)
    source.names = NAMES
    torch.manual_seed(0)
    config = ENGINEConfig(adapters=FAST, descriptions=path, views=1, head=0.6, rerank=0.7, top=4)
    method = ENGINE(config, clip, session, TEMPLATES)
    tasks = source.tasks()
    for _ in range(2):
        task = next(tasks)
        method.learn(task)
        with torch.no_grad():
            for adapters in (method.image_adapters, method.text_adapters):
                for parameter in adapters[-1].parameters():
                    parameter.normal_(std=0.5)
    return method, session, task, (tasks, source)


def test_head_is_the_reference() -> None:
    torch.manual_seed(0)
    ours, known = RunningHead(10, averaged=True), (torch.zeros(0, 10), torch.zeros(()))
    for old, size in ((0, 3), (3, 2), (5, 4)):
        unit = normalize(torch.randn(7 * size, 10, dtype=torch.float64) + 1, dim=-1)
        labels = torch.arange(old, old + size).repeat_interleave(7)
        known = fidelity.head(*known, unit, labels, old, old + size)
        ours.grow(size)
        ours.add(list(unit.split(7)))
    means, inverse = known
    x = torch.randn(5, 10, dtype=torch.float64)
    bias = -math.log(9) - ((means @ inverse) * means).sum(1) / 2
    torch.testing.assert_close(ours(x), x @ inverse @ means.T + bias, atol=1e-4, rtol=1e-4)  # its ridge is float32


@torch.no_grad()
def test_score_is_the_reference(clip: CLIP, two_tasks: Any) -> None:
    method, _, _, (_, source) = two_tasks
    texts = []
    for name in method.names:
        adapted = add_up(method.text_adapters, clip.encode_texts([t.format(name) for t in TEMPLATES]))
        texts.append(normalize(normalize(adapted, dim=-1).mean(0), dim=-1))
    method.classifier.copy_(torch.stack(texts))
    fresh = normalize(add_up(method.text_adapters, method.sentences), dim=-1).mean(1)
    torch.testing.assert_close(normalize(fresh, dim=-1), method.classifier)  # what learning stores, with these adapters
    pictures = all_tests(source)[::9]
    for row in range(len(pictures)):
        one = pictures[row : row + 1]
        cosine = normalize(add_up(method.image_adapters, one.features), dim=-1)[0] @ torch.stack(texts).T
        best = cosine.topk(4).indices.tolist()
        rank = torch.zeros(5)
        for a in best:
            about = [f"{method.names[a]} with {phrase(method.names[a], method.names[b])}" for b in best if b != a]
            text = clip.encode_texts(about).mean(0)
            rank[a] = normalize(one.features, dim=-1)[0] @ (text / text.norm())
        head = method.head(normalize(one.pooled, dim=-1))[0]
        expected = 0.6 * head / head.norm() + 0.4 * (0.7 * rank + 0.3 * cosine)
        torch.testing.assert_close(method.logits(one)[0], expected, atol=1e-4, rtol=1e-4)


def test_loss_is_the_reference(clip: CLIP, two_tasks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    method, session, task, _ = two_tasks
    views = method.noisy_views(task.pictures)
    method.train_adapters(task.pictures, method.encode_new_descriptions(), views)
    newest = [*method.image_adapters[-1].parameters(), *method.text_adapters[-1].parameters()]
    assert {id(p) for p in session.trained} == {id(p) for p in newest}
    draws = torch.linspace(0, 0.999, 6)
    noise = torch.randn(3, clip.config.dim)
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: noise)
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: draws)
    rows = torch.tensor([0, 8, 5])
    value = session.loss(rows)
    batch = task.pictures[rows]
    targets = torch.cat([batch.labels, torch.arange(3)])
    images = normalize(
        add_up(method.image_adapters, torch.cat([batch.features, method.prototypes[:3] + 0.25 * noise])), dim=-1
    )
    names = [method.names[int(label)] for label in targets]
    texts = normalize(add_up(method.text_adapters, clip.encode_texts([TEMPLATES[0].format(n) for n in names])), dim=-1)
    place = torch.arange(6)
    logits = clip.logit_scale * images @ texts.T
    expected = (cross_entropy(logits, place) + cross_entropy(logits.T, place)) / 2
    said = []
    for name, draw in zip(names, draws, strict=True):
        mine = method.names.index(name)  # descriptions in the order in which the tasks brought them
        order = sorted((b for b in range(5) if b != mine), key=lambda b: (max(b, mine) >= 3, b))
        said.append(f"{name} with {phrase(name, method.names[order[int(draw * 4)]])}")
    expected = expected + 2 * cross_entropy(texts @ normalize(clip.encode_texts(said), dim=-1).T, place)
    expected = expected + 0.5 * cross_entropy(images[:3] @ views[0][rows].T, place[:3])
    torch.testing.assert_close(value, expected, atol=1e-4, rtol=1e-4)


QUICK = ENGINEConfig(adapters=replace(FAST, epochs=6), views=2)

ANIMALS = {a: {b: [phrase(a, b), f"nothing of a {b}"] for b in NAMES[:4] if b != a} for a in NAMES[:4]}


def renamed(source: TaskStream) -> TaskStream:
    source.names = list(ANIMALS)
    return source


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    path = tmp_path / "animals.json"
    path.write_text(json.dumps(ANIMALS), encoding="utf-8")
    return path


def test_descriptions_are_averaged_and_encoded_while_learning_alone(
    clip: CLIP, animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = renamed(stream(clip, (2, 2), each=20))
    method = learnt(ENGINE, replace(QUICK, descriptions=animals), clip, source, tasks=2)
    assert isinstance(method, ENGINE) and method.notes() == []
    sentences = [f"lynx with {phrase}" for phrase in ANIMALS["lynx"]["wolf"]]
    torch.testing.assert_close(method.pair_texts[0, 1], clip.encode_texts(sentences).mean(0))

    def refuse(texts: Any) -> Any:
        raise AssertionError(f"encoded {texts} at test time")

    monkeypatch.setattr(clip, "encode_texts", refuse, raising=False)
    method.logits(all_tests(source))


def test_classes_that_are_not_described_are_named_and_a_note_says_that_none_is(clip: CLIP, tmp_path: Path) -> None:
    assert "without descriptions" in ENGINE(QUICK, clip, Trainer()).notes()[0]
    path = tmp_path / "few.json"
    path.write_text(json.dumps({"lynx": {"wolf": ["tufts"]}, "wolf": {"lynx": ["a muzzle"]}}), encoding="utf-8")
    with pytest.raises(UserError, match="'crow'"):
        learnt(ENGINE, replace(QUICK, descriptions=path), clip, renamed(stream(clip, (2, 2))), tasks=2)


def test_a_checkpoint_needs_no_file_to_score_and_a_resume_encodes_the_same_descriptions(
    clip: CLIP, animals: Path
) -> None:
    """The sentences of earlier tasks are no part of a checkpoint: they are encoded again, in the same batches."""
    config, source = replace(QUICK, descriptions=animals), renamed(stream(clip, (1, 3)))
    whole, tasks = ENGINE(config, clip, Trainer()), source.tasks()
    whole.learn(next(tasks))
    resumed = ENGINE(config, clip, Trainer())
    restore_method(resumed, *method_state(whole))
    task = next(tasks)
    for method in (whole, resumed):
        torch.manual_seed(1)
        method.learn(task)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[key]), key
    animals.unlink()
    fresh = ENGINE(config, clip, Trainer())
    restore_method(fresh, *method_state(whole))
    assert torch.equal(fresh.logits(all_tests(source)), whole.logits(all_tests(source)))
