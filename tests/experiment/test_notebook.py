"""Progress bars appear in a notebook by themselves, and nowhere else."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import clipcil
from clipcil.experiment import monitor
from support.lessons import plain

Outputs = list[list[str]]
"""The text of each output that `IPython.display` would show, and every update of it."""


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Outputs:
    """The outputs of a running IPython kernel."""
    outputs, ipython, shown = Outputs(), ModuleType("IPython"), ModuleType("IPython.display")

    def display(text: str, *, display_id: bool) -> Any:
        assert display_id
        outputs.append([text])
        return SimpleNamespace(update=outputs[-1].append)

    monkeypatch.setattr(ipython, "get_ipython", lambda: SimpleNamespace(kernel=object()), raising=False)
    monkeypatch.setattr(shown, "display", display, raising=False)
    monkeypatch.setattr(shown, "HTML", str, raising=False)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    monkeypatch.setattr(monitor, "BAR_PAUSE", 0)
    return outputs


LESSON = {"red": plain("red", "darkred"), "blue": plain("blue", "navy")}


def test_lessons_and_tests_show_a_bar_that_ends(outputs: Outputs) -> None:
    model = clipcil.Classifier("simplecil")
    model.learn(LESSON)
    (learning,) = outputs
    assert any("encode" in text and "<progress" in text for text in learning) and learning[-1] == ""
    model.test(LESSON)
    assert 'max="4" value="4"' in outputs[1][-2] and outputs[1][-1] == ""
    model.learn({"green": plain("green")}, on_progress=lambda stage, done, total: None)
    assert len(outputs) == 2  # who watches by other means sees no bar


def test_experiments_show_a_bar_that_ends(outputs: Outputs, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = clipcil.Experiment("coop", data="emoji", tasks=20, shots=1, **{"train.epochs": 1})
    experiment.learn(next(iter(experiment)))
    (output,) = outputs
    assert any("learning" in text for text in output) and output[-1] == ""
    assert any("encode pictures" in text for text in output) and capsys.readouterr().out == ""


def test_without_a_kernel_there_is_nothing(outputs: Outputs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace())  # IPython in a terminal
    clipcil.Classifier("simplecil").learn(LESSON)
    monkeypatch.delitem(sys.modules, "IPython")
    clipcil.Classifier("simplecil").learn(LESSON)
    assert outputs == []
