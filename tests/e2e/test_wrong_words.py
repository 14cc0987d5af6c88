"""Mistakes in the words of a command: one line that names the word, in plain English."""

from __future__ import annotations

import pytest

from clipcil.cli import main


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "learn a b --metod x",
            "learn has no option --metod; did you mean '--method'? clipcil learn --help tells more",
        ),
        ("learn a --metod x", "learn has no option --metod; did you mean '--method'? clipcil learn --help tells more"),
        (
            "learn a b --metod=x",
            "learn has no option --metod; did you mean '--method'? clipcil learn --help tells more",
        ),
        (
            "run --method dmc",
            "run has no option --method: give METHOD as a word of its own, without --method; clipcil run --help",
        ),
        ("learn --model=a b", "learn has no option --model: give MODEL as a word of its own, without --model; clipcil"),
        ("learn a", "FOLDER is missing; clipcil learn --help tells more"),
        ("learn", "MODEL, FOLDER are missing; clipcil learn --help tells more"),
        ("learn a b c", "unexpected words: c; clipcil learn --help tells more"),
        ("learn a b --seed x", "--seed cannot be 'x'; it is: Seed of a new model. Default: 0; clipcil learn"),
        ("learn a b --seed=x", "--seed cannot be 'x'; it is: Seed of a new model. Default: 0; clipcil learn"),
        ("predict m p --top", "--top needs a value; clipcil predict --help tells more"),
        ("predict m p --by steal", "--by cannot be 'steal'; known: link, copy; clipcil predict --help tells more"),
        ("serve m --port x", "--port cannot be 'x'; it is: Port to listen on"),
        ("-x", "unexpected words: -x; clipcil --help tells more"),
        ("lern a b", "there is no command 'lern'; did you mean 'learn'?"),
    ],
)
def test_a_mistake_is_named(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words.split())
    out = capsys.readouterr()
    assert stop.value.code == 2 and not out.out
    assert out.err.startswith(f"clipcil: {line}") and out.err.count("\n") == 1
