"""What the page takes for one class, run by Node.js without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clipcil.data import reader
from clipcil.data.names import same_name
from clipcil.data.sources import SUFFIXES
from clipcil.serve.server import STATIC

NODE = shutil.which("node")
SCRIPT = """
import { readFileSync } from "node:fs";
import { allClasses, cleaned, loadModel, same, store } from "./store.js";
const said = {};
said.cleaned = ["my_dog", "  a \\t b_ ", "cafe\\u0301", "_"].map(cleaned);
said.same = [same("My_Dog", "my dog"), same("a  b", "a b"), same("a", "b")];
said.pairs = JSON.parse(readFileSync("pairs.json")).filter(([one, other]) => !same(one, other));
store.added = ["my dog", "new one"];
globalThis.fetch = async () => ({ ok: true, json: async () => ({ classes: [{ name: "My dog" }] }) });
await loadModel();
said.known = allClasses().map((each) => each.name);
globalThis.fetch = async () => ({ ok: true, json: async () => ({ classes: [{ name: "our cat" }] }) });
await loadModel();
said.renamed = allClasses().map((each) => each.name);
console.log(JSON.stringify(said));
"""


def names_that_are_one() -> list[tuple[str, str]]:
    """Names of one strange letter that are one class for the server, letters inside a word and at its end."""
    found: dict[str, str] = {}
    letters = map(chr, (*range(0x20, 0xD800), *range(0xE000, 0x20000)))
    names = (f"x{letter}{end}" for letter in letters for end in ("", "y"))
    return [(first, name) for name in names if (first := found.setdefault(same_name(name), name)) != name]


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_names_as_the_server_has_them(tmp_path: Path) -> None:
    for name in ("api.js", "store.js"):
        shutil.copy(STATIC / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text(SCRIPT)
    (tmp_path / "pairs.json").write_text(json.dumps(names_that_are_one()))
    done = subprocess.run([str(NODE), "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(done.stdout)
    assert said["cleaned"] == ["my dog", "a b", "café", ""]
    assert said["same"] == [True, True, False]
    assert said["pairs"] == [], "one class for the server is one card"
    assert said["known"] == ["My dog", "new one"]
    assert said["renamed"] == ["our cat", "new one"], "the card of the old name is gone"


def test_what_learning_takes_for_pictures_the_page_takes_too() -> None:
    """Not every browser knows the kinds of all of these."""
    endings = re.search(r"const PICTURE = /(.*)/i;", (STATIC / "files.js").read_text(encoding="utf-8"))
    assert endings is not None
    assert [ending for ending in (*SUFFIXES, ".heic") if not re.search(endings[1], f"a{ending}")] == []


def test_every_stage_of_reading_has_words() -> None:
    """The stages that readers of pictures report are told in words on the page."""
    words = (STATIC / "teach.js").read_text(encoding="utf-8")
    found = set(re.findall(r'on_progress\("(\w+)"', Path(str(reader.__file__)).read_text(encoding="utf-8")))
    assert found == {"preprocess", "encode"}
    for stage in found:
        assert re.search(rf"\b{stage}: \"", words), stage


def test_small_pictures_have_another_address_after_every_lesson() -> None:
    """Else the page goes on to show those that a lesson has replaced: an element whose address is the same is kept."""
    page = (STATIC / "classes.js").read_text(encoding="utf-8")
    address = re.search(r"/api/classes/picture\?\$\{new URLSearchParams\(\{(.*?)\}\)", page)
    assert address is not None and "revision: store.model.revision" in address[1]


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Tokyo"])
def test_a_day_is_shown_as_that_day_everywhere(zone: str, tmp_path: Path) -> None:
    """The model has days without a time, which a browser would take for midnight in Greenwich."""
    shutil.copy(STATIC / "dom.js", tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text('import { day } from "./dom.js";\nconsole.log(day("2001-02-03"), "|", day(""));')
    told = subprocess.run(
        [str(NODE), "run.js"], cwd=tmp_path, env={"TZ": zone, "LANG": "en_GB.UTF-8"}, capture_output=True, text=True
    )
    assert "3" in told.stdout and "2 Feb" not in told.stdout and told.stdout.strip().endswith("|"), told
