"""The output of `clipcil predict`: a line of text per picture, JSON lines, or CSV."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any, TextIO

from clipcil.classifier.predicting import Prediction
from clipcil.errors import printable

SMALLEST = 0.005
"""Probabilities below this would be printed as 0 %; only the likeliest class is named all the same."""


def json_text(value: Any, out: TextIO | None = None, indent: int | None = None) -> str:
    """JSON for `out` (default: stdout): control characters, and characters that its encoding lacks, are escaped as in
    JSON strings."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    encoding = getattr(out or sys.stdout, "encoding", None) or "utf-8"

    def shown(letter: str) -> str:
        if letter == "\n":  # between the lines; inside a text JSON has escaped it
            return letter
        plain = printable(letter) == letter and letter.encode(encoding, "ignore")
        return letter if plain else json.dumps(letter)[1:-1]

    return text if text.isascii() and "\x7f" not in text else "".join(map(shown, text))


class Printer:
    """`cat.jpg: cat 97%, lynx 2%`."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout

    def line(self, picture: Path, prediction: Prediction) -> None:
        pairs = list(zip(prediction.names, prediction.probabilities, strict=True))
        shown = [pair for place, pair in enumerate(pairs) if not place or pair[1] >= SMALLEST]
        guesses = ", ".join(f"{name} {probability:.0%}" for name, probability in shown)
        if prediction.error is not None:
            guesses = f"cannot be read: {prediction.error}"
        elif prediction.unknown:
            guesses = f"none of these (nearest: {guesses})"
        print(printable(f"{picture}: {guesses}"), file=self.out)


class JsonPrinter(Printer):
    """One object per line, so that any number of pictures can be read as they come."""

    def line(self, picture: Path, prediction: Prediction) -> None:
        value: dict[str, Any] = {"picture": str(picture)}
        if prediction.error is not None:
            value["error"] = prediction.error
        else:
            pairs = zip(prediction.names, prediction.probabilities, strict=True)
            value |= {"name": prediction.name, "unknown": prediction.unknown}
            value["classes"] = [{"name": name, "probability": round(p, 6)} for name, p in pairs]
        print(json_text(value, self.out), file=self.out)


class CsvPrinter(Printer):
    """picture, name, unknown, error, then a pair of columns for each of the likeliest classes."""

    def __init__(self, top: int, out: TextIO | None = None) -> None:
        super().__init__(out)
        self.top = top
        self._writer = csv.writer(self.out, lineterminator="\n")
        pairs = [column for place in range(1, top + 1) for column in (f"name_{place}", f"probability_{place}")]
        self._writer.writerow(["picture", "name", "unknown", "error", *pairs])

    def line(self, picture: Path, prediction: Prediction) -> None:
        pairs: list[str] = []
        for name, probability in zip(prediction.names, prediction.probabilities, strict=True):
            pairs += [printable(name), f"{probability:.6f}"]
        unknown = "" if prediction.error is not None else str(prediction.unknown).lower()
        texts = [printable(text or "") for text in (picture, prediction.name, prediction.error)]
        row = [*texts[:2], unknown, texts[2], *pairs]
        self._writer.writerow(row + [""] * (4 + 2 * self.top - len(row)))


def open_printer(as_json: bool, as_csv: bool, top: int) -> Printer:
    if as_json:
        return JsonPrinter()
    return CsvPrinter(top) if as_csv else Printer()
