"""Imports run one way through the rooms, and nothing heavy is imported before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "clipcil"
ORDER = (
    "errors",
    "files",
    "settings",
    "paper",
    "clip",
    "data",
    "transport",
    "memory",
    "prompts",
    "methods",
    "report",
    "engine",
)
RANK = {room: rank for rank, room in enumerate((*ORDER, "people", "commands", "cli"))}
LEAVES = {"errors", "files", "settings", "__init__"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The rooms a module imports, at the top or inside functions."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        rooms |= {name.split(".")[1] for name in names if name.startswith("clipcil.")}
    return rooms


MODULES = sorted(path for path in SOURCE.rglob("*.py") if room_of(path) not in ("__init__", "__main__"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_doors_open_one_way(path: Path) -> None:
    own = room_of(path)
    wrong = {room for room in imports_of(path) - LEAVES - {own} if RANK[room] >= RANK[own]}
    assert not wrong, f"{own} must not import {wrong}"


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("statement", ["import clipcil", "import clipcil.cli"])
def test_importing_is_light(statement: str) -> None:
    heavy = {"torch", "numpy", "pyarrow", "matplotlib", "PIL", "lightning_fabric", "transformers", "tokenizers"}
    assert not loaded_by(statement) & heavy


def test_no_module_needs_torchvision_or_unpickles() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        assert "torchvision" not in imports_of_top(text), path
        assert "weights_only=False" not in text, path


def imports_of_top(text: str) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names
