"""The byte memory is a function of the set of pictures alone."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from clipcil.memory.rows import FeatureRows

SIZES = (5, 3)


def some(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, sum(SIZES), generator=torch.Generator().manual_seed(seed)) * torch.tensor(
        [9.0] * 5 + [0.01] * 3
    )


def same(a: FeatureRows, b: FeatureRows) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


def test_rows_are_the_unit_vectors_to_half_a_step() -> None:
    features, memory = some(20), FeatureRows(SIZES, 100)
    memory.add(features, torch.arange(20))  # a class each, so that the order is known
    expected = torch.cat([normalize(features[:, :5], dim=1), normalize(features[:, 5:], dim=1)], dim=1)
    torch.testing.assert_close(memory.rows(), expected, atol=0.5 / 127, rtol=0)
    assert memory.codes.abs().amax() == 127
    memory.add(torch.zeros(1, sum(SIZES)), torch.tensor([20]))  # a feature without direction is kept as zeros
    assert torch.equal(memory.rows()[20], torch.zeros(sum(SIZES)))


def test_two_lessons_are_one_whatever_the_order_and_a_forgotten_class_leaves_nothing() -> None:
    features, labels = some(60), torch.arange(60) % 3
    once, twice, shuffled, never = (FeatureRows(SIZES, 12) for _ in range(4))
    once.add(features, labels)
    twice.add(features[:25], labels[:25])
    twice.add(features[25:], labels[25:])
    order = torch.randperm(60, generator=torch.Generator().manual_seed(4))
    shuffled.add(features[order], labels[order])
    assert same(once, twice) and same(once, shuffled)
    assert once.counts.tolist() == [12, 12, 12] and len(once) == 36
    once.remove(1)
    never.add(features[labels != 1], labels[labels != 1] // 2)
    assert same(once, never)


def test_near_copies_of_a_picture_do_not_show_which_came_first() -> None:
    features = some(1).repeat(2, 1)
    features[1, :5] *= torch.tensor([1 + 3e-5, 1, 1, 1, 1])  # the same codes, with another step
    forth, back = FeatureRows(SIZES, 1), FeatureRows(SIZES, 1)
    codes, steps = forth.encode(features)
    assert torch.equal(codes[0], codes[1]) and not torch.equal(steps[0], steps[1])
    forth.add(features, torch.zeros(2, dtype=torch.int64))
    back.add(features.flip(0), torch.zeros(2, dtype=torch.int64))
    assert same(forth, back)


def test_what_is_kept_of_many_is_a_fair_sample() -> None:
    """A shift in the order of arrival must not show in what is kept."""
    features = some(4000)
    memory = FeatureRows(SIZES, 400)
    memory.add(features, torch.zeros(4000, dtype=torch.int64))
    apart = (memory.rows().mean(0) - memory.unit(features).mean(0)).abs()
    assert (apart < 4 * memory.unit(features).std(0) / 400**0.5).all()
