"""The parts that are functions, with whatever hypothesis can think of."""

import contextlib
import dataclasses
import io
import tomllib
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from clipcil.cli import main
from clipcil.data.tasks import class_order, task_sizes
from clipcil.errors import UserError
from clipcil.methods.registry import methods
from clipcil.settings import build, override, parse_words, to_dict
from clipcil.training.trainer import Training

keys = st.text(st.characters(categories=("Ll", "Lu", "Nd"), include_characters="_"), min_size=1, max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
tables = st.recursive(
    scalars | st.lists(scalars, max_size=3), lambda inner: st.dictionaries(keys, inner, max_size=4), max_leaves=8
)
trainings = st.builds(
    Training,
    epochs=st.integers(0, 1000),
    lr=st.floats(0, 1e6),
    batch_size=st.integers(1, 10**9),
    optimizer=st.sampled_from(("adamw", "adam", "sgd")),
    weight_decay=st.floats(0, 1),
    schedule=st.sampled_from(("cosine", "constant", "multistep")),
    milestones=st.lists(st.integers(0, 99), max_size=3).map(tuple),
    warmup=st.floats(0, 1),
)


@given(trainings)
def test_settings_survive_toml_and_words(how: Training) -> None:
    table = to_dict(how)
    words = [f"{key}={','.join(map(str, value)) if isinstance(value, list) else value}" for key, value in table.items()]
    assert build(Training, tomllib.loads(tomli_w.dumps(table))) == build(Training, parse_words(words)) == how


@pytest.mark.parametrize("name", sorted(methods()))
def test_the_settings_of_every_method_survive_toml(name: str) -> None:
    config = methods()[name].Config()
    written = tomli_w.dumps(to_dict(config))
    again = override(config, tomllib.loads(written))
    assert again == config
    assert tomli_w.dumps(to_dict(again)) == written  # to the byte: a resumed run compares and rewrites it


@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(Training)]) | keys, tables))
def test_any_table_is_taken_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        how = build(Training, values)
    except UserError as error:
        assert "setting" in str(error)
    else:
        assert build(Training, to_dict(how)) == how


@given(st.lists(st.text(max_size=20), max_size=5))
def test_any_words_are_settings_or_refused(words: list[str]) -> None:
    with contextlib.suppress(UserError):
        table = parse_words(words)
        assert all("=" in word for word in words)
        assert bool(table) == bool(words)


@given(st.integers(1, 60), st.text(max_size=12) | st.integers(-5, 2**33).map(lambda n: f"seed:{n}"))
def test_a_class_order_is_a_permutation_or_refused(count: int, spec: str) -> None:
    with contextlib.suppress(UserError):
        assert sorted(class_order(spec, [f"c{i}" for i in range(count)])) == list(range(count))


sizes = st.none() | st.integers(-2, 130)


@given(st.integers(1, 120), sizes, sizes, sizes)
def test_tasks_share_out_all_classes_or_are_refused(
    classes: int, tasks: int | None, increment: int | None, base: int | None
) -> None:
    try:
        parts = task_sizes(classes, tasks, increment, base)
    except UserError:
        return
    assert sum(parts) == classes
    assert min(parts) >= 1
    assert tasks is None or base is not None or len(parts) == tasks
    assert base is None or parts[0] == base


words = st.text(max_size=10) | st.sampled_from(["--seed", "--set", "--tasks", "x=1", "--resume"])


@settings(max_examples=60, deadline=None)
@given(st.lists(words, min_size=1, max_size=4))
def test_any_words_give_one_line_and_exit_code_2(words: list[str]) -> None:
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as stop:
        main(["run", "no-such-method", *words])
    if "-h" in words or "--help" in words:
        return
    assert stop.value.code == 2
    assert len(errors.getvalue().splitlines()) == 1
