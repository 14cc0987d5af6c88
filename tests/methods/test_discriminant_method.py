"""Discriminant: taught in any order, taught again, forgotten, the model is that of all its pictures at once."""

import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch.nn.functional import normalize

from clipcil.clip import CLIP
from clipcil.data.tasks import Task
from clipcil.methods.base import NoConfig
from clipcil.methods.discriminant import Discriminant
from clipcil.training.trainer import Trainer
from support.features import FeaturePictures

DIM = 384


def made(classes: int, each: int, seed: int = 0) -> FeaturePictures:
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, DIM, generator=torch.Generator().manual_seed(9))
    labels = torch.arange(classes).repeat_interleave(each)
    return FeaturePictures(centres[labels] + torch.randn(len(labels), DIM, generator=generator), labels)


def taught(mini: CLIP, parts: list[FeaturePictures]) -> Discriminant:
    method = Discriminant(NoConfig(), mini, Trainer())
    for part in parts:
        fresh = int(part.labels.max()) >= method.seen
        names = [f"c{label}" for label in range(method.seen, int(part.labels.max()) + 1)]
        (method.learn if fresh else method.learn_again)(Task(0, names, part))
    return method


@pytest.mark.parametrize("each", [8, 3, 400])  # 400 > 384: the rows are compressed
def test_lessons_in_any_order_and_forgetting_are_exact(mini: CLIP, each: int) -> None:
    data, tests = made(4, each), made(4, 5, seed=7)
    whole = taught(mini, [data])
    half = torch.arange(len(data.labels)) % each < each // 2 + 1
    first, more = data[half], data[~half]
    parts = taught(mini, [first[first.labels < 2], first[first.labels >= 2], more])
    assert torch.equal(parts.counts, whole.counts) and len(parts.rows) <= 4 * DIM
    torch.testing.assert_close(parts.logits(tests), whole.logits(tests), rtol=1e-3, atol=2e-3)
    parts.forget(1)
    rest = data.labels != 1
    place = torch.tensor([0, -1, 1, 2])
    never = taught(mini, [FeaturePictures(data.pooled[rest], place[data.labels[rest]])])
    torch.testing.assert_close(parts.logits(tests), never.logits(tests), rtol=1e-3, atol=2e-3)
    assert parts.names == ["c0", "c2", "c3"] and len(parts.ranks) == 3


def test_scores_are_scikit_learns(mini: CLIP) -> None:
    data, tests = made(5, 12), made(5, 6, seed=3)
    method = taught(mini, [data])
    ratio = DIM / (60 - 1)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=ratio / (1 + ratio), priors=[0.2] * 5)
    oracle.fit(normalize(data.pooled, dim=-1).double().numpy(), data.labels.numpy())
    wanted = torch.from_numpy(oracle.decision_function(normalize(tests.pooled, dim=-1).double().numpy()))
    wanted = (wanted - wanted.mean(1, keepdim=True)) / (1 + ratio)  # A is 1 + ratio times its covariance
    torch.testing.assert_close(method.logits(tests).double(), wanted, rtol=1e-3, atol=1e-3)


def test_leaving_one_out_is_learning_without_it(mini: CLIP) -> None:
    data = made(3, 6)
    found, strange = taught(mini, [data]).leave_one_out(data, data.labels)
    for row in (0, 7, 17):
        keep = torch.arange(18) != row
        alone = FeaturePictures(data.pooled[row : row + 1], data.labels[row : row + 1])
        without = taught(mini, [data[keep]])
        wanted = without.logits(alone)
        torch.testing.assert_close(found[row].float(), wanted[0] - wanted.mean(), rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(strange[row], without.novelty(alone)[0], rtol=1e-6, atol=1e-6)


def test_the_last_class_can_be_forgotten_and_others_be_learnt_then(mini: CLIP) -> None:
    data, method = made(1, 5), taught(mini, [made(1, 4)])
    method.forget(0)
    assert (method.seen, len(method.rows), method.weight.shape) == (0, 0, (0, DIM))
    method.learn(Task(0, ["c0"], data))
    torch.testing.assert_close(method.novelty(data), taught(mini, [data]).novelty(data))


@pytest.mark.parametrize("change", [lambda t: {"rows": t["rows"][:, :-1]}, lambda t: {"counts": t["counts"] - 100}])
def test_a_state_that_cannot_be_is_refused_when_it_is_loaded(mini: CLIP, change) -> None:
    state = taught(mini, [made(2, 3)]).state_dict()
    fresh = Discriminant(NoConfig(), mini, Trainer())
    fresh.grow(["a", "b"])
    with pytest.raises((RuntimeError, ValueError)):
        fresh.load_state_dict({**state, **change(state)})
    fresh.load_state_dict(state)
