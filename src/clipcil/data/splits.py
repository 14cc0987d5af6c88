"""Splits by seed that are the same on every machine and do not depend on the order in which files are found.

Every picture has a rank: the SHA-256 of the seed and its name. The lowest ranks are the test set. No random generator,
no version of a library and no folder listing takes part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from clipcil.errors import UserError


def rank(seed: int, name: str) -> bytes:
    return hashlib.sha256(f"{seed}/{name}".encode("utf-8", "surrogateescape")).digest()


def split_whole(names: Sequence[str], share: float, seed: int) -> Tensor:
    """(N,) bool, True for test: the `share` with the lowest ranks, whatever their classes.

    The lists that circulate for ImageNet-R, and the field's split of CUB, are drawn like this: classes get between
    8 % and 28 % of test pictures. 30,000 pictures give exactly 24,000 and 6,000.
    """
    _check(share)
    train = int(len(names) * (1 - share) + 1e-9)
    order = sorted(range(len(names)), key=lambda index: rank(seed, names[index]))
    test = torch.ones(len(names), dtype=torch.bool)
    test[torch.tensor(order[len(names) - train :], dtype=torch.int64)] = False
    return test


def split_by_class(names: Sequence[str], labels: Tensor, share: float, seed: int) -> Tensor:
    """(N,) bool, True for test: `share` of every class, rounded; a class of two or more has both kinds."""
    _check(share)
    test = torch.zeros(len(names), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        rows = torch.nonzero(labels == label).flatten().tolist()
        rows.sort(key=lambda index: rank(seed, names[index]))
        count = min(max(round(len(rows) * share), 1), len(rows) - 1)
        test[torch.tensor(rows[:count], dtype=torch.int64)] = True
    return test


def split_by_group(groups: Sequence[str], labels: Tensor, share: float, seed: int) -> Tensor:
    """(N,) bool, True for test: whole groups, `share` of the groups of every class."""
    _check(share)
    unique = sorted({(int(label), group) for label, group in zip(labels, groups, strict=True)})
    owner = torch.tensor([label for label, _ in unique], dtype=torch.int64)
    chosen = split_by_class([f"{label}/{group}" for label, group in unique], owner, share, seed)
    is_test = {pair for pair, test in zip(unique, chosen.tolist(), strict=True) if test}
    return torch.tensor([(int(label), group) in is_test for label, group in zip(labels, groups, strict=True)])


def _check(share: float) -> None:
    if not 0 < share < 1:
        raise UserError(f"setting 'test_share' is {share}; it must lie between 0 and 1, such as 0.2")
