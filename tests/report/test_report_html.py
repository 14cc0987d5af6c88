"""The page: complete, self-contained, harmless, and honest about what is missing."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from clipcil.classifier.scoring import Answer, evaluate_answers
from clipcil.errors import UserError
from clipcil.intervals import signed
from clipcil.report import figures
from clipcil.report.answers import Thumbnails, confused_pairs, read_predictions
from clipcil.report.compare import Standing, group_runs, rank_groups
from clipcil.report.page import OWN_FIGURE, write_report
from clipcil.report.runs import find_runs
from clipcil.report.style import LOOKS, assign_looks, series_looks
from support.finished_runs import write_run

NASTY = "<img src=x onerror=alert(1)>"


def text_of(folder: Path) -> str:
    """The page about the runs in a folder."""
    write_report(find_runs([folder]), folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def standings_of(folder: Path) -> list[Standing]:
    """The runs in a folder, ranked."""
    return rank_groups(group_runs(find_runs([folder])))


def change(folder: Path, **values: Any) -> None:
    """Change values of `results.json`; None removes one."""
    found = {**json.loads((folder / "results.json").read_text()), **values}
    (folder / "results.json").write_text(json.dumps({key: value for key, value in found.items() if value is not None}))


@pytest.fixture
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are written without drawing, which takes most of the time."""
    for kind in (*figures.MOST_METHODS, "matrix", "confusion"):
        monkeypatch.setattr(figures, kind, lambda *_: figures.Figure(b"", []))


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


def test_everything_is_inside_the_file_and_no_name_becomes_html(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href|srcset)=["'](?!data:|#)""", text)
    assert "url(" not in text and "@import" not in text and text.count("<script") == 1
    assert "http://" not in text and "https://" not in text
    assert NASTY not in text and "a note with &lt;img src=x" in text


def test_every_figure_is_there_in_both_themes_and_beside_the_page(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = re.findall(r'<figure id="([^"]+)"', text)
    kinds = {name.rsplit("-", 1)[1] for name in names}
    assert kinds == {"scores", "accuracy", "forgetting", "drift", "seconds", "matrix", "confusion"}
    assert len(names) == len(set(names)) == 5 + 5 + 2 * 4  # two streams, two methods in each
    for name in names:
        assert OWN_FIGURE.fullmatch(f"{name}.png") and OWN_FIGURE.fullmatch(f"{name}-dark.png")
        for end in ("", "-dark"):
            content = (page.parent / "report-figures" / f"{name}{end}.png").read_bytes()
            assert base64.b64encode(content).decode() in text
            picture = Image.open(io.BytesIO(content))
            assert picture.width > 600 and picture.mode == "P"  # 256 colours: a page of many runs is a third as large


def test_the_page_has_the_paper_s_numbers_pictures_settings_and_versions(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    difference = group_runs(find_runs([page.parent / "paper"]))[0].last.mean - 82.16
    assert f'<td data-value="82.16">82.16</td><td data-value="{difference:.6g}">{signed(difference)}</td>' in text
    assert "± " in text and "The paper measured with openai/clip-vit-base-patch16, not with mini" in text
    assert text.count('class="strip"') == 4  # right and wrong of the two methods on the embedded data
    assert text.count("No pictures are shown: ") == 2
    for key, value in (("stage1.epochs", "3"), ("run.seed", "0, 1"), ("environment.torch", "2.13")):
        assert f'<th scope="row">{key}</th><td>{value}</td>' in text


def test_strips_are_the_same_every_time_and_right_and_wrong_are_told_apart(tmp_path: Path) -> None:
    run = find_runs([write_run(tmp_path / "a")])[0]
    right, wrong = Thumbnails().of(run, 4, 3)
    assert (right, wrong) == Thumbnails().of(run, 4, 3)
    assert len(right) == 4 and all(answer.right for _, answer in right)
    sure = [answer.probability for _, answer in wrong]
    mistakes = [each for each in read_predictions(run.folder) if not each.right]
    assert sure == sorted((each.probability for each in mistakes), reverse=True)[:3] and len(set(sure)) > 1
    assert Image.open(io.BytesIO(wrong[0][0])).size == (64, 64)


@pytest.mark.parametrize(
    ("choices", "why"),
    [
        ({"names": ["cat", "dog", "cow", "pig", "owl", "fox"]}, "not the ones the run was measured on"),
        ({"data": "folder", "data_root": "x" * 5000}, "File name too long"),
    ],
)
def test_pictures_of_other_data_are_not_shown_as_those_of_the_run(
    tmp_path: Path, choices: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError, match=why):
        Thumbnails().of(find_runs([write_run(tmp_path / "a", **choices)])[0])


@pytest.mark.usefixtures("no_figures")
def test_a_run_without_predictions_or_times_still_has_its_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    for name in ("predictions.csv", "timing.json", "environment.json"):
        (folder / name).unlink()
    change(folder, last_weighted=12.34, backward_transfer=5.67)
    text = text_of(tmp_path)
    assert "holds no predictions.csv" in text and "-seconds" not in text
    assert text.split("Each method")[0].count("<td>—</td></tr>") == 1, "times that are not known are not zero seconds"
    # Columns that do not repeat A_B and forgetting are shown.
    assert "over pictures" in text and "12.34" in text and "Backward transfer" in text and "5.67" in text


@pytest.mark.usefixtures("no_figures")
def test_a_figure_that_leaves_methods_out_says_so(tmp_path: Path) -> None:
    for index in range(8):
        write_run(tmp_path / str(index), "dmc-ot", 0, 0.5 + 0.05 * index, f"beta={index}")
    entries = standings_of(tmp_path)
    kept = [entry.group.label for entry in figures.best(entries, 3)]
    assert kept == [f"DMC-OT (beta={index})" for index in (5, 6, 7)]
    write_run(tmp_path / "simple")
    captions = re.findall(r'<figure id="[^"]*-(\w+)".*?<figcaption>(.*?)</figcaption>', text_of(tmp_path), re.DOTALL)
    said = {name: re.findall(r"The \d+ best of \d+ by A", text) for name, text in captions}
    assert said.pop("drift") == ["The 6 best of 8 by A"] and not any(said.values())


def test_figures_of_an_earlier_report_do_not_stay_beside_the_new_one(tmp_path: Path) -> None:
    runs = find_runs([write_run(tmp_path / "a", "dmc-ot", tasks=1), write_run(tmp_path / "b", tasks=1)])
    write_report(runs, tmp_path / "page.html")
    before = {path.name for path in (tmp_path / "page-figures").iterdir()}
    (tmp_path / "page-figures" / "mine.png").touch()
    drawn = write_report(runs[1:], tmp_path / "page.html")
    assert [name.rsplit("-", 1)[1] for name in drawn] == ["accuracy"]  # no chart with one bar, no table of one cell
    after = {path.name for path in (tmp_path / "page-figures").iterdir()}
    assert after == {f"{name}{dark}.png" for name in drawn for dark in ("", "-dark")} | {"mine.png"} and before - after


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The matplotlib figures that are drawn."""
    found, real = [], figures.Canvas.draw

    def draw(self: figures.Canvas) -> figures.Figure:
        found.append(self.figure)
        return real(self)

    monkeypatch.setattr(figures.Canvas, "draw", draw)
    return found


def test_a_long_legend_leaves_the_plot_its_height(tmp_path: Path, drawn: list[Any]) -> None:
    for index in range(12):
        write_run(tmp_path / str(index), "dmc-ot", 0, 0.5 + 0.02 * index, f"prompt_length={index + 1}", "beta=0.25")
    entries = standings_of(tmp_path)
    figures.accuracy(entries[:2], "light"), figures.accuracy(entries, "light")
    figures.drift(entries[:2], "light"), figures.drift(entries, "light")
    heights = [figure.axes[0].get_window_extent().height / figure.dpi for figure in drawn]
    assert heights[1] > 0.9 * heights[0] > 2 and heights[3] > 0.9 * heights[2] > 1, heights


@pytest.mark.parametrize(("low", "high"), [(65.0, 69.6), (99.0, 100.0), (0.0, 100.0), (50.0, 50.0), (99.6, 99.9)])
def test_the_label_of_a_colour_bar_is_inside_the_figure(
    tmp_path: Path, drawn: list[Any], low: float, high: float
) -> None:
    folder = write_run(tmp_path / "a", tasks=2)
    change(folder, matrix=[[high, None], [low, low]])
    figures.matrix(group_runs(find_runs([folder]))[0], "light")
    (figure,) = drawn
    assert all(axes.yaxis.label.get_window_extent().x1 <= figure.bbox.x1 for axes in figure.axes)


def test_no_colour_stands_for_two_things() -> None:
    assert len({look.marker for look in LOOKS.values()}) == len(LOOKS) == 12
    names = [*LOOKS, *["dmc-ot"] * 14, "a method of tomorrow", "another"]
    looks = assign_looks(names)
    assert looks == assign_looks(names) and looks[: len(LOOKS)] == list(LOOKS.values())
    assert assign_looks(["new", "dmc-ot"])[1] == LOOKS["dmc-ot"]  # who comes first takes no known colour away
    for theme in ("light", "dark"):
        assert len({look.colour(theme) for look in looks}) == len(names)
        assert len({look.colour(theme) for look in series_looks(20)}) == 20


@pytest.mark.usefixtures("no_figures")
def test_the_headline_has_the_finding_the_day_and_the_size_of_the_test_set(tmp_path: Path) -> None:
    for order in ("seed:1993", "seed:1", "seed:2"):
        for method, right in (("dmc-ot", 0.9), ("dmc", 0.8), ("zero-shot", 0.3)):
            write_run(tmp_path / f"{method}-{order[5:]}", method, 0, right, order=order)
    text = text_of(tmp_path)
    assert "DMC-OT has the highest A<sub>B</sub> on emoji, 3 tasks, mini: 85.0 %" in text
    assert "<h1>DMC-OT cannot be told from DMC on emoji, 3 tasks</h1>" in text
    assert [text.index(f"</span>{name}</th>") for name in ("DMC-OT", "DMC", "Zero-shot CLIP")] == sorted(
        text.index(f"</span>{name}</th>") for name in ("DMC-OT", "DMC", "Zero-shot CLIP")
    ), "the best first"
    assert "but it cannot be told from DMC (75.0 %)." in text  # 12 pictures: one mistake fewer is noise
    assert 'class="best"' not in text and "Measured on 120 test pictures." in text and ", 2026-01-31." in text
    assert "3 class orders" in text and text.count("<details") == 2 * 3  # one line for a method, not one for an order
    assert "over pictures" not in text and "Backward transfer" not in text  # they would repeat A_B and forgetting


@pytest.mark.usefixtures("no_figures")
def test_the_best_is_bold_where_its_lead_is_more_than_noise(tmp_path: Path) -> None:
    for method, right in (("dmc-ot", 0.9), ("zero-shot", 0.1)):
        write_run(tmp_path / method, method, 0, right, tasks=50)
    text = text_of(tmp_path)
    assert text.count('class="best"') == 1 and "ahead of the other method by more than the noise" in text
    best, worst = (group.last.mean for group in group_runs(find_runs([tmp_path])))
    found = f"DMC-OT leads by {abs(best - worst):.0f} points on emoji, 50 tasks"
    assert f"<h1>{found}</h1>" in text and f"<title>clipcil: {found}</title>" in text


@pytest.mark.usefixtures("no_figures")
def test_the_title_of_one_method_and_of_several_streams(tmp_path: Path) -> None:
    write_run(tmp_path / "one", "dmc-ot", 0, 0.9)
    assert re.search(r"<h1>DMC-OT reaches \d+\.\d % on emoji, 3 tasks</h1>", text_of(tmp_path))
    for tasks in (2, 4):
        for method, right in (("dmc-ot", 0.9), ("dmc", 0.3 if tasks == 4 else 1.0)):
            write_run(tmp_path / f"{method}{tasks}", method, 0, right, tasks=tasks)
    assert "has the highest A_B on 1 of 2 streams of tasks</h1>" in text_of(tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_drift_has_a_verdict_in_a_sentence(tmp_path: Path) -> None:
    write_run(tmp_path / "a", "dmc-ot")  # 0.14 before and 0.03 after the last task
    assert "After the last task, calibration removes 79 % of the drift of DMC-OT." in text_of(tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_two_pictures_of_a_class_make_no_table_of_confusions(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", right=0.5)
    assert confused_pairs(read_predictions(folder)) and "ost often" not in text_of(tmp_path)
    with (folder / "predictions.csv").open("a") as file:
        for row in range(1000, 1003):
            file.write(f"1,{row},picture,airplane,ambulance,0.9\n")
    assert "Most often confused" in text_of(tmp_path) and "Most often mistaken for" in text_of(tmp_path)


def test_confused_pairs_are_counted_from_the_predictions(tmp_path: Path) -> None:
    answers = read_predictions(write_run(tmp_path / "a", right=0.5, tasks=20))
    pairs = confused_pairs(answers)
    assert pairs[0].times == sum((each.true, each.guess) == pairs[0][:2] for each in answers) > 0
    assert [pair.times for pair in pairs] == sorted((pair.times for pair in pairs), reverse=True)
    assert not confused_pairs(answers, fewest=pairs[0].times + 1)


@pytest.mark.parametrize("line", ["", "1,x", "99999999999,0,a,a", "1,-3,a,a", "1"])
@pytest.mark.parametrize("header", ["", "no table", "task,row,class,predicted"])
def test_damaged_predictions_are_named(tmp_path: Path, header: str, line: str) -> None:
    (tmp_path / "predictions.csv").write_text(f"{header}\n{line}\n")
    with pytest.raises(UserError, match=r"predictions\.csv cannot be read"):
        read_predictions(tmp_path)


@pytest.mark.usefixtures("no_figures")
def test_the_best_on_other_class_orders_is_not_called_better(tmp_path: Path) -> None:
    """SimpleCIL ran on the easiest order alone, and is worse there."""
    write_run(tmp_path / "simple", "simplecil", 0, 0.7, tasks=50, order="seed:1")
    for order, right in (("seed:1", 1.0), ("seed:2", 0.1), ("seed:3", 0.1)):
        write_run(tmp_path / order, "dmc-ot", 0, right, tasks=50, order=order)
    for path in tmp_path.iterdir():
        change(path, last=70.0 if path.name == "simple" else 40.0)
    entries = standings_of(tmp_path)
    best, other = sorted(entries, key=lambda entry: not entry.is_best)
    assert best.group.label == "SimpleCIL" and other.ahead and other.tied
    page = text_of(tmp_path)
    assert "by more than the noise" not in page and "DMC-OT had more." in page


@pytest.mark.usefixtures("no_figures")
def test_folds_of_held_out_pictures_are_not_called_missing_predictions(tmp_path: Path) -> None:
    for seed in (0, 1):
        for method in ("simplecil", "dmc"):
            folder = write_run(tmp_path / f"{method}{seed}", method, seed, hold_out=1)
            lines = (folder / "predictions.csv").read_text().splitlines()
            (folder / "predictions.csv").write_text("\n".join([lines[0], *lines[1 + seed :]]) + "\n")
    assert "predictions are missing, or not all of the same pictures" in text_of(tmp_path)


@pytest.mark.parametrize(
    ("drift", "points"),
    [
        ([None, {"other": 1.0}, None], 0),
        ([None, {"cosine_before": 0.1}, {"w2_after": 0.1}], 2),  # where both runs have a number
        (None, 8),  # the other run alone
    ],
)
def test_drift_that_is_not_all_there_is_drawn_as_far_as_it_is(
    tmp_path: Path, drift: list[Any] | None, points: int
) -> None:
    for seed in (0, 1):
        folder = write_run(tmp_path / str(seed), "dmc-ot", seed)
    change(folder, drift=drift)
    (entry,) = standings_of(tmp_path)
    assert len(figures.drift([entry], "light").points) == points


def test_a_dollar_in_a_name_is_no_formula(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    config = json.loads((folder / "results.json").read_text())["config"]
    change(folder, config={**config, "run": {**config["run"], "method": "$\\frac$"}})
    entries = standings_of(folder)
    assert figures.accuracy(entries, "light").points[0][2].startswith("$\\frac$, after task 1")


def test_the_confusion_matrix_of_a_model_has_the_worst_classes_and_the_pictures_of_none() -> None:
    answers = [Answer("cat", "cat", 0.9)] * 3 + [Answer("cat", "dog", 0.8), Answer("dog", "dog", 0.7, unknown=True)]
    answers += [Answer(f"class {number}", f"class {number}", 0.9) for number in range(30)]
    found = evaluate_answers(answers, ["cat", "dog", *(f"class {number}" for number in range(30))])
    texts = [text for _, _, text in figures.answers(found, "light").points]
    assert len(texts) == figures.MOST_CLASSES * (figures.MOST_CLASSES + 1)
    for said in ("75 % of the pictures of cat were called cat", "25 % of the pictures of cat were called dog"):
        assert said in texts
    assert "100 % of the pictures of dog were called none of these" in texts
    assert "0 % of the pictures of cat were called none of these" in texts
