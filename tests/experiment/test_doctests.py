"""The examples in the docstrings of the public names, and the example of the README, run as they are written."""

import contextlib
import doctest
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

import clipcil
from clipcil.checks import some_classes
from clipcil.experiment import experiment

README = Path(__file__).parents[2] / "README.md"


def examples() -> list[doctest.DocTest]:
    things: dict[str, Any] = {name: getattr(clipcil, name) for name in clipcil.__all__ if name != "__version__"}
    things |= {"methods": clipcil.methods.registry.methods, "checks": clipcil.checks.check_method}
    things |= {kind.__module__: inspect.getmodule(kind) for kind in clipcil.methods().values()}
    found = []
    for name, thing in things.items():
        inspect.unwrap(thing)
        found += doctest.DocTestFinder(exclude_empty=True).find(thing, f"clipcil.{name}", globs={})
    return [test for test in found if test.examples]


@pytest.mark.parametrize("test", examples(), ids=lambda test: test.name)
def test_an_example_runs_as_written(test: doctest.DocTest) -> None:
    said = io.StringIO()
    assert doctest.DocTestRunner(verbose=False).run(test, out=said.write).failed == 0, said.getvalue()


def test_the_example_of_the_readme_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """On ten of the hundred classes, so that it takes seconds."""
    text = README.read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(import clipcil\n\nexperiment = .*?)```", text, re.DOTALL)
    monkeypatch.setattr(experiment, "open_dataset", lambda *_: some_classes(10))
    said, names = io.StringIO(), dict[str, Any]()
    with contextlib.redirect_stdout(said):
        exec(code, names)
    lines = said.getvalue().splitlines()
    results = names["experiment"].results
    assert lines[:10] == [f"{index} {accuracy}" for index, accuracy in enumerate(results.after)]
    assert lines[10].startswith(f"{results.average} [[") and results.matrix.shape == (10, 10)
    assert names["experiment"].config.beta == 0.2
