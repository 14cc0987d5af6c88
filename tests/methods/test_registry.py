"""Which classes are methods, and what the base class does for each when a lesson ends."""

from importlib.metadata import EntryPoint

import pytest
import torch

from clipcil.clip import CLIP
from clipcil.errors import UserError
from clipcil.methods import registry
from clipcil.methods.base import Method, NoConfig
from clipcil.methods.simplecil import SimpleCIL
from clipcil.methods.zero_shot import ZeroShot
from clipcil.training.trainer import Trainer
from support.features import make_tasks


def test_a_plugin_that_is_no_method_costs_a_line_and_is_not_listed(monkeypatch, capsys) -> None:
    class Untitled(Method):
        name = "untitled"

    class Stranger:
        name = "stranger"

    points = [(EntryPoint(kind.__name__, "x:y", "clipcil.methods"), kind) for kind in (Untitled, Stranger)]
    known = registry.methods()
    monkeypatch.setattr(registry, "plugins", lambda group: points)
    monkeypatch.setattr(registry, "REGISTRY", dict(known))
    registry._import_all.__wrapped__()
    assert known == registry.REGISTRY
    first, second = capsys.readouterr().err.splitlines()
    assert "'Untitled'" in first and "has no 'title'" in first
    assert "'Stranger'" in second and "give the name of a method, or a class" in second


def test_a_class_of_another_module_does_not_replace_a_method_by_bearing_its_class_name(monkeypatch) -> None:
    monkeypatch.setattr(registry, "REGISTRY", dict(registry.methods()))
    stranger = type("ZeroShot", (ZeroShot,), {"__module__": "theirs"})
    with pytest.raises(ValueError, match=r"'zero-shot': clipcil\.methods\.zero_shot\.ZeroShot and theirs\.ZeroShot"):
        registry.register(stranger)
    assert registry.find_method("zero-shot") is ZeroShot
    again = type("ZeroShot", (ZeroShot,), {"__module__": ZeroShot.__module__})  # as a cell of a notebook run again
    assert registry.register(again) is registry.find_method("zero-shot")


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("l2p", "pool", 3),  # fewer than top_k
        ("dualprompt", "expert_layers", (-1,)),
        ("coda-prompt", "length", 5),
        ("clap4clip", "test_seed", 2**64),
        ("rapf", "fusion", 1.5),
        ("ranpac-adapted", "tuned", "projection"),  # the features it reads are those before the projection
        ("dmc", "template", "a photo"),
        ("coop", "memory", {"pictures": -1}),
    ],
)
def test_options_declare_what_they_take(name: str, option: str, value: object) -> None:
    with pytest.raises(UserError, match=option):
        registry.find_method(name).Config(**{option: value})


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_lesson_that_leaves_numbers_that_are_not_finite_is_refused(tiny_clip: CLIP, value: float) -> None:
    method, (first, second) = SimpleCIL(NoConfig(), tiny_clip, Trainer()), make_tasks(tiny_clip, [1, 1])
    method.learn(first)
    second.pictures.features[0, 0] = value
    with pytest.raises(UserError, match="training diverged: 'prototypes' holds a NaN or an infinity"):
        method.learn(second)
