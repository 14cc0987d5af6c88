"""The report in a real browser: every figure is drawn, both colour schemes, no complaint, on a desk and on a phone."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clipcil.classifier.scoring import Answer, evaluate_answers
from clipcil.report.html import write_page
from clipcil.report.page import write_report
from clipcil.report.runs import find_runs
from support.browser import CHROMIUM, DRIVER, MISSING, Browser
from support.finished_runs import write_run

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)

FIGURES = """return [...document.querySelectorAll('figure')].map(figure => {
  const image = figure.querySelector('img');
  return {id: figure.id, ready: image.complete && image.naturalWidth > 600, wide: image.getBoundingClientRect().width,
          dark: image.currentSrc === figure.querySelector('source').srcset}; })"""
OPEN_ALL = "document.querySelectorAll('details').forEach(each => { each.querySelector('summary').click(); })"
BRIGHTNESS = """const shade = colour => colour.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0) / 3;
const style = getComputedStyle(document.body); return [shade(style.backgroundColor), shade(style.color)]"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    for seed in (0, 1):
        write_run(folder / f"ot{seed}", "dmc-ot", seed, 0.8)
        write_run(folder / f"simple{seed}", "simplecil", seed, 0.6)
    names = [f"<script>alert({index})</script>" for index in range(8)]
    write_run(folder / "nasty", "zero-shot", 0, 0.5, tasks=4, names=names, notes=["<script>alert(9)</script>"])
    write_report(find_runs([folder]), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 375])
def test_every_figure_in_both_schemes(page: Path, browser: Browser, width: int, scheme: str) -> None:
    browser.show(page, width, scheme=scheme)
    browser.run(OPEN_ALL)
    drawn = browser.run(FIGURES)
    # Two methods on one stream; on the other one method, without charts of one bar.
    assert len(drawn) == (5 + 2 * 2) + (1 + 2)
    for figure in drawn:
        assert figure["ready"], figure["id"]
        assert figure["dark"] == (scheme == "dark"), figure["id"]
        assert 250 < figure["wide"] <= width, figure["id"]
    page_shade, text_shade = browser.run(BRIGHTNESS)
    assert (page_shade > 200 and text_shade < 80) if scheme == "light" else (page_shade < 60 and text_shade > 180)
    assert browser.run("return document.documentElement.scrollWidth") <= width, "only tables may scroll sideways"
    assert browser.console() == []


def test_no_name_becomes_a_script(page: Path, browser: Browser) -> None:
    browser.show(page, 1200)
    assert browser.run("return document.scripts.length") == 1  # the page's own
    assert "<script>alert(9)</script>" in browser.run("return document.body.textContent")


def test_methods_open_and_close(page: Path, browser: Browser) -> None:
    browser.show(page, 375)
    count = "return [...document.querySelectorAll('.strip')].filter(each => each.checkVisibility()).length"
    assert browser.run(count) == 0
    browser.run(OPEN_ALL)
    assert browser.run(count) == 4  # right and wrong of the two methods on the embedded data
    shown = browser.run("return [...document.querySelectorAll('.strip img')].map(each => each.naturalWidth)")
    assert len(shown) > 8 and min(shown) == 64


def test_a_click_on_a_heading_sorts_and_a_second_one_turns_round(page: Path, browser: Browser) -> None:
    browser.show(page, 1200)
    column = "return [...document.querySelector('table.sortable').tBodies[0].rows].map(row => row.cells[2].textContent)"
    click = "document.querySelector('table.sortable').tHead.rows[0].cells[2].querySelector('button').click()"
    before = browser.run(column)
    browser.run(click)
    falling = browser.run(column)
    browser.run(click)
    assert falling == sorted(before, key=lambda words: -float(words.split()[0])) and len(set(before)) > 1
    assert browser.run(column) == falling[::-1]


def test_a_dash_stands_below_the_numbers_whichever_way_they_are_sorted(page: Path, browser: Browser) -> None:
    words = ["—", "+2.00 ± 0.10", "−3.00 [−4.00, −2.00]", "10.5", "—", "−20.0"]
    browser.show(page, 1200)
    falling, rising = browser.run(
        f"""const words = {json.dumps(words)}, tables = [...document.querySelectorAll('table.sortable')];
        const table = tables.find(each => each.tBodies[0].rows.length === words.length), body = table.tBodies[0];
        words.forEach((word, place) => {{ body.rows[place].cells[0].textContent = word; }});
        const sort = () => {{ table.querySelector('button').click(); return [...body.rows].map(row => row.cells[0]); }};
        return [1, 2].map(() => sort().map(cell => cell.textContent))"""
    )
    numbers = [words[3], words[1], words[2], words[5]]
    assert (falling, rising) == ([*numbers, "—", "—"], [*numbers[::-1], "—", "—"])


def test_the_point_under_the_pointer_says_what_it_is(page: Path, browser: Browser) -> None:
    browser.show(page, 1200)
    said = browser.run(
        """const figure = document.querySelector("figure[id$='accuracy']"), image = figure.querySelector('img');
        const [x, y, words] = JSON.parse(figure.dataset.points)[0], box = image.getBoundingClientRect();
        const at = {clientX: box.left + x / 100 * box.width + 3, clientY: box.top + y / 100 * box.height};
        image.dispatchEvent(new PointerEvent('pointermove', at));
        const tip = document.getElementById('tip'), shown = !tip.hidden && tip.textContent;
        image.dispatchEvent(new PointerEvent('pointerleave', {}));
        return [words, shown, tip.hidden]"""
    )
    assert said[0] == said[1] and "after task 1" in said[0] and said[2]


@pytest.mark.parametrize("width", [1280, 390])
def test_ticked_mistakes_become_a_list(browser: Browser, tmp_path: Path, width: int) -> None:
    answers = [
        Answer("bee", "ant", 0.9, picture=tmp_path / "a, b.png"),
        Answer("yak", "ant", 0.8, picture=tmp_path / "y"),
    ]
    model = SimpleNamespace(classes=["ant", "bee"])
    values = {"found": evaluate_answers(answers, model.classes), "mistakes": [(each, b"") for each in answers]}
    write_page(
        tmp_path / "page.html", "test.html", title="clipcil: test", model=model, source="new", command="x", **values
    )
    browser.show(tmp_path / "page.html", width)
    browser.run("URL.createObjectURL = (blob) => { window.saved = blob.text(); return '#'; }")
    browser.run("document.querySelector('#save').click()")
    assert browser.run("return window.saved") == f'picture,class\n"{tmp_path}/a, b.png","bee"\n'
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.console() == []
