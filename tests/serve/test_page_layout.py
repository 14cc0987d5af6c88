"""Parts of the page in a narrow column, laid out by Chromium without a server: nothing is cut off or broken up."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clipcil.serve.server import STATIC

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LONG = "averyveryverylongnamewithoutanyblanksthatgoesonandon" * 3
PAGE = f"""<!doctype html><meta charset="utf-8">
<link rel="stylesheet" href="style.css"><link rel="stylesheet" href="parts.css">
<body style="width: 330px">
<ul class="broken"><li><span>{LONG}: is not a picture that can be read; replace or remove it</span>
<button class="link-button">Dismiss</button></li></ul>
<div class="class-head"><span class="dot"></span><div class="class-words" style="flex: none; width: 110px">
<p>12 pictures · Nov 17 · <span class="together">18 of 20 classified correctly</span></p></div></div>
<ul class="confused"><li><strong>{LONG}</strong><span class="quiet">mistaken for</span><strong>fox</strong></li></ul>
<p class="note">{LONG}</p>
<dialog open style="width: 300px"><form><h2>Forget {LONG}?</h2><p>{LONG}</p>
<div class="row end"><button class="button">Cancel</button>
<button class="button danger">Yes, forget {LONG}</button></div></form></dialog>
<pre id="said"></pre><script>
const lines = (element) => Math.round(element.clientHeight / parseFloat(getComputedStyle(element).lineHeight));
const parts = ".class-words p, .confused li, .note, .broken, dialog, dialog h2, dialog .button";
const cut = [...document.querySelectorAll(parts)].filter((each) => each.scrollWidth > each.clientWidth);
document.getElementById("said").textContent = JSON.stringify({{
  cut: cut.map((each) => each.outerHTML.slice(0, 30)),
  dismiss: lines(document.querySelector(".link-button")),
  fox: lines(document.querySelectorAll(".confused strong")[1]) }});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_long_names_in_a_narrow_column(tmp_path: Path) -> None:
    for name in ("style.css", "parts.css"):
        shutil.copy(STATIC / name, tmp_path)
    (tmp_path / "page.html").write_text(PAGE, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    command = [str(CHROMIUM), *flags, (tmp_path / "page.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r'<pre id="said">(.*?)</pre>', shown, re.DOTALL)
    assert said is not None, shown[-500:]
    found = json.loads(said[1].replace("&lt;", "<").replace("&gt;", ">"))
    assert found["cut"] == []
    assert found["dismiss"] == found["fox"] == 1, "a word is not broken up to make room for others"
