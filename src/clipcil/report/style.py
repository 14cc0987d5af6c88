"""How figures look: a light and a dark theme, and a fixed colour and marker for each method."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, ...] = ("light", "dark")


@dataclass(frozen=True)
class Ink:
    """The neutral colours of a theme; the page uses the same."""

    page: str
    text: str
    faint: str
    line: str


INKS: dict[Theme, Ink] = {
    "light": Ink(page="#ffffff", text="#1d2327", faint="#5c666d", line="#d5dade"),
    "dark": Ink(page="#15191c", text="#e6eaed", faint="#9aa5ac", line="#343c42"),
}


class Look(NamedTuple):
    """Colour on the light page, colour on the dark page, marker. Markers differ where colours could be confused."""

    light: str
    dark: str
    marker: str

    def colour(self, theme: Theme) -> str:
        return self.light if theme == "light" else self.dark


# Hues of Okabe & Ito and of Tol, which people with any kind of colour blindness can tell apart, darkened for the white
# page and lightened for the dark one where the original would not stand out.
LOOKS: dict[str, Look] = {
    "dmc-ot": Look("#d55e00", "#ff8533", "o"),
    "dmc": Look("#0072b2", "#4fb0ee", "s"),
    "zero-shot": Look("#7a7f84", "#a9b0b6", "x"),
    "simplecil": Look("#111111", "#f2f2f2", "D"),
    "coop": Look("#8c6510", "#d1a545", "v"),
    "proof": Look("#009e73", "#2fd0a2", "^"),
    "clap4clip": Look("#c7549b", "#ee92c8", "P"),
    "l2p": Look("#332288", "#9d90f0", "<"),
    "dualprompt": Look("#882255", "#d46ba0", ">"),
    "coda-prompt": Look("#2f8fc4", "#8fd3ff", "h"),
    "rapf": Look("#5f7d00", "#b5d334", "*"),
    "engine": Look("#b8860b", "#ffd24d", "p"),
}
OTHERS = (Look("#aa3377", "#e68cc0", "d"), Look("#117733", "#58c07d", "X"), Look("#44709d", "#93bfec", "H"))
SERIES = ("dmc-ot", "dmc", "proof", "clap4clip", "l2p", "engine", "simplecil", "dualprompt", "coda-prompt", "rapf")
"""Looks lent to what is not a method, such as the datasets of a sweep or the phases of a run."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", ":", "-.")
"""Variants of one method share its colour and differ in the line."""


def look_of(method: str) -> Look:
    """The same for the same name, today and in a year."""
    return LOOKS.get(method) or OTHERS[zlib.crc32(method.encode()) % len(OTHERS)]


def series_look(index: int) -> Look:
    return LOOKS[SERIES[index % len(SERIES)]]


@contextmanager
def figure_style(theme: Theme) -> Iterator[Any]:
    """pyplot without a display, drawing in the theme's colours; closes what was left open."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ink = INKS[theme]
    style = {
        "figure.facecolor": ink.page, "axes.facecolor": ink.page, "savefig.facecolor": ink.page,
        "text.color": ink.text, "axes.labelcolor": ink.text, "xtick.color": ink.faint, "ytick.color": ink.faint,
        "axes.edgecolor": ink.line, "grid.color": ink.line, "axes.titlecolor": ink.text,
        "legend.frameon": False, "legend.fontsize": 9, "axes.grid": True, "grid.linewidth": 0.7,
        "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 11,
        "font.size": 10, "figure.dpi": 160, "savefig.dpi": 160, "axes.axisbelow": True, "lines.linewidth": 1.8,
        "lines.markersize": 5, "legend.handlelength": 3.2, "figure.constrained_layout.use": True,
    }  # fmt: skip
    with matplotlib.rc_context(style):
        try:
            yield pyplot
        finally:
            pyplot.close("all")
