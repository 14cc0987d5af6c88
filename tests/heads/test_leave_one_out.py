"""Leaving one picture out by formula gives what a fit without it gives."""

from __future__ import annotations

import pytest
import torch
from test_discriminant import groups
from torch import Tensor

from clipcil.heads.leave_one_out import leave_one_out, nearest_distance, scaled_discriminant


def statistics(parts: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    means = torch.stack([part.mean(0) for part in parts])
    rows = torch.cat([part - part.mean(0) for part in parts])
    return means, torch.tensor([len(part) for part in parts]), rows.T @ rows


def scores(parts: list[Tensor], inputs: Tensor) -> Tensor:
    weight, bias = scaled_discriminant(*statistics(parts))
    return inputs @ weight.T + bias


def distances(parts: list[Tensor], inputs: Tensor) -> Tensor:
    means, counts, scatter = statistics(parts)
    count = int(counts.sum())
    covariance = (scatter + scatter.trace() / (count - 1) * torch.eye(len(scatter), dtype=scatter.dtype)) / count
    offsets = inputs[:, None] - means
    return torch.einsum("bcd,de,bce->bc", offsets, torch.linalg.inv(covariance), offsets)


@pytest.mark.parametrize("sizes", [[9, 4, 2], [2, 2], [40, 3, 12, 2, 7]])
def test_each_picture_without_it(sizes: list[int]) -> None:
    parts = groups(sizes)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    found = leave_one_out(*statistics(parts), torch.cat(parts), labels)
    row = 0
    for label, part in enumerate(parts):
        for place, picture in enumerate(part):
            without = [*parts[:label], torch.cat([part[:place], part[place + 1 :]]), *parts[label + 1 :]]
            score, distance = scores(without, picture[None])[0], distances(without, picture[None])[0]
            torch.testing.assert_close(found[0][row], score - score.mean(), rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(found[1][row], distance, rtol=1e-6, atol=1e-6)
            row += 1


@pytest.mark.parametrize("sizes", [[9, 4, 2], [40, 3, 12, 2, 7]])
def test_the_nearest_distance_is_the_least_of_those_to_the_means(sizes: list[int]) -> None:
    parts, tests = groups(sizes), torch.cat(groups([5, 5], seed=8))
    torch.testing.assert_close(nearest_distance(*statistics(parts), tests), distances(parts, tests).amin(1))


def test_a_picture_alone_in_its_class_cannot_be_told_without_it() -> None:
    parts = groups([1, 5, 5])
    found, _ = leave_one_out(*statistics(parts), parts[0], torch.tensor([0]))
    assert int(found.argmin()) == 0 and torch.isfinite(found).all()


def test_pictures_without_spread_are_told_by_the_nearest_mean() -> None:
    parts = [part[:1].expand(3, -1) for part in groups([1, 1, 1])]
    labels, tests = torch.arange(3).repeat_interleave(3), torch.cat(groups([6, 6], seed=3))
    found, _ = leave_one_out(*statistics(parts), torch.cat(parts), labels)
    assert torch.isfinite(found).all() and torch.equal(found.argmax(1), labels)
    nearest = torch.cdist(tests, torch.stack([part[0] for part in parts])).argmin(1)
    assert torch.equal(scores(parts, tests).argmax(1), nearest)
