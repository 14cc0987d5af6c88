"""How figures look: a light and a dark theme, and a fixed colour and marker for each method."""

from __future__ import annotations

import colorsys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

Theme = Literal["light", "dark"]


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
# page and lightened for the dark one where the contrast of the original is too low.
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
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d", "H", "<", ">", "p", "*", "h")


def assign_looks(names: Sequence[str]) -> list[Look]:
    """A look for each name, no colour twice; the same list always gives the same looks.

    The first with the name of a method in `LOOKS` has its look; variants of it, and other names, get new ones.
    """
    looks: list[Look] = []
    kept = [LOOKS[name] for name in dict.fromkeys(names) if name in LOOKS]
    for index, name in enumerate(names):
        own = LOOKS.get(name) if names.index(name) == index else None
        looks.append(own or _farthest([*kept, *looks], MARKERS[index % len(MARKERS)]))
    return looks


def series_looks(count: int) -> list[Look]:
    """Looks for series that are not methods, such as the datasets of a sweep or the phases of a run."""
    lent = list(LOOKS.values())[:count]
    return lent + assign_looks([f"series {index}" for index in range(count - len(lent))])


def _farthest(used: Sequence[Look], marker: str) -> Look:
    """The colour that differs most from all used ones, on the light page and on the dark one."""
    return max(_candidates(marker), key=lambda look: min((_distance(look, other) for other in used), default=0.0))


@cache
def _candidates(marker: str) -> tuple[Look, ...]:
    """36 hues, each dull and vivid, dark and light."""
    shades = ((0.26, 0.58, 0.9), (0.42, 0.74, 0.75), (0.38, 0.68, 0.35))
    return tuple(
        Look(_hex(step / 36, light, vivid), _hex(step / 36, dark, vivid), marker)
        for step in range(36)
        for light, dark, vivid in shades
    )


def _hex(*hls: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(*hls))


def _distance(one: Look, other: Look) -> float:
    """How different two looks are in the theme where they differ less: a weighted distance in RGB ("redmean")."""
    found = []
    for pair in ((one.light, other.light), (one.dark, other.dark)):
        a, b = ([int(colour[place : place + 2], 16) for place in (1, 3, 5)] for colour in pair)
        red, (dr, dg, db) = (a[0] + b[0]) / 2, (x - y for x, y in zip(a, b, strict=True))
        found.append(((2 + red / 256) * dr**2 + 4 * dg**2 + (2 + (255 - red) / 256) * db**2) ** 0.5)
    return float(min(found))


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
        "text.parse_math": False,  # a label may hold dollar signs, which would be read as a formula
    }  # fmt: skip
    with matplotlib.rc_context(style):
        try:
            yield pyplot
        finally:
            pyplot.close("all")
