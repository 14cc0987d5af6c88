"""Progress bars appear in a notebook by themselves, and nowhere else."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from PIL import Image

import clipcil
from clipcil.experiment import monitor


class Page:
    """What `IPython.display` would show: the text of each output, and every update of it."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def display(self, text: str, *, display_id: bool) -> Any:
        assert display_id
        output = [text]
        self.outputs.append(output)
        return SimpleNamespace(update=output.append)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Page:
    """A running IPython kernel."""
    page, ipython, shown = Page(), ModuleType("IPython"), ModuleType("IPython.display")
    monkeypatch.setattr(ipython, "get_ipython", lambda: SimpleNamespace(kernel=object()), raising=False)
    monkeypatch.setattr(shown, "display", page.display, raising=False)
    monkeypatch.setattr(shown, "HTML", str, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(monitor, "BAR_PAUSE", 0)
    return page


def lesson() -> dict[str, list[Image.Image]]:
    return {name: [Image.new("RGB", (40, size), name) for size in (40, 50)] for name in ("red", "blue")}


def test_lessons_and_tests_show_a_bar_that_ends(page: Page) -> None:
    model = clipcil.Classifier("simplecil")
    model.learn(lesson())
    (learning,) = page.outputs
    assert any("encode" in text and "<progress" in text for text in learning) and learning[-1] == ""
    model.test(lesson())
    assert 'max="4" value="4"' in page.outputs[1][-2] and page.outputs[1][-1] == ""
    model.learn({"green": [Image.new("RGB", (40, 40), "green")]}, on_progress=lambda stage, done, total: None)
    assert len(page.outputs) == 2  # who watches by other means sees no bar


def test_experiments_show_a_bar_that_ends(page: Page, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = clipcil.Experiment("coop", data="emoji", tasks=20, shots=1, **{"train.epochs": 1})
    experiment.learn(next(iter(experiment)))
    (output,) = page.outputs
    assert any("learning" in text for text in output) and output[-1] == ""
    assert any("encode pictures" in text for text in output) and capsys.readouterr().out == ""


def test_without_a_kernel_there_is_nothing(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())  # IPython in a terminal
    clipcil.Classifier("simplecil").learn(lesson())
    monkeypatch.delitem(sys.modules, "IPython")
    clipcil.Classifier("simplecil").learn(lesson())
    assert page.outputs == []
