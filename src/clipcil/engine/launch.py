"""From the words of a command to a run and the lines that close it."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipcil.engine.display import Display
from clipcil.engine.outcome import Outcome
from clipcil.engine.run import run
from clipcil.engine.spec import RunSpec, method_settings
from clipcil.errors import UserError
from clipcil.files import run_lock
from clipcil.settings import build, merge, parse_words, read_toml


def launch(given: Mapping[str, Any], words: Iterable[str], preset: bool, out: Path | None, display: Display) -> Outcome:
    """A new run."""
    spec = build(RunSpec, only_given(given))
    config = method_settings(spec, parse_words(words), preset)
    out = out or fresh_folder(f"{spec.method}-{spec.data}")
    with run_lock(out), says_how_to_go_on(out):
        outcome = run(spec, config, out, display)
    close(outcome, out)
    return outcome


def resume_run(folder: Path, given: Mapping[str, Any], words: Iterable[str], display: Display) -> Outcome:
    """Go on with the run in `folder`. Its own settings hold; one given again must say the same."""
    if not (folder / "config.toml").is_file():
        raise UserError(f"{folder} holds no run (there is no config.toml in it)")
    table = read_toml(folder / "config.toml")
    spec = build(RunSpec, merge(table.get("run", {}), only_given(given)))
    config = method_settings(spec, merge(table.get("method", {}), parse_words(words)), preset=False)
    with run_lock(folder), says_how_to_go_on(folder):
        outcome = run(spec, config, folder, display, resume=True)
    close(outcome, folder)
    return outcome


@contextmanager
def says_how_to_go_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(f"stopped; go on with: clipcil run --resume {folder}") from stop


def only_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was said on the command line: the values that are not the defaults."""
    usual = RunSpec()
    return {
        key: value for key, value in given.items() if value not in (None, ()) and value != getattr(usual, key, None)
    }


def fresh_folder(what: str) -> Path:
    """`runs/2026-01-31-what`, with a number behind it where that is taken."""
    stem = f"{datetime.date.today().isoformat()}-{what}"
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder
    raise UserError("runs/ holds ten thousand runs of today; name a folder with --out")


def close(outcome: Outcome, out: Path) -> None:
    """The paper's two numbers, and where the rest is."""
    metrics = outcome.metrics
    print(f"A_B {metrics.last:.2f} %   Ā {metrics.average:.2f} %   (over pictures: {metrics.last_weighted:.2f} %)")
    print(f"forgetting {metrics.forgetting:.2f}   backward transfer {metrics.backward_transfer:.2f}")
    if (drift := outcome.drift[-1]) is not None:
        print(
            "drift of the stored means (1 − cosine) after the last task:"
            f" {drift['cosine_before']:.4f} before calibration, {drift['cosine_after']:.4f} after"
        )
    for note in outcome.notes:
        print(f"note: {note}")
    print(f"results in {out}; clipcil report {out} makes a page of them")
