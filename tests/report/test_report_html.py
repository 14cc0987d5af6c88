"""The page: complete, self-contained, harmless, and honest about what is missing."""

from __future__ import annotations

import base64
import io
import re
import shutil
from pathlib import Path

import pytest
from finished_runs import write_run
from PIL import Image

from clipcil.errors import UserError
from clipcil.report import figures
from clipcil.report.compare import group_runs
from clipcil.report.page import write_report
from clipcil.report.runs import find_runs
from clipcil.report.strip import Strips, choose, read_predictions
from clipcil.report.style import LOOKS, look_of
from clipcil.report.tensorboard import write_tensorboard

NASTY = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    for seed in (0, 1):
        write_run(folder / f"ot{seed}", "dmc-ot", seed, 0.8, notes=[f"a note with {NASTY}"])
        write_run(folder / f"simple{seed}", "simplecil", seed, 0.6)
    absent = {"data": "cifar100", "tasks": 10, "data_root": folder / "nowhere"}
    write_run(folder / "paper", "dmc-ot", 0, 0.9, **absent)
    names = [f"{NASTY} {index}" for index in range(20)]
    write_run(folder / "nasty", "simplecil", 0, 0.9, names=names, **absent)
    write_report(find_runs([folder]), folder / "report.html")
    return folder / "report.html"


def test_everything_is_inside_the_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|srcset)=["'](?!data:|#)""", text)
    assert "url(" not in text and "@import" not in text and "<script" not in text
    assert "http://" not in text and "https://" not in text


def test_every_figure_is_there_in_both_themes_and_beside_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r'<figure id="([^"]+)"', text)
    kinds = {name.rsplit("-", 1)[1] for name in names}
    assert kinds == {"accuracy", "forgetting", "drift", "seconds", "matrix", "confusion"}
    assert len(names) == len(set(names)) == 4 + 4 + 2 * 4  # two streams, two methods in each
    for name in names:
        for end in ("", "-dark"):
            content = (page.parent / "report-figures" / f"{name}{end}.png").read_bytes()
            assert base64.b64encode(content).decode() in text
            assert Image.open(io.BytesIO(content)).width > 600


def test_measured_stands_beside_the_paper(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    group = next(g for g in group_runs(find_runs([page.parent / "paper"])))
    assert f"<td>82.16</td><td>{group.last.mean - 82.16:+.2f}</td>" in text
    assert "± " in text and "The paper measured with openai/clip-vit-base-patch16, not with mini" in text


def test_names_and_notes_cannot_become_html(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert NASTY not in text and "a note with &lt;img src=x" in text


def test_pictures_are_shown_where_the_data_is_there_and_their_absence_is_said(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count('class="strip"') == 4  # right and wrong of the two methods on the embedded data
    assert text.count("No pictures are shown: ") == 2


def test_settings_and_versions_are_listed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for key, value in (("stage1.epochs", "3"), ("run.seed", "0, 1"), ("environment.torch", "2.13")):
        assert f'<th scope="row">{key}</th><td>{value}</td>' in text


def test_strips_are_the_same_every_time_and_right_and_wrong_are_told_apart(tmp_path: Path) -> None:
    run = find_runs([write_run(tmp_path / "a")])[0]
    right, wrong = Strips().strip(run, 4)
    assert (right, wrong) == Strips().strip(run, 4)
    assert len(right) == 4 and all(shown.right for shown in right) and not any(shown.right for shown in wrong)
    assert Image.open(io.BytesIO(wrong[0].jpeg)).size == (64, 64)


def test_pictures_of_other_data_are_not_shown_as_those_of_the_run(tmp_path: Path) -> None:
    run = find_runs([write_run(tmp_path / "a", names=["cat", "dog", "cow", "pig", "owl", "fox"])])[0]
    with pytest.raises(UserError, match="not the ones the run was measured on"):
        Strips().strip(run)


def test_choice_is_spread_over_the_list(tmp_path: Path) -> None:
    predictions = read_predictions(write_run(tmp_path / "a"))
    assert [p.row for p in choose(predictions, 2)] == [predictions[3].row, predictions[9].row]
    assert choose(predictions, 100) == predictions


def test_a_run_without_predictions_or_times_still_has_its_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for name in ("predictions.csv", "timing.json", "environment.json"):
        (folder / name).unlink()
    drawn = write_report(find_runs([folder]), tmp_path / "out" / "page.html")
    assert not any(name.endswith("seconds") for name in drawn)
    assert "holds no predictions.csv" in (tmp_path / "out" / "page.html").read_text(encoding="utf-8")


def test_a_run_of_one_task_can_be_drawn(tmp_path: Path) -> None:
    assert write_report(find_runs([write_run(tmp_path / "a", "dmc-ot", tasks=1)]), tmp_path / "page.html")


def test_at_most_twelve_lines_the_best_ones(tmp_path: Path) -> None:
    for index in range(14):
        write_run(tmp_path / str(index), "dmc-ot", 0, 0.5 + 0.02 * index, f"beta={index}")
    groups = group_runs(find_runs([tmp_path]))
    kept = [group.label for group in figures.best(groups)]
    assert kept == [f"DMC-OT (beta={index})" for index in range(2, 14)]


def test_each_method_of_the_paper_has_its_own_colour_and_marker() -> None:
    assert len(LOOKS) == 12
    for theme in ("light", "dark"):
        assert len({look.colour(theme) for look in LOOKS.values()}) == 12
    assert len({look.marker for look in LOOKS.values()}) == 12
    assert look_of("a method of tomorrow") == look_of("a method of tomorrow")


def test_without_the_package_tensorboard_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'clipcil\[tensorboard\]'"):
        write_tensorboard([], tmp_path)


def test_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    runs = find_runs([write_run(tmp_path / "a", "dmc-ot")])
    write_tensorboard(runs, tmp_path / "events")
    assert [path.name.startswith("events.out") for path in (tmp_path / "events" / "a").iterdir()] == [True]
    shutil.rmtree(tmp_path / "events")
