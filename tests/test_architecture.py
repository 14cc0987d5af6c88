"""Imports run one way through the rooms, and nothing heavy is imported before it is needed."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "clipcil"


def listed_rooms() -> list[str]:
    """The rooms in the order of the tree in CONTRIBUTING."""
    tree = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("src/clipcil/\n")[1].split("```")[0]
    return [line.split()[0].rstrip("/").removesuffix(".py") for line in tree.splitlines() if line.strip()]


RANK = {room: rank for rank, room in enumerate(listed_rooms())}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The modules that a module imports, at the top or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        found |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
        found |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
    return found


MODULES = sorted(path for path in SOURCE.rglob("*.py") if room_of(path) not in ("__init__", "__main__"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_doors_open_one_way(path: Path) -> None:
    own = room_of(path)
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("clipcil.")}
    wrong = {room for room in rooms - {own} if RANK[room] >= RANK[own]}
    assert not wrong, f"{own} must not import {wrong}"


def test_the_tree_in_contributing_is_what_is_on_disk() -> None:
    hidden = {"__init__", "__main__", "py", "__pycache__"}  # py.typed marks the package as typed
    found = {
        path.name.split(".")[0] for path in SOURCE.iterdir() if path.is_file() or any(path.rglob("*.[pt][yo]*"))
    } - hidden
    assert found == set(RANK)


def test_methods_are_built_and_taught_in_one_place() -> None:
    """Runs and lessons share `build_method` and `Method.learn`; the contract checks build methods to look inside."""
    calls = {"with_own_vision_tower": set[str](), "learn_task": set[str](), "train": set[str]()}
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in calls:
                calls[node.func.attr].add(str(path.relative_to(SOURCE)))
    assert calls["with_own_vision_tower"] == {"methods/base.py", "checks.py"}
    assert calls["learn_task"] == {"methods/base.py"}
    assert calls["train"] == {"methods/base.py"}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("statement", ["import clipcil", "import clipcil.cli"])
def test_importing_is_light(statement: str) -> None:
    heavy = {"torch", "numpy", "pyarrow", "matplotlib", "PIL", "lightning_fabric", "transformers", "tokenizers"}
    heavy |= {"fastapi", "httpx"}
    assert not loaded_by(statement) & heavy


def test_nothing_is_unpickled_and_torchvision_is_not_needed() -> None:
    for path in MODULES:
        text, packages = path.read_text(encoding="utf-8"), {name.split(".")[0] for name in imports_of(path)}
        assert "torchvision" not in packages, path
        assert "pickle" not in packages or path.name == "cifar100.py", path  # whose MD5 is checked
        assert text.count("torch.load(") <= text.count("weights_only=True") and "weights_only=False" not in text, path


def test_a_run_reaches_learn_task_in_four_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run`, `Experiment.learn`, `Method.learn`, `learn_task`: a newcomer finds the loop in a minute."""
    import clipcil
    from clipcil.experiment.run import run
    from clipcil.methods.dmc import DMCOT

    found: list[list[str]] = []

    def learn_task(self: DMCOT, task: object) -> None:
        frame, names = sys._getframe(), []
        while frame is not None and frame.f_code is not run.__code__:
            names.append(frame.f_code.co_qualname)
            frame = frame.f_back
        found.append([*names, "run"])
        raise KeyboardInterrupt

    monkeypatch.setattr(DMCOT, "learn_task", learn_task)
    with pytest.raises(KeyboardInterrupt):
        run(clipcil.Experiment("dmc-ot", tasks=20), tmp_path / "run")
    assert len(found[0]) <= 4, found[0]
