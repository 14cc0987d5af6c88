"""The form of every error that a user sees."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from clipcil.errors import UserError


@contextmanager
def one_line(*words: str) -> Iterator[None]:
    """The block ends in a `UserError` of one line that has `words` in it."""
    with pytest.raises(UserError) as caught:
        yield
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message
