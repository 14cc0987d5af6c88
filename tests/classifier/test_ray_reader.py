"""Pictures encoded on Ray: the same features, the same model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from picture_helpers import pictures

import clipcil
from clipcil.cluster import connect
from clipcil.errors import UserError


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    yield module
    module.shutdown()


def test_a_lesson_on_ray_is_the_lesson_here(ray: Any) -> None:
    from clipcil.classifier.ray_reader import RayReader

    here, there = clipcil.Classifier("simplecil"), clipcil.Classifier("simplecil")
    there.make_reader = partial(RayReader, actors=1)
    for model in (here, there):
        model.learn(pictures(["airplane", "ant"]), hold_out=False)
    torch.testing.assert_close(there._method.prototypes, here._method.prototypes, atol=1e-3, rtol=1e-3)
    with pytest.raises(UserError, match="not a picture"):
        there.learn({"broken": [b"no picture", b"none either"]}, hold_out=False)
    assert there.classes == ["airplane", "ant"]


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match="pip install"):
        connect()
