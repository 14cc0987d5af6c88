"""Pieces of the visual prompt methods, each against the plain way of computing it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clipcil.errors import UserError
from clipcil.methods.l2p import L2PConfig
from clipcil.prompts.visual import choose, existing, missing_note, orthogonal_rows


def test_each_picture_gets_its_own_nearest_keys_and_a_voting_batch_those_most_of_it_chose() -> None:
    similarity = torch.tensor([[0.1, 0.9, 0.5, 0.0], [0.8, 0.1, 0.9, 0.7], [0.0, 0.3, 0.9, 0.1]])
    assert choose(similarity, 2).tolist() == [[1, 2], [2, 0], [2, 1]]
    assert [set(row) for row in choose(similarity, 2, together=True).tolist()] == [{1, 2}] * 3


def test_layers_a_tower_does_not_have_are_dropped_and_named() -> None:
    assert existing((2, 3, 4), 4) == [2, 3] and existing((3, 1, 3), 12) == [3, 1]
    assert "layer 4, 5" in missing_note((0, 4, 5), 4)[0] and missing_note((0, 3), 4) == []


@pytest.mark.parametrize("between", [(1.0, -1.0), (0.5,), (float("nan"), 1.0)])
def test_a_range_is_two_numbers_the_lower_first(between: tuple[float, ...]) -> None:
    with pytest.raises(UserError, match="key_range"):
        L2PConfig(key_range=between)


@settings(max_examples=40, deadline=None)
@given(earlier=st.integers(0, 12), count=st.integers(1, 12), extra=st.integers(-12, 8), seed=st.integers(0, 2**20))
def test_new_rows_are_unit_and_orthogonal_as_far_as_there_is_room(
    earlier: int, count: int, extra: int, seed: int
) -> None:
    torch.manual_seed(seed)
    size = max(2, earlier + count + extra)
    rows = torch.randn(earlier, size, dtype=torch.float64)
    new, room = orthogonal_rows(rows, count), max(0, min(count, size - earlier))
    assert new.shape == (count, size)
    torch.testing.assert_close(new.norm(dim=1), torch.ones(count, dtype=torch.float64))
    torch.testing.assert_close(new[:room] @ new[:room].T, torch.eye(room, dtype=torch.float64), atol=1e-10, rtol=0)
    assert not (rows @ new[:room].T).abs().gt(1e-10).any()


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
