"""The public names: there, explained, and listed in docs/api.md as they are."""

import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import clipcil

ROOT = Path(__file__).parent.parent
NAMES = [name for name in clipcil.__all__ if name not in ("__version__", "checks")]


def public(name: str) -> Any:
    """The public object; `methods` is a package, too."""
    return clipcil.methods.registry.methods if name == "methods" else getattr(clipcil, name)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    doc = inspect.getdoc(public(name)) or ""
    assert "Example:\n" in doc and ">>>" in doc, f"{name} has no example"


def test_names_are_found_whatever_was_imported_before() -> None:
    """`methods` is a package and a public function: importing a method must not hide the function."""
    code = (
        "import clipcil; first = sorted(clipcil.methods()); import clipcil.methods.base as base;"
        "from clipcil import methods; assert sorted(methods()) == sorted(clipcil.methods()) == first;"
        "assert base.Method is clipcil.Method; assert set(clipcil.__all__) <= set(dir(clipcil))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'Experimnt'"):
        _ = clipcil.Experimnt  # type: ignore[attr-defined]


def test_the_page_of_the_api_lists_every_public_name_with_its_parameters_and_members() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    sections = {re.split(r"[(`]", text)[0]: text for text in page.split("\n## `")[1:]}
    assert {f"clipcil.{name}" for name in NAMES} <= sections.keys()
    for name, text in sections.items():
        thing = public(name.removeprefix("clipcil.")) if name.count(".") == 1 else pydoc.locate(name)
        assert callable(thing), f"{name} is gone"
        assert inspect.getdoc(thing).splitlines()[0] in text, f"the first line of {name} is another"  # type: ignore[union-attr]
        if not isinstance(thing, type) or not (issubclass(thing, Exception) or getattr(thing, "_is_protocol", False)):
            shown = re.findall(r"[(,] \*{0,2}(\w+)", f"( {text.splitlines()[0].partition('(')[2]}")
            missing = [key for key in inspect.signature(thing).parameters if key != "self" and key not in shown]
            assert not missing, f"{name} has parameters that the page does not show: {missing}"
        for key, member in vars(thing).items() if isinstance(thing, type) else ():
            if not key.startswith("_") and (inspect.isfunction(member) or isinstance(member, property | classmethod)):
                assert f"- `{key}" in text, f"{name}.{key} is not on the page"


def test_every_method_names_its_paper() -> None:
    for name, kind in clipcil.methods().items():
        assert re.search(r"(arXiv:|arxiv\.org/abs/)\d{4}\.\d{4,5}", sys.modules[kind.__module__].__doc__ or ""), name
