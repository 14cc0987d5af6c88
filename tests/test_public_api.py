"""The public names: there, explained, and listed in docs/api.md as they are."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import clipcil

ROOT = Path(__file__).parent.parent
NAMES = [name for name in clipcil.__all__ if name not in ("__version__", "checks")]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    doc = inspect.getdoc(getattr(clipcil, name) if name != "methods" else clipcil.methods.registry.methods) or ""
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


def test_the_page_of_the_api_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_api_docs", ROOT / "tools" / "make_api_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert page == module.page(), "run python tools/make_api_docs.py"


def test_every_method_names_its_paper() -> None:
    for name, kind in clipcil.methods().items():
        assert re.search(r"(arXiv:|arxiv\.org/abs/)\d{4}\.\d{4,5}", sys.modules[kind.__module__].__doc__ or ""), name
