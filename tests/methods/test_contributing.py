"""The example in CONTRIBUTING is a whole method: it is found by the registry and keeps the contract."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clipcil import checks
from clipcil.clip import CLIP
from clipcil.methods import registry

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[registry.Method]:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)[0]
    file = tmp_path / "mine.py"
    file.write_text(code, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mine_example", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mine_example", module)
    others = {name: kind for name, kind in registry.methods().items() if name != "mine"}  # a reader may have copied it
    monkeypatch.setattr(registry, "REGISTRY", others)
    spec.loader.exec_module(module)
    return registry.find_method("mine")


def test_the_examples_pass_the_linter() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        for words in (["check"], ["format", "--check"]):
            command = [sys.executable, "-m", "ruff", *words, "--stdin-filename", "src/clipcil/methods/mine.py", "-"]
            done = subprocess.run(command, input=code, cwd=PAGE.parent, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


def test_the_example_is_found_and_keeps_the_contract(
    example: type[registry.Method], mini: CLIP, tmp_path: Path
) -> None:
    checks.check_method(example, mini)
