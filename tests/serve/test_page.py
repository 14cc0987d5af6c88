"""What the page takes for one class, for a picture and for a day: its scripts, run by Node.js without a server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from clipcil.data.names import same_name
from clipcil.data.sources import SUFFIXES
from clipcil.serve.server import STATIC

NODE = shutil.which("node")
NAMES = """
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

COLOURS = """
let names = ["apple", "banana", "pizza", "dolphin", "fox"];
globalThis.fetch = async () => ({ ok: true, json: async () => ({ classes: names.map((name) => ({ name })) }) });
const { loadModel, slotOf } = await import("./store.js");
const after = async (now) => { names = now; await loadModel(); return names.map(slotOf); };
const said = { few: await after(names) };
said.renamed = await after(["apple", "plantain", "pizza", "dolphin", "fox"]);
said.forgotten = await after(["apple", "pizza", "dolphin", "fox"]);
const fresh = await import("./store.js?again");
names = ["apple", "banana", "pizza", "dolphin", "fox"];
await fresh.loadModel();
said.reloaded = names.map(fresh.slotOf);
said.many = await after(Array.from({ length: 40 }, (_, number) => `class ${number}`));
console.log(JSON.stringify(said));
"""


def source(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def run_node(folder: Path, script: str, *modules: str, **environment: str) -> str:
    """What a script prints that imports modules of the page."""
    for name in modules:
        shutil.copy(STATIC / name, folder)
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "run.js").write_text(script)
    command = [str(NODE), "run.js"]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_the_page_and_the_server_agree_on_equal_names(tmp_path: Path) -> None:
    found: dict[str, str] = {}
    letters = map(chr, (*range(0x20, 0xD800), *range(0xE000, 0x20000)))
    names = (f"x{letter}{end}" for letter in letters for end in ("", "y"))
    pairs = [(first, name) for name in names if (first := found.setdefault(same_name(name), name)) != name]
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    said = json.loads(run_node(tmp_path, NAMES, "api.js", "dom.js", "store.js"))
    assert said["cleaned"] == ["my dog", "a b", "café", ""]
    assert said["same"] == [True, True, False]
    assert said["pairs"] == [], "one class for the server is one card"
    assert said["known"] == ["My dog", "new one"]
    assert said["renamed"] == ["our cat", "new one"], "the card of the old name is gone"


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
def test_a_class_keeps_its_colour_and_shares_it_with_none(tmp_path: Path) -> None:
    """Whatever is renamed and forgotten."""
    said = json.loads(run_node(tmp_path, COLOURS, "api.js", "dom.js", "store.js"))
    few, reloaded, renamed, forgotten, many = (
        said["few"],
        said["reloaded"],
        said["renamed"],
        said["forgotten"],
        said["many"],
    )
    assert few == reloaded == renamed
    assert forgotten == few[:1] + few[2:]
    assert len(set(many)) == 40
    hues = sorted(slot % 24 for slot in few)
    assert min((b - a) % 24 for a, b in zip(hues, hues[1:] + hues[:1], strict=True)) >= 4, "few classes differ clearly"


@pytest.mark.skipif(NODE is None, reason="needs Node.js")
@pytest.mark.parametrize("zone", ["America/Los_Angeles", "Asia/Tokyo"])
def test_a_day_is_shown_as_that_day_everywhere(zone: str, tmp_path: Path) -> None:
    """The model has days without a time, which a browser would take for midnight in Greenwich."""
    script = 'import { day } from "./dom.js";\nconsole.log(day("2001-02-03"), "|", day(""));'
    told = run_node(tmp_path, script, "dom.js", TZ=zone, LANG="en_GB.UTF-8")
    assert "3" in told and "2 Feb" not in told and told.strip().endswith("|"), told


def test_what_learning_takes_for_pictures_the_page_takes_too() -> None:
    """Not every browser knows the kinds of all of these."""
    endings = re.search(r"const PICTURE = /(.*)/i;", source("files.js"))
    assert endings is not None
    assert [ending for ending in (*SUFFIXES, ".heic") if not re.search(endings[1], f"a{ending}")] == []
