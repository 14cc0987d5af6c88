"""Pieces of the visual prompt methods, each against the plain way of computing it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from clipcil.errors import UserError
from clipcil.heads.linear import GrowingHead
from clipcil.methods.l2p import L2PConfig
from clipcil.prompts.visual import choose, existing, missing_note, orthogonal_rows, prefixes

CPU = torch.device("cpu")


def test_each_picture_gets_its_own_nearest_keys_and_a_voting_batch_those_most_of_it_chose() -> None:
    similarity = torch.tensor([[0.1, 0.9, 0.5, 0.0], [0.8, 0.1, 0.9, 0.7], [0.0, 0.3, 0.9, 0.1]])
    assert choose(similarity, 2).tolist() == [[1, 2], [2, 0], [2, 1]]
    assert [set(row) for row in choose(similarity, 2, together=True).tolist()] == [{1, 2}] * 3


def test_first_half_goes_to_keys_and_second_to_values_and_pictures_stay_apart() -> None:
    prompts = torch.randn(2, 3, 6, 5)  # two layers, three pictures, 3 + 3 vectors
    made = prefixes([1, 4], prompts)
    assert list(made) == [1, 4]
    for index, layer in enumerate((1, 4)):
        for picture in range(3):
            assert torch.equal(made[layer][0][picture], prompts[index, picture, :3])
            assert torch.equal(made[layer][1][picture], prompts[index, picture, 3:])


def test_layers_a_tower_does_not_have_are_dropped_and_named() -> None:
    assert existing((2, 3, 4), 4) == [2, 3] and existing((3, 1, 3), 12) == [3, 1]
    assert "layer 4, 5" in missing_note((0, 4, 5), 4)[0] and missing_note((0, 3), 4) == []


@pytest.mark.parametrize("between", [(1.0, -1.0), (0.5,), (float("nan"), 1.0)])
def test_a_range_is_two_numbers_the_lower_first(between: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="key_range"):
        L2PConfig(key_range=between)  # type: ignore[arg-type]


@settings(max_examples=30, deadline=None)
@given(earlier=st.integers(0, 12), count=st.integers(1, 12), extra=st.integers(0, 8), seed=st.integers(0, 2**20))
def test_new_rows_are_orthonormal_and_orthogonal_to_earlier_ones(
    earlier: int, count: int, extra: int, seed: int
) -> None:
    torch.manual_seed(seed)
    size = earlier + count + extra
    rows = torch.randn(earlier, size, dtype=torch.float64)
    new = orthogonal_rows(rows, count)
    torch.testing.assert_close(new @ new.T, torch.eye(count, dtype=torch.float64), atol=1e-10, rtol=0)
    assert new.shape == (count, size) and not (rows @ new.T).abs().gt(1e-10).any()


def test_new_rows_equal_the_gram_schmidt_loop() -> None:
    earlier = torch.linalg.qr(torch.randn(20, 4, dtype=torch.float64)).Q.T.contiguous() * 3
    torch.manual_seed(5)
    new = orthogonal_rows(earlier, 3)
    torch.manual_seed(5)
    done = list(earlier)
    for vector in torch.randn(3, 20, dtype=torch.float64):
        for other in done:
            vector = vector - (vector @ other) / (other @ other) * other
        done.append(vector / vector.norm())
    torch.testing.assert_close(new, torch.stack(done[4:]))


@pytest.mark.parametrize("earlier", [6, 8, 11])
def test_with_no_room_left_rows_are_unit_and_use_what_room_there_is(earlier: int) -> None:
    rows = torch.randn(earlier, 8)
    new, room = orthogonal_rows(rows, 5), max(0, 8 - earlier)
    torch.testing.assert_close(new.norm(dim=1), torch.ones(5))
    assert not room or (rows @ new[:room].T).abs().max() < 1e-5
    assert (rows @ new[room:].T).abs().max() > 1e-3  # the rest cannot be orthogonal, and is not said to be


def test_head_keeps_earlier_rows_and_the_loss_is_that_of_logits_masked_to_the_task() -> None:
    head = GrowingHead(4, CPU)
    head.grow(3)
    with torch.no_grad():
        for parameter in head.newest():
            parameter.normal_()
    features = torch.randn(6, 4)
    before = head(features)
    assert torch.equal(before, head.current(features))
    head.grow(2)
    for parameter in head.newest():
        parameter.requires_grad_(True)
    logits = head(features)
    assert logits.shape == (6, 5)
    torch.testing.assert_close(logits[:, :3], before)
    labels = torch.tensor([3, 4, 4, 3, 3, 4])
    masked = logits.clone()
    masked[:, :3] = -torch.inf
    torch.testing.assert_close(cross_entropy(head.current(features), labels - 3), cross_entropy(masked, labels))
    cross_entropy(masked, labels).backward()
    assert head.weights[0].grad is None
