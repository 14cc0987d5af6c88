from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from clipcil.data.tasks import split_by_class, split_by_group, split_whole

NAMES = [f"n{i % 7:08}/art_{i}.jpg" for i in range(100)]


def test_the_whole_split_is_the_same_everywhere() -> None:
    """Known rows: a change of these changes every published number that used the split."""
    test = split_whole(NAMES, 0.2, 0)
    assert int(test.sum()) == 20
    assert torch.nonzero(test).flatten().tolist()[:6] == [1, 5, 9, 12, 15, 17]  # as sha256sum and sort give them
    assert not torch.equal(test, split_whole(NAMES, 0.2, 1))
    for total, train in ((30_000, 24_000), (11_788, 9_430)):  # the field's
        assert int((~split_whole([str(i) for i in range(total)], 0.2, 3)).sum()) == train


@given(st.randoms(use_true_random=False), st.integers(0, 2**40))
def test_the_order_of_files_does_not_matter(shuffler: random.Random, seed: int) -> None:
    mixed = NAMES.copy()
    shuffler.shuffle(mixed)
    found = []
    for names in (NAMES, mixed):
        labels = torch.tensor([int(name[8]) for name in names])
        splits = split_whole(names, 0.2, seed), split_by_class(names, labels, 0.2, seed)
        found.append([{name for name, test in zip(names, split, strict=True) if test} for split in splits])
    assert found[0] == found[1]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.floats(0.05, 0.95))
def test_every_class_keeps_training_pictures_and_gets_test_pictures(sizes: list[int], share: float) -> None:
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    test = split_by_class([str(i) for i in range(len(labels))], labels, share, 0)
    for label, size in enumerate(sizes):
        inside = test[labels == label]
        assert int((~inside).sum()) >= 1
        assert int(inside.sum()) >= (size > 1)


def test_groups_stay_together() -> None:
    labels = torch.arange(2).repeat_interleave(50)
    groups = [f"{i // 5 % 10:02}" for i in range(100)]
    test = split_by_group(groups, labels, 0.2, 0)
    for label in (0, 1):
        rows = (labels == label).nonzero().flatten().tolist()
        sides = {group: {bool(test[r]) for r in rows if groups[r] == group} for group in set(groups)}
        assert all(len(side) == 1 for side in sides.values())
        assert sum(side == {True} for side in sides.values()) == 2
