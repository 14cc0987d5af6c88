"""RAPF: fusion with known answers, hinge and widening by hand, replay, and that nothing but the matrix moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.methods.rapf import RAPF, RAPFConfig, fuse, hard_pairs, round_robin, separation, spread, widening
from clipcil.training.trainer import Trainer
from support.visual_stream import FAST, Recorder, all_tests, assert_rows_stand_alone, learnt, stream, tower

QUICK = RAPFConfig(
    adapter=replace(FAST, epochs=10), threshold=2.1, replay_classes=3, replay_each=5, replay_epoch=0, pair_each=4
)


@pytest.fixture(scope="module")
def clip() -> CLIP:
    return tower()


def rotation(dim: int, seed: int) -> Tensor:
    matrix = torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return torch.linalg.qr(matrix).Q


def random(dim: int, seed: int) -> Tensor:
    return torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_fusion_of_a_diagonal_matrix_is_entry_by_entry() -> None:
    """U of a diagonal matrix permutes and flips rows at most, so the answer can be written down."""
    old = torch.diag(torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))
    new = torch.tensor([[3.0, 0.0, 0.4], [0.0, 1.0, 0.0], [0.2, 0.0, 1.0]], dtype=torch.float64)
    # Largest change 1 (entry 1,1). b = 0.5: shares of the new matrix are 0.5 + change, at most 1.
    expected = torch.tensor([[3.0, 0.0, 0.9 * 0.4], [0.0, 1.0, 0.0], [0.7 * 0.2, 0.0, 1.0]], dtype=torch.float64)
    torch.testing.assert_close(fuse(old, new, 0.5), expected)


def test_fusion_turns_with_its_matrices() -> None:
    old, new, turn = random(6, 0), random(6, 1), rotation(6, 2)
    torch.testing.assert_close(fuse(turn @ old, turn @ new, 0.3), turn @ fuse(old, new, 0.3))


def test_fusion_at_its_ends() -> None:
    old, new = random(5, 3), random(5, 4)
    torch.testing.assert_close(fuse(old, new, 1.0), new)
    assert torch.equal(fuse(old, old, 0.6), old)
    # Without bias, only the entry that changed most is wholly new; the mix lies strictly between the two.
    mixed = fuse(old, new, 0.0)
    assert 0 < (mixed - old).norm() < (new - old).norm()


def test_separation_is_the_hinge_over_all_draws() -> None:
    turned = normalize(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)), dim=-1)
    own, rival = normalize(torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(1)), dim=-1)
    terms = [
        max(0.0, 0.1 - float(turned[p, n] @ own[p]) + float(turned[p, n] @ rival[p]))
        for p in range(2)
        for n in range(3)
    ]
    assert separation(turned, own, rival, 0.1) == pytest.approx(sum(terms) / 6, abs=1e-6)


def test_hard_pairs_join_an_old_and_a_new_class_whose_texts_are_close() -> None:
    angles = torch.tensor([0.0, 1.0, 2.0, 0.1, 1.9])
    texts = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert hard_pairs(texts, 3, 0.15).tolist() == [[0, 3], [2, 4]]
    assert hard_pairs(texts, 3, 0.05).shape == (0, 2)
    assert hard_pairs(texts, 0, 5.0).shape == (0, 2)


def test_old_classes_take_turns() -> None:
    turns = round_robin(5, 7, 3)
    assert turns.shape == (7, 3)
    counts = torch.bincount(turns.flatten(), minlength=5)
    assert counts.max() - counts.min() <= 1
    assert all(len(set(row.tolist())) == 3 for row in turns)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_widening_adds_the_covariance_it_says(sign: float) -> None:
    dim = 4
    factor = torch.eye(dim) + sign * 0.2 * torch.ones(dim, dim)
    covariance = factor @ factor.T
    a, b = spread(covariance).tolist()
    assert a == pytest.approx(float(covariance.diagonal().mean()))
    assert b == pytest.approx(float(covariance[~torch.eye(dim, dtype=torch.bool)].mean()))
    torch.manual_seed(0)
    drawn = widening(torch.tensor([[a, b]]).expand(200_000, 2), dim)
    wanted = torch.full((dim, dim), b).fill_diagonal_(a)
    torch.testing.assert_close(torch.cov(drawn.T), wanted, atol=0.02, rtol=0)


def test_loss_is_cross_entropy_over_task_and_replay_plus_the_hinge(clip: CLIP) -> None:
    """The loss of the second task, from the same random numbers by hand."""
    session, source = Recorder(), stream(clip)
    method = RAPF(QUICK, clip, session)
    tasks = source.tasks()
    method.learn(next(tasks))
    task = next(tasks)
    method.grow(task.names)
    draws: list[object] = []
    session.fit = lambda *args, **kwargs: draws.extend([args[3], kwargs["each_epoch"]])  # type: ignore[method-assign]
    method.train_adapter(task.pictures)
    loss, each_epoch = draws
    rows = torch.arange(4)
    torch.manual_seed(3)
    each_epoch()  # type: ignore[operator]
    value = loss(rows)  # type: ignore[operator]
    torch.manual_seed(3)
    steps = -(-len(task.pictures) // QUICK.adapter.batch_size)
    classes = round_robin(3, steps, 3).repeat_interleave(5, dim=1)
    replayed = method.memory.sample(classes.flatten()).view(steps, 15, -1)[-1]
    pairs = hard_pairs(method.texts, 3, 2.1)
    assert len(pairs) == 6  # no two unit vectors are 2.1 apart
    crowd = method.memory.sample(pairs[:, 0].repeat_interleave(4))
    inputs = torch.cat([task.pictures.features[rows], replayed])
    targets = torch.cat([task.pictures.labels[rows], classes[-1]])

    def turn(features: Tensor) -> Tensor:
        return normalize(features @ method.adapter.weight.T, dim=-1)

    expected = cross_entropy(clip.scale * turn(inputs) @ method.texts.T, targets)
    hinge = []
    for place, row in enumerate(turn(crowd)):
        old, new = pairs[place // 4].tolist()
        hinge.append((0.1 - row @ method.texts[old] + row @ method.texts[new]).clamp(min=0))
    torch.testing.assert_close(value, expected + torch.stack(hinge).mean())


def test_memory_holds_raw_features_and_only_the_matrix_moves(clip: CLIP) -> None:
    before = {key: value.clone() for key, value in clip.state_dict().items()}
    source = stream(clip)
    tasks = source.tasks()
    first = next(tasks).pictures
    mean = first.features[first.labels == 1].double().mean(0)
    method = learnt(RAPF, QUICK, clip, source)
    assert isinstance(method, RAPF)
    torch.testing.assert_close(method.memory.means()[1], mean)
    assert all(torch.equal(value, before[key]) for key, value in clip.state_dict().items())
    assert len(method.memory) == method.seen == 8
    assert not any(parameter.requires_grad for parameter in method.parameters())


@pytest.mark.parametrize("widen", [False, True])
def test_learns_and_rows_stand_alone(clip: CLIP, widen: bool) -> None:
    source = stream(clip)
    method = learnt(RAPF, replace(QUICK, widen=widen), clip, source)
    pictures = all_tests(source)
    assert_rows_stand_alone(method, pictures)
    accuracy = (method.logits(pictures).argmax(1) == pictures.labels).float().mean()
    assert accuracy > 0.5  # chance: 0.125


def test_checkpoint_gives_equal_logits(clip: CLIP) -> None:
    source = stream(clip)
    method = learnt(RAPF, QUICK, clip, source)
    fresh = RAPF(QUICK, clip, Trainer())
    for start, size in ((0, 3), (3, 2), (5, 3)):
        fresh.grow(method.names[start : start + size])
    fresh.load_state_dict(method.state_dict())
    pictures = all_tests(source)
    assert torch.equal(fresh.logits(pictures), method.logits(pictures))


def test_fusion_share_out_of_range_is_refused() -> None:
    with pytest.raises(UserError, match="fusion"):
        RAPFConfig(fusion=1.5)


@pytest.mark.parametrize(
    ("pictures", "batch", "each", "classes"),
    [(5000, 100, 20, 2), (2400, 64, 10, 5), (600, 32, 10, 10), (500, 100, 20, 19)],
)
def test_small_tasks_replay_as_much_as_the_authors_large_ones(
    pictures: int, batch: int, each: int, classes: int
) -> None:
    """The least total gives the authors' own numbers on their three datasets, and more where tasks shrink."""
    steps = -(-pictures // batch)
    assert round(RAPFConfig().replay_epoch / (steps * each)) == classes
