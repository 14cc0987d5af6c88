"""From the words of a command to a run and the lines that close it."""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from clipcil.errors import UserError
from clipcil.experiment.checkpoint import first_difference
from clipcil.experiment.display import Display
from clipcil.experiment.results import Outcome, check_start
from clipcil.experiment.run import run
from clipcil.experiment.spec import RunSpec, as_table, method_settings
from clipcil.reading import read_toml
from clipcil.report.runs import read_run
from clipcil.settings import build, merge, parse_words


def launch(given: Mapping[str, Any], words: Iterable[str], preset: bool, out: Path | None, display: Display) -> Outcome:
    """A new run."""
    spec = build(RunSpec, only_given(given))
    config = method_settings(spec, parse_words(words), preset)
    out = out or fresh_folder(f"{spec.method}-{spec.data}")
    with says_how_to_go_on(out):
        outcome = run(spec, config, out, display)
    close(outcome.as_dict(), out)
    return outcome


def resume_run(folder: Path, given: Mapping[str, Any], words: Iterable[str], display: Display) -> None:
    """Go on with the run in `folder`. Its own settings hold; one given again must say the same."""
    path = folder / "config.toml"
    if not path.is_file():
        raise UserError(f"{folder} holds no run (there is no config.toml in it)")
    kept = read_toml(path)
    for part in ("run", "method"):
        if not isinstance(kept.get(part), dict):
            raise UserError(f"{path} is damaged: it has no table [{part}]; put the right one back or start anew")
    spec = build(RunSpec, merge(kept["run"], only_given(given)))
    config = method_settings(spec, merge(kept["method"], parse_words(words)), preset=False)
    check_start(folder, as_table(spec, config), resume=True)
    if (whole := finished(folder, as_table(spec, config))) is not None:
        print(f"{folder} is complete; nothing is left to do")
        close(whole, folder)
        return
    with says_how_to_go_on(folder):
        outcome = run(spec, config, folder, display, resume=True)
    close(outcome.as_dict(), folder)


def finished(folder: Path, table: dict[str, Any]) -> dict[str, Any] | None:
    """The results of the run in `folder` if they are whole and of these settings; all four files must be there."""
    if not all((folder / name).is_file() for name in ("matrix.csv", "predictions.csv", "steps.jsonl")):
        return None
    try:
        values = read_run(folder).values
    except UserError:  # damaged results are made again from the last checkpoint
        return None
    return None if first_difference(values["config"], table) else values


@contextmanager
def says_how_to_go_on(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        if not (folder / "config.toml").is_file():
            raise KeyboardInterrupt("stopped before anything was learnt") from stop
        raise KeyboardInterrupt(f"stopped; go on with: clipcil run --resume {shlex.quote(str(folder))}") from stop


def only_given(given: Mapping[str, Any]) -> dict[str, Any]:
    """What was said on the command line: the values that are not the defaults."""
    usual = RunSpec()
    said = {key: value for key, value in given.items() if value not in (None, ()) and value != getattr(usual, key)}
    if words := said.get("data_options"):
        said["data_options"] = parse_words(words)
    return said


def fresh_folder(what: str) -> Path:
    """`runs/2026-01-31-what`, with a number behind it where that is taken."""
    stem = f"{datetime.date.today().isoformat()}-{what}"
    for number in range(1, 10_000):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        if not folder.exists():
            return folder
    raise UserError("runs/ holds ten thousand runs of today; name a folder with --out")


def close(results: Mapping[str, Any], out: Path) -> None:
    """The paper's two numbers, and where the rest is. `results` is what `results.json` holds."""
    print("A_B {last:.2f} %   Ā {average:.2f} %   (over pictures: {last_weighted:.2f} %)".format(**results))
    print("forgetting {forgetting:.2f}   backward transfer {backward_transfer:.2f}".format(**results))
    if (drift := results["drift"][-1]) is not None:
        print(
            "drift of the stored means (1 − cosine) after the last task:"
            f" {drift['cosine_before']:.4f} before calibration, {drift['cosine_after']:.4f} after"
        )
    for note in results["notes"]:
        print(f"note: {note}")
    print(f"results in {out}; clipcil report {out} makes a page of them")
