"""The contract, for every registered method. A method added by a file alone is found and held to all of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from clipcil import checks
from clipcil.clip import CLIP
from clipcil.data.dataset import Dataset
from clipcil.errors import UserError
from clipcil.methods.registry import methods

SIZES = (4, 3, 1)  # uneven, with a task of one class at the end
ALL = sorted(methods())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def data() -> Dataset:
    """The first class has one training picture, the second two, the others six."""
    data = checks.some_classes(sum(SIZES))
    rows = [torch.nonzero(data.train.labels == label).flatten() for label in range(sum(SIZES))]
    rows[0], rows[1] = rows[0][:1], rows[1][:2]
    return replace(data, train=data.train.subset(torch.cat(rows)))


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ALL)
def test_every_method_keeps_the_contract(
    name: str, check: Callable[[checks.Fixture], None], mini: CLIP, data: Dataset, cache: Path
) -> None:
    check(checks.Fixture(methods()[name], mini, data, SIZES, cache))


@pytest.mark.parametrize("name", ALL)
def test_names_it_cannot_learn_are_refused_before_the_first_task(
    name: str, mini: CLIP, data: Dataset, cache: Path
) -> None:
    long = replace(data, classes=[*data.classes[:-1], " ".join("x" * 100)])  # more tokens than the text tower reads
    fixture = checks.Fixture(methods()[name], mini, long, (sum(SIZES) - 1, 1), cache)
    fixture.method.check_names(data.classes)
    try:
        fixture.method.check_names(long.classes)
    except UserError as error:
        assert "shorten the" in str(error)
        with pytest.raises(UserError, match="shorten the"):
            fixture.learn()
    else:
        fixture.learn()
