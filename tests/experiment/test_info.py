"""What `clipcil methods` and `clipcil datasets` print, and the live table of a grid."""

from __future__ import annotations

import pytest

from clipcil.cli import main
from clipcil.data.dataset import datasets
from clipcil.methods.registry import methods


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def rows(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    main(words)
    return {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}


def test_every_method_says_what_it_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "methods")
    for name, kind in methods().items():
        assert kind.title in found[name] and kind.keeps in found[name]
    assert methods()["zero-shot"].keeps == "nothing" and "statistics" not in found["l2p"]


def test_a_preset_is_named_only_where_there_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("simplecil", "no preset for emoji"), ("rapf", "with the preset for emoji")):
        main(["methods", name, "--data", "emoji"])
        assert said in capsys.readouterr().out.splitlines()[0]


def test_values_are_those_of_the_backbone_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words, large = ("methods", "dmc-ot", "--data", "cifar100"), ("--backbone", "openai/clip-vit-base-patch16")
    assert "3e-05" in rows(capsys, *words)["stage1.lr"]
    assert "1e-05" in rows(capsys, *words, *large)["stage1.lr"]


def test_options_of_a_dataset(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a folder for each class" in rows(capsys, "datasets")["folder"]
    assert list(datasets()) == sorted(datasets())
    assert "0.2" in rows(capsys, "datasets", "folder")["test_share"]
