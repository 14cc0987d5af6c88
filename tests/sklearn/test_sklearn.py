"""Methods as scikit-learn estimators: its own checks, its tools, and lessons that are the same as learning at once."""

import doctest
import importlib
import sys
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from clipcil.sklearn import (
    DiscriminantClassifier,
    FeatureClassifier,
    PictureClassifier,
    RanPACClassifier,
    SimpleCILClassifier,
    StrataClassifier,
)
from support.errors import one_line
from support.lessons import pictures

ESTIMATORS = [
    SimpleCILClassifier(),
    DiscriminantClassifier(),
    RanPACClassifier(projections=128),
    StrataClassifier(random_features=32),
]
SKIPPED = {
    "check_array_api_input": "it runs only where SCIPY_ARRAY_API is set; features become torch tensors here",
}
each = pytest.mark.parametrize("model", ESTIMATORS, ids=lambda model: type(model).__name__)


@each
def test_scikit_learn_s_own_checks_pass(model: FeatureClassifier) -> None:
    results = check_estimator(model, on_skip=None)
    assert len(results) > 50 and all(one["status"] in ("passed", "skipped") for one in results)
    assert {one["check_name"] for one in results if one["status"] == "skipped"} <= set(SKIPPED)


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rows, labels = load_digits(return_X_y=True)
    return rows[:600], labels[:600], rows[600:900], labels[600:900]


@each
def test_lessons_with_labels_in_any_order_classify_digits(model: FeatureClassifier) -> None:
    rows, labels, tests, truth = digits()
    taught = clone(model)
    for few in ([7, 8, 9], [3, 4, 5], [0, 1, 2, 6, 7]):  # 7 comes twice
        taught.partial_fit(rows[np.isin(labels, few)], labels[np.isin(labels, few)])
    assert taught.classes_.tolist() == list(range(10))
    assert taught.score(tests, truth) > 0.8
    chances = taught.predict_proba(tests)
    assert np.allclose(chances.sum(1), 1) and (taught.classes_[chances.argmax(1)] == taught.predict(tests)).all()


@pytest.mark.parametrize("model", [ESTIMATORS[0], ESTIMATORS[1], ESTIMATORS[3]], ids=lambda model: type(model).__name__)
def test_two_lessons_are_the_same_as_one(model: FeatureClassifier) -> None:
    rows, labels, tests, _ = digits()
    once, twice = clone(model).fit(rows, labels), clone(model)
    for few in (labels < 5, labels >= 5):
        twice.partial_fit(rows[few], labels[few])
    assert np.allclose(once.decision_function(tests), twice.decision_function(tests), atol=1e-4)


def test_classes_that_are_announced_have_a_column_and_no_probability() -> None:
    rows, labels, tests, _ = digits()
    two = labels < 2
    model = SimpleCILClassifier().partial_fit(rows[two], labels[two], classes=[5, 1, 0])
    assert model.classes_.tolist() == [0, 1, 5] and not model.predict_proba(tests)[:, 2].any()
    assert set(model.predict(tests).tolist()) <= {0, 1}


def test_fit_begins_anew_and_the_seed_decides() -> None:
    rows, labels, tests, _ = digits()
    model = RanPACClassifier(projections=32).fit(rows, labels)
    first = model.predict_proba(tests)
    assert np.array_equal(model.fit(rows, labels).predict_proba(tests), first)
    assert not np.array_equal(model.set_params(random_state=1).fit(rows, labels).predict_proba(tests), first)


def test_pipelines_and_cross_validation_take_them() -> None:
    rows, labels, _, _ = digits()
    model = make_pipeline(StandardScaler(), StrataClassifier(random_features=32))
    assert cross_val_score(model, rows, labels, cv=3).min() > 0.7


def emoji(names: list[str], test: bool = False) -> tuple[list[Any], np.ndarray]:
    found = pictures(names, test)
    return [image for own in found.values() for image in own], np.repeat(names, [len(own) for own in found.values()])


def test_a_list_of_pictures_is_learnt_and_more_of_it_later() -> None:
    model = clone(PictureClassifier("strata", settings={"random_features": 64}))
    model.fit(*emoji(["bee", "apple"]))
    model.partial_fit(*emoji(["airplane"]))
    tests, truth = emoji(["airplane", "apple", "bee"], test=True)
    assert model.classes_.tolist() == ["airplane", "apple", "bee"]
    assert model.model_.classes == ["apple", "bee", "airplane"]
    assert model.score(tests, truth) >= 0.8
    assert model.predict_proba(tests).shape == (6, 3)
    assert np.allclose(model.predict_proba(tests), model.model_.predict_proba(tests)[:, [2, 0, 1]])
    with one_line("label 'Bee' is a class already"):
        model.partial_fit(emoji(["banana"])[0], ["Bee"] * 6)


def test_pictures_can_be_cross_validated() -> None:
    assert cross_val_score(PictureClassifier("simplecil"), *emoji(["bee", "apple"]), cv=2).min() > 0.5


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.base", None)
    monkeypatch.delitem(sys.modules, "clipcil.sklearn")
    with pytest.raises(ImportError, match=r"pip install 'clipcil\[sklearn\]'"):
        importlib.import_module("clipcil.sklearn")


def test_the_example_of_the_module_runs() -> None:
    result = doctest.testmod(importlib.import_module("clipcil.sklearn"))
    assert result.attempted > 3 and not result.failed
