"""The public names: there, explained, and shown in docs/reference.md."""

import inspect
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
    assert "Examples:\n" in doc and ">>>" in doc, f"{name} has no example"


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


def test_the_reference_has_every_public_name() -> None:
    """The site makes signatures and members from the code."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = {name.replace("clipcil.methods.registry.", "clipcil.") for name in re.findall(r"(?m)^::: (\S+)$", page)}
    assert shown == {f"clipcil.{name}" for name in clipcil.__all__ if name != "__version__"}


def test_every_method_names_its_paper() -> None:
    for name, kind in clipcil.methods().items():
        assert re.search(r"(arXiv:|arxiv\.org/abs/)\d{4}\.\d{4,5}", sys.modules[kind.__module__].__doc__ or ""), name
