"""How figures look: a light and a dark theme, and a fixed colour and marker for each method."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Literal, NamedTuple

Theme = Literal["light", "dark"]


class Ink(NamedTuple):
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
    "finetune": Look("#9aa0a5", "#7b8186", "1"),
    "joint": Look("#8b9196", "#8b9196", "2"),
}
# Colours for everything else, light and dark: as far from those above and from each other as RGB allows ("redmean").
MORE = (
    ("#1bbb1b", "#8bee8b"), ("#7e0707", "#f43434"), ("#077e07", "#34f434"), ("#a1bb1b", "#deee8b"),
    ("#6a077e", "#d434f4"), ("#bb361b", "#ee9c8b"), ("#07077e", "#3434f4"), ("#78833f", "#c0ca91"),
    ("#076a7e", "#34d4f4"), ("#861bbb", "#cd8bee"), ("#077e56", "#34f4b4"), ("#1bbb86", "#8beecd"),
    ("#3f834a", "#91ca9a"), ("#3f8383", "#91caca"), ("#072e7e", "#3474f4"), ("#077e2e", "#34f474"),
    ("#6c3f83", "#b791ca"), ("#833f3f", "#ca9191"), ("#3f4a83", "#919aca"), ("#7e0742", "#f43494"),
    ("#1b50bb", "#8bacee"), ("#42077e", "#9434f4"), ("#bb6b1b", "#eebd8b"), ("#2e7e07", "#74f434"),
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "d", "H", "<", ">", "p", "*", "h")


def assign_looks(names: Sequence[str]) -> list[Look]:
    """A look for each name; the same list always gives the same looks.

    The first with the name of a method in `LOOKS` has its look; variants of it, and other names, get new ones. Markers
    differ where there are more new ones than colours.
    """
    new = (Look(*colours, marker) for colours, marker in zip(cycle(MORE), cycle(MARKERS), strict=False))
    known = {names.index(name): LOOKS[name] for name in names if name in LOOKS}
    return [known.get(place) or next(new) for place in range(len(names))]


def series_looks(count: int) -> list[Look]:
    """Looks for series that are not methods, such as the datasets of a sweep or the phases of a run."""
    return assign_looks([*LOOKS, *map(str, range(count))])[:count]


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
