"""The report in a real browser: every figure is drawn, both colour schemes, no complaint, on a desk and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, DRIVER, MISSING, Browser
from finished_runs import write_run

from clipcil.report.page import write_report
from clipcil.report.runs import find_runs

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
    assert len(drawn) == (4 + 2 * 2) + (3 + 2)  # two methods on one stream, one without drift on the other
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
    assert browser.run("return document.scripts.length") == 0
    assert "<script>alert(9)</script>" in browser.run("return document.body.textContent")


def test_methods_open_and_close(page: Path, browser: Browser) -> None:
    browser.show(page, 375)
    count = "return [...document.querySelectorAll('.strip')].filter(each => each.checkVisibility()).length"
    assert browser.run(count) == 0
    browser.run(OPEN_ALL)
    assert browser.run(count) == 4
    shown = browser.run("return [...document.querySelectorAll('.strip img')].map(each => each.naturalWidth)")
    assert len(shown) > 8 and min(shown) == 64
