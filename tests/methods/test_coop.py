"""CoOp with memory: one context, trained over all classes on new pictures and exemplars."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy, normalize

from clipcil.clip import CLIP
from clipcil.memory.exemplars import Budget
from clipcil.methods.coop import CoOp, CoOpConfig
from clipcil.prompts.text import PromptTexts, encode_prompts
from clipcil.training.trainer import Trainer, Training
from support.features import (
    WORDS,
    FeaturePictures,
    accuracy,
    assert_batch_invariant,
    assert_survives_checkpoint,
    learn_all,
    make_tasks,
    make_test,
)

QUICK = Training(epochs=4, lr=0.02, optimizer="sgd", batch_size=16)


def make(clip: CLIP, train: Training = QUICK) -> CoOp:
    torch.manual_seed(0)
    return CoOp(CoOpConfig(train=train, context_length=4, memory=Budget(3, "class")), clip, Trainer())


def teach(clip: CLIP, pictures: FeaturePictures) -> None:
    """Put the features near what the tower says of the classes, so that there is a context to be found."""
    texts = normalize(clip.encode_texts([f"a drawing of a {name}." for name in WORDS]), dim=-1)
    pictures.features = texts[pictures.labels] + 0.1 * pictures.features


def test_learns_over_all_classes(mini: CLIP) -> None:
    tasks, pictures = make_tasks(mini, [3, 1, 2]), make_test(mini, 6)
    for part in (pictures, *(task.pictures for task in tasks)):
        teach(mini, part)  # type: ignore[arg-type]
    frozen = {name: value.clone() for name, value in mini.state_dict().items()}
    untrained = learn_all(make(mini, Training(epochs=0)), tasks)
    method = learn_all(make(mini), tasks)
    before, after = (cross_entropy(m.logits(pictures), pictures.labels) for m in (untrained, method))
    assert after < 0.5 * before
    assert accuracy(method, pictures) > accuracy(untrained, pictures)
    assert all(torch.equal(value, frozen[name]) for name, value in mini.state_dict().items())
    assert [name for name, _ in method.named_parameters()] == ["context"]
    assert method.memory.labels.tolist() == [label for label in range(6) for _ in range(3)]
    assert_batch_invariant(method, pictures)
    assert_survives_checkpoint(method, make(mini), pictures)


def test_texts_are_the_context_before_each_name(tiny_clip: CLIP) -> None:
    method = learn_all(make(tiny_clip), make_tasks(tiny_clip, [2, 2]))
    assert isinstance(method, CoOp)
    texts = PromptTexts(tiny_clip, method.names, 4, ".")
    expected = normalize(encode_prompts(tiny_clip, [texts(method.context)]), dim=-1)
    torch.testing.assert_close(method.classifier, expected, atol=1e-4, rtol=1e-4)


def test_exemplars_take_part_in_training(tiny_clip: CLIP) -> None:
    """Without them the second task trains on other pictures: the context must come out different."""
    tasks = make_tasks(tiny_clip, [2, 2])
    method, forgetful = make(tiny_clip), make(tiny_clip)
    learn_all(method, tasks[:1])
    learn_all(forgetful, tasks[:1])
    assert torch.equal(method.context, forgetful.context)  # the same seed, the same run
    forgetful.memory.features, forgetful.memory.labels = forgetful.memory.features[:0], forgetful.memory.labels[:0]
    learn_all(method, tasks[1:])
    learn_all(forgetful, tasks[1:])
    assert not torch.allclose(method.context, forgetful.context)
