"""Held-out pictures are scored again after every lesson; lessons are watched, stopped and taken back."""

from pathlib import Path

import pytest
import torch
from scipy.stats import binomtest
from torch.nn.functional import normalize

import clipcil
from clipcil.classifier.learner import held_out_scores, split_held_out
from clipcil.classifier.lesson import LessonStoppedError
from clipcil.classifier.predict import stream_scores
from clipcil.classifier.scoring import Answer, Evaluation, evaluate_answers
from clipcil.classifier.sources import read_source
from clipcil.data.dataset import Dataset
from clipcil.data.reader import Reader
from clipcil.errors import UserError
from clipcil.intervals import wilson_interval
from support.lessons import FAST, pictures

WEEKS = (["airplane", "ant", "apple", "banana"], ["bee", "bicycle", "bread", "bus"])


@torch.no_grad()
def held_out_again(model: clipcil.Classifier) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The held-out pictures of all weeks read once more: features by today's tower, logits, labels."""
    reader, features, logits, labels = Reader(model.learner.method.clip, None), [], [], []
    for first, names in zip((0, 4), WEEKS, strict=True):
        train = read_source(pictures(names)).train
        _, rows = split_held_out(train.labels)
        batch = reader.open(train.subset(rows))
        features.append(batch.features)
        logits.append(model.learner.method.logits(batch))
        labels.append(train.labels[rows] + first)
    reader.close()
    return torch.cat(features), torch.cat(logits), torch.cat(labels)


@pytest.fixture(scope="module")
def dmc_ot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = clipcil.Classifier("dmc-ot", **FAST)
    model.learn(pictures(WEEKS[0]))
    folder = tmp_path_factory.mktemp("taught") / "model"
    model.save(folder)
    return folder


def test_every_lesson_scores_all_held_out_pictures_with_today_s_model() -> None:
    model = clipcil.Classifier("simplecil")
    first, second = (model.learn(pictures(names)) for names in WEEKS)
    assert first.evaluation.pictures == 4 and second.evaluation.pictures == 8 and second.held_out == 4
    features, logits, labels = held_out_again(model)
    torch.testing.assert_close(model.learner.held.features, features)
    right = logits.argmax(1) == labels
    assert second.accuracy == pytest.approx(float(right.double().mean()))
    for known, label in zip(model.class_facts, range(8), strict=True):
        assert (known.held_out, known.right) == (1, int(right[label]))
    wrong = {(model.classes[t], model.classes[g]) for t, g in zip(labels, logits.argmax(1), strict=True) if t != g}
    assert {(pair.true, pair.guess) for pair in second.evaluation.confused} == wrong
    assert [record.accuracy for record in model.history] == [first.accuracy, second.accuracy]
    assert [record.classes for record in model.history] == [4, 8]
    assert model.held_out_evaluation() == second.evaluation


def test_a_dataset_with_templates_of_its_own_is_encoded_by_the_tower_that_is_tuned() -> None:
    data = Dataset.from_pictures("mine", pictures(WEEKS[0]), {}, templates=("a {}.",))
    model = clipcil.Classifier("dmc-ot", **{**FAST, "stage1": {"epochs": 3, "lr": 3e-4}})
    model.learn(data)
    reader = Reader(model.learner.method.clip, None)
    held = reader.open(data.train.subset(split_held_out(data.train.labels)[1]))
    torch.testing.assert_close(model.learner.held.features, held.features)
    reader.close()


def test_where_the_tower_moves_the_features_are_carried_along() -> None:
    model = clipcil.Classifier(
        "dmc-ot", **{**FAST, "tuned": "blocks", "tuned_blocks": 3, "stage1": {"epochs": 3, "lr": 3e-4}}
    )
    model.learn(pictures(WEEKS[0]))
    left_alone = normalize(model.learner.held.features, dim=-1)
    model.learn(pictures(WEEKS[1]))
    assert model.learner.held.carried.tolist() == [True] * 4 + [False] * 4
    true = normalize(held_out_again(model)[0], dim=-1)
    carried = normalize(model.learner.held.features, dim=-1)
    torch.testing.assert_close(carried[4:], true[4:])
    error, drift = (carried[:4] - true[:4]).norm(dim=1), (left_alone - true[:4]).norm(dim=1)
    assert float(error.mean()) < 0.8 * float(drift.mean())


def test_a_method_that_reads_pixels_measures_its_newest_lesson_and_says_so() -> None:
    model = clipcil.Classifier("l2p", **{"train.epochs": 1})
    lesson = [model.learn(pictures(names)) for names in WEEKS][1]
    assert lesson.evaluation.pictures == 4 and any("held out of this lesson" in line for line in lesson.warnings)


@pytest.mark.parametrize("stop_at", [1, 3, "measuring"])
def test_a_lesson_can_be_watched_and_stopped(stop_at: int | str, dmc_ot: Path) -> None:
    model = clipcil.load(dmc_ot)
    before = model.learner.state()
    seen: list[tuple[str, int, int]] = []

    def should_stop() -> bool:
        return len(seen) == stop_at or bool(seen and seen[-1][0] == stop_at)

    with pytest.raises(LessonStoppedError):
        model.learn(pictures(WEEKS[1]), on_progress=lambda *told: seen.append(told), should_stop=should_stop)
    after = model.learner.state()
    assert model.classes == WEEKS[0] and after[0] == before[0]
    assert all(torch.equal(after[1][key], value) for key, value in before[1].items())
    assert should_stop(), "it stops at once"
    if stop_at == "measuring":  # the last stage: it may take long, and nothing is told after it
        assert {"encode", "stage1", "stage2", "measuring"} <= {stage for stage, _, _ in seen}
        assert all(0 <= done <= total or total == 0 for _, done, total in seen)


@pytest.mark.parametrize("method", ["simplecil", "dmc-ot"])
def test_the_last_change_can_be_taken_back(method: str, dmc_ot: Path) -> None:
    model = clipcil.load(dmc_ot) if method == "dmc-ot" else clipcil.Classifier(method)
    with pytest.raises(UserError, match="no change"):
        model.undo()
    if not model.classes:
        model.learn(pictures(WEEKS[0]))
    asked = pictures(["apple"], test=True)["apple"]
    answers, facts = model.predict(asked), model.facts()
    for change in (
        lambda: model.learn(pictures(WEEKS[1])),
        lambda: model.forget("ant"),
        lambda: model.rename("ant", "fire ant"),
    ):
        change()
        assert model.facts() != facts
        model.undo()
        assert model.predict(asked) == answers and model.facts() == facts
    model.learn(pictures(["bee"]))  # and it goes on learning from there
    assert len(model.classes) == 5


def test_pictures_that_are_trained_on_are_measured_by_leaving_one_out() -> None:
    """No picture is kept from training, and the accuracy is that of models without each picture: exactly, where a
    method chooses nothing on its memory."""
    data, model = pictures(WEEKS[0]), clipcil.Classifier("discriminant")
    lesson = model.learn(data)
    assert lesson.left_one_out and lesson.held_out == 0 and lesson.evaluation.pictures == 24
    assert [known.pictures for known in model.class_facts] == [6] * 4
    assert model.calibration.threshold is not None and not lesson.warnings  # 24 pictures are enough for a verdict
    right = 0
    for name, place in (("ant", 0), ("apple", 3), ("banana", 5)):
        without = {**data, name: data[name][:place] + data[name][place + 1 :]}
        other = clipcil.Classifier("discriminant")
        other.learn(without, hold_out=False)
        label = model.classes.index(name)
        left_out = held_out_scores(model.learner.method, model.learner.held).logits[6 * label + place]
        own = next(stream_scores([data[name][place]], other.learner.method))[1][0]
        torch.testing.assert_close(left_out, own - own.mean(), rtol=2e-2, atol=0.5)
        right += int(left_out.argmax() == own.argmax())
    assert right == 3


def test_the_default_measures_by_leaving_one_out_where_a_class_has_two_pictures() -> None:
    data = pictures(WEEKS[0])
    model = clipcil.Classifier()
    lesson = model.learn(data)
    assert lesson.left_one_out and lesson.evaluation.pictures == 24
    assert lesson.evaluation.right < 24, "pictures that were learnt are known by heart; left out they are not"
    assert model.calibration.threshold is not None and not lesson.warnings
    single = clipcil.Classifier()
    lesson = single.learn({name: found[:1] for name, found in data.items()})
    assert lesson.evaluation.pictures == 0 and single.calibration.threshold is None
    assert sum(single.predict(found[1]).name == name for name, found in data.items()) >= 2


def test_counting_answers() -> None:
    answers = [
        Answer("cat", "cat", 0.9),
        Answer("cat", "cat", 0.3, unknown=True),  # a false alarm; right if it had to answer
        Answer("cat", "dog", 0.6),
        Answer("dog", "cat", 0.8),
        Answer("dog", "cat", 0.7, unknown=True),
        Answer("yak", "dog", 0.95),  # a class the model never saw, given a class all the same
        Answer("yak", "dog", 0.2, unknown=True),
    ]
    found = evaluate_answers(answers, ["dog", "cat", "owl"])
    assert (found.pictures, found.right, found.false_alarms, found.unknown_pictures, found.missed) == (5, 1, 2, 2, 1)
    assert (found.accuracy, found.accuracy_if_forced, found.recognised) == (0.2, 0.4, 0.5)
    assert [(c.name, c.pictures, c.right) for c in found.classes] == [("dog", 2, 0), ("cat", 3, 1)]
    assert [(c.true, c.guess, c.pictures) for c in found.confused] == [("cat", "dog", 1), ("dog", "cat", 1)]
    assert [answer.probability for answer in found.mistakes] == [0.95, 0.8, 0.6, 0.7, 0.3]  # none of these: last
    assert Evaluation().accuracy is None


@pytest.mark.parametrize(("right", "total"), [(82, 96), (0, 5), (5, 5), (1, 1), (799, 1000)])
def test_the_interval_is_scipys(right: int, total: int) -> None:
    assert wilson_interval(right, total) == pytest.approx(
        tuple(binomtest(right, total).proportion_ci(method="wilson")), abs=1e-6
    )


def test_a_single_class_that_a_method_cannot_learn_is_a_warning() -> None:
    model = clipcil.Classifier("l2p", train={"epochs": 1})
    assert not any("one class" in said for said in model.learn(pictures(["airplane", "ant"])).warnings)
    assert any("tasks have one class" in said for said in model.learn(pictures(["apple"])).warnings)
