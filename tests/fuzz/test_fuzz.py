"""Inputs of `tools/fuzz.py`: those kept here are read in every run, new ones are searched for with `-m fuzz`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import fuzz

KEPT = sorted(path for path in fuzz.CORPUS.glob("*/*") if path.parent.name in fuzz.TARGETS)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_an_input_is_accepted_or_refused(path: Path) -> None:
    fuzz.read(path.parent.name, path.read_bytes())


def test_a_reader_that_fails_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fuzz.TARGETS, "model", lambda data, folder: [][0])
    with pytest.raises(IndexError):
        fuzz.read("model", b"")


@pytest.mark.fuzz
@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_a_minute_of_new_inputs_finds_nothing(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    words = [sys.executable, fuzz.__file__, target, "--seconds", "60", "--new", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{target} +[1-9][\d,]* +\d+ +0$", done.stdout, re.M), done.stdout
