"""The page of `clipcil serve` in a real browser, as a person uses it: one story, told in the order of the tests."""

import json
import shutil
import subprocess
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from support.browser import CHROMIUM, DRIVER, MISSING, Browser
from support.lessons import pictures, write_tree
from support.server import Server, png, running

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)

TAB, ENTER, ESCAPE, SHIFT = "\ue004", "\ue007", "\ue00c", "\ue008"
EVIL = "<img src=x onerror=\"document.title='taken over'\">"
LONG = "averyveryverylongnamewithoutanyblanksthatgoesonandon" * 3
TEACH = "document.getElementById('teach-button')"
OUTCOME = "document.getElementById('outcome')"
CARD = "[...document.querySelectorAll('.class-name')].find(each => each.textContent === %s).closest('.class-card')"
READY = "'ready' in document.documentElement.dataset"
CARDS = "[...document.querySelectorAll('.class-name')].map(each => each.textContent).sort()"
FOCUS = "return document.activeElement.getAttribute('aria-label') || document.activeElement.textContent.trim()"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    write_tree(root / "first", pictures(["fox", "owl"]))
    (root / "first" / "fox" / "broken.png").write_bytes(b"\x89PNG not really")
    (root / "first" / "notes.txt").write_text("no picture")
    write_tree(root / "later", pictures(["rocket"]))
    write_tree(root / "new", pictures(["fox", "owl", "rocket"], test=True))
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with running(folder / "model", folder / "cache", method="simplecil") as found:
        yield found


@pytest.fixture(scope="module")
def browser(server: Server, folder: Path) -> Iterator[Browser]:
    with Browser("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream") as opened:
        opened.cdp("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder / "downloads")})
        show(opened, server)
        yield opened


@pytest.fixture(autouse=True)
def own_console(browser: Browser) -> None:
    """A test reads its own messages: a picture taken out while its thumbnail loads leaves a 404 to the next test."""
    browser.console()


def show(
    browser: Browser, server: Server, width: int = 1440, scheme: str = "light", path: str = "", height: int = 900
) -> None:
    browser.show(f"{server.address}/{path}", width, height, scheme)
    browser.wait(READY)


def click(browser: Browser, selector: str, text: str = "", card: str = "") -> None:
    """Press the first such element with `text` in it, on the page or on the card of a class."""
    place = CARD % json.dumps(card) if card else "document"
    script = "[...%s.querySelectorAll(%s)].find(each => each.textContent.includes(%s)).click()"
    browser.run(script % (place, json.dumps(selector), json.dumps(text)))


def wait_for_thumbnails(browser: Browser, count: int) -> None:
    browser.wait(f"document.querySelectorAll('.thumbs img').length === {count}")


def teach(browser: Browser, learnt: str) -> None:
    browser.wait("!document.getElementById('teach-button').disabled")
    click(browser, "#teach-button")
    browser.wait(f"document.querySelector('#outcome .chips')?.textContent.includes({json.dumps(learnt)})")
    browser.wait("document.querySelector('#progress').hidden")


def colour(browser: Browser, name: str) -> str:
    """The colour of a class on its card."""
    return str(browser.run(f"return getComputedStyle({CARD % json.dumps(name)}.querySelector('.dot')).backgroundColor"))


def verdict(browser: Browser, path: Path) -> str:
    """Drop a picture and wait for the answer to it, not to one before it."""
    before = json.dumps(browser.run("return document.getElementById('try-picture').src"))
    browser.drop("#try-stage", path)
    shown = "document.getElementById('try-picture').src"
    browser.wait(f"{shown} !== {before} && document.getElementById('answer').dataset.picture === {shown}")
    return str(browser.run("return document.querySelector('.bars .name').textContent"))


def answer_dialog(browser: Browser, text: str | None = None) -> None:
    browser.wait("document.getElementById('dialog').open")
    if text is not None:
        browser.run(f"document.getElementById('dialog-input').value = {json.dumps(text)}")
    click(browser, "#dialog-yes")
    browser.wait("!document.getElementById('dialog').open")


def test_two_classes_by_dropping_a_folder_of_folders(browser: Browser, server: Server, folder: Path) -> None:
    browser.drop("#drop-many", folder / "first")
    browser.wait("document.getElementById('toasts').textContent.includes('1 file skipped')")  # shown for a while only
    wait_for_thumbnails(browser, 12)
    assert browser.wait("[...document.querySelectorAll('.thumbs img')].every(each => each.naturalWidth > 30)")
    assert browser.run(f"return {CARDS}") == ["fox", "owl"]
    assert "broken.png" in browser.run("return document.querySelector('.broken').textContent")
    click(browser, ".thumbs button", card="owl")  # taken out again
    wait_for_thumbnails(browser, 11)
    teach(browser, "fox")
    assert sorted(server.classes) == ["fox", "owl"]
    said = browser.run("return document.querySelector('.teach-card').innerText")
    assert said.startswith("Learnt") or "%" in said.splitlines()[0], f"the result stands at the top, not {said}"
    chips = "[...document.querySelectorAll('#outcome .chip')]"
    colours = f"{chips}.map(each => getComputedStyle(each.querySelector('.dot')).backgroundColor)"
    names = browser.run(f"return {chips}.map(each => each.textContent.split(' · ')[0])")
    assert browser.run(f"return {colours}") == [colour(browser, name) for name in names]
    assert colour(browser, "fox") != colour(browser, "owl")
    assert "classified correctly" in browser.run("return document.getElementById('outcome').textContent")
    assert verdict(browser, folder / "new" / "owl" / "0.png") == "owl"
    assert browser.console() == []


def test_a_third_class_when_the_first_pictures_are_gone(browser: Browser, server: Server, folder: Path) -> None:
    shutil.rmtree(folder / "first")
    assert not list((folder / "cache" / "serve").rglob("*.picture")), "the server kept no picture either"
    browser.drop("#drop-many", folder / "later" / "rocket")  # a folder of pictures is one class
    teach(browser, "rocket")
    for name in ("fox", "owl", "rocket"):
        assert verdict(browser, folder / "new" / name / "0.png") == name
    browser.wait("document.querySelectorAll('.lessons li').length === 2")
    assert "0\u00a0%" in browser.run(
        "return [...document.querySelectorAll('.curve text')].map(each => each.textContent)"
    )
    points = "[...document.querySelectorAll('.curve .grid')].map(each => Number(each.getAttribute('y1')))"
    bottom, middle, top = browser.run(f"return {points}")
    assert bottom - middle == middle - top > 0


def test_a_mistake_is_put_right_with_one_click(browser: Browser, server: Server, folder: Path) -> None:
    verdict(browser, folder / "new" / "owl" / "0.png")
    browser.wait("document.querySelector('#correct .chip')")
    click(browser, "#correct .chip", "rocket")
    browser.wait("document.querySelectorAll('.lessons li').length === 3")
    browser.wait("document.querySelector('#outcome .chips')?.textContent.includes('rocket · 1 more')")
    assert server.waiting == {}
    # It waits where other pictures do: these may not be complete.
    server.add("fox", [("new.png", (folder / "new" / "fox" / "1.png").read_bytes())])
    wait_for_thumbnails(browser, 1)
    verdict(browser, folder / "new" / "rocket" / "0.png")
    browser.wait("document.querySelector('#correct .chip')")
    click(browser, "#correct .chip", "owl")
    wait_for_thumbnails(browser, 2)
    assert server.waiting == {"fox": 1, "owl": 1} and len(server.model["lessons"]) == 3
    for name in server.waiting:
        server.call("DELETE", "/api/waiting", name=name)
    wait_for_thumbnails(browser, 0)


def test_undo_rename_forget(browser: Browser, server: Server, folder: Path) -> None:
    browser.wait("document.getElementById('undo-button').textContent === 'Undo the last lesson'")
    assert not browser.run(f"return {OUTCOME}.hidden")
    click(browser, "#undo-button")
    answer_dialog(browser)
    browser.wait("document.querySelectorAll('.lessons li').length === 2")
    browser.wait(f"{OUTCOME}.hidden")  # its accuracy was that of another model
    click(browser, ".menu-list button", "Rename", card="fox")
    answer_dialog(browser, EVIL)
    browser.wait(f"{CARDS}.includes({json.dumps(EVIL)})")
    assert EVIL in server.classes
    assert browser.run("return document.querySelector('img[src=x]')") is None, "a name is text"
    server.add("owl", [("new.png", (folder / "new" / "owl" / "1.png").read_bytes())])
    teach(browser, "owl · 1 more")
    colours = [colour(browser, name) for name in ("owl", "rocket")]
    click(browser, ".menu-list .bad", card=EVIL)
    browser.wait("document.getElementById('dialog').open")
    assert len(server.classes) == 3, "it is asked first"
    answer_dialog(browser)
    browser.wait(f"!{CARDS}.includes({json.dumps(EVIL)})")
    browser.wait("document.getElementById('undo-button').textContent === 'Undo the last change'")
    for back in (True, False):
        click(browser, "#undo-button")
        answer_dialog(browser)
        browser.wait(f"{CARDS}.includes({json.dumps(EVIL)}) === {json.dumps(back)}")
    assert server.classes == ["owl", "rocket"]
    browser.wait(f"{OUTCOME}.hidden")
    assert colours == [colour(browser, name) for name in ("owl", "rocket")]
    assert "taken over" not in browser.run("return document.title")


def test_export_and_model_to_download(browser: Browser, folder: Path) -> None:
    for button, name, inside in (("#download", "model", "model.toml"), ("#export", "pt2", "model.pt2")):
        click(browser, button)
        file, end = folder / "downloads" / f"model-{name}.zip", time.monotonic() + 180
        while not file.is_file():
            assert time.monotonic() < end, file
            time.sleep(0.1)
        with zipfile.ZipFile(file) as packed:
            assert inside in packed.namelist()


def test_the_camera_shoots_while_the_key_is_held(browser: Browser, server: Server) -> None:
    click(browser, "button[title=Camera]", card="owl")
    browser.wait("document.activeElement.classList.contains('shoot')")
    browser.wait("document.querySelector('.camera-box video').videoWidth > 0")
    browser.keys(" ", hold=0.7)
    browser.wait(
        "document.querySelectorAll('.thumbs img').length >= 2 && !document.getElementById('teach-button').disabled"
    )
    click(browser, "button[title=Camera]", card="owl")
    click(browser, "#try-camera")
    assert browser.wait("document.querySelector('.bars .name')?.textContent") in ("owl", "rocket")
    click(browser, "#try-camera")
    click(browser, ".menu-list button", "Take all", card="owl")
    wait_for_thumbnails(browser, 0)


def test_the_camera_shoots_while_the_pointer_is_down(browser: Browser, server: Server) -> None:
    """Also once the pictures have moved the button away from under the pointer."""
    show(browser, server, 1280, height=720)
    browser.keys(TAB + TAB + "new" + ENTER)
    click(browser, "button[title=Camera]", card="new")
    browser.wait("document.querySelector('.camera-box video')?.videoWidth > 0")
    script = "const box = document.querySelector('.shoot').getBoundingClientRect(); return [box.x, box.y]"
    x, y = browser.run(script)
    pointer = {"button": "left", "buttons": 1, "clickCount": 1}
    browser.cdp("Input.dispatchMouseEvent", {"type": "mousePressed", "x": x + 20, "y": y + 10, **pointer})
    browser.cdp("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 5, "y": 5, **pointer})
    browser.wait("document.querySelectorAll('.thumbs img').length >= 4")
    browser.cdp("Input.dispatchMouseEvent", {"type": "mouseReleased", "x": 5, "y": 5, **pointer})
    browser.wait(f"document.querySelector('.pill').textContent.endsWith('waiting') && !{TEACH}.disabled")
    shot = sum(server.waiting.values())
    time.sleep(0.8)
    assert sum(server.waiting.values()) == shot, "it stops when the pointer is let go"
    click(browser, "button[title=Camera]", card="new")
    click(browser, ".menu-list button", "Take all", card="new")
    wait_for_thumbnails(browser, 0)


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_messages_cover_no_button(browser: Browser, server: Server, width: int, height: int) -> None:
    show(browser, server, width, height=height)
    browser.run("document.getElementById('download').scrollIntoView({block: 'end'})")
    for number in (1, 2):
        click(browser, "#keep-small")
        browser.wait(f"document.querySelectorAll('.toast').length === {number}")
        covered = """const place = (each) => each.getBoundingClientRect();
            const shown = [...document.querySelectorAll('.toast')].map(place);
            const over = (box) => shown.some(toast => toast.bottom > box.top && box.bottom > toast.top);
            return [...document.querySelectorAll('#tools button, .tabs a')].filter(each => over(place(each))).length"""
        assert browser.run(covered) == 0


def tab_to(browser: Browser, wanted: str) -> None:
    for _ in range(60):
        if wanted in browser.run(FOCUS):
            return
        browser.keys(TAB)
    raise AssertionError(f"the Tab key never reaches {wanted}")


def test_by_keyboard_alone(browser: Browser, server: Server) -> None:
    show(browser, server)
    browser.keys(TAB)
    assert "Skip" in browser.run(FOCUS)
    browser.keys(TAB)
    browser.keys("pizza" + ENTER)
    assert browser.run(FOCUS) == "Add pictures to pizza", "the new class is at hand at once"
    colours = ("red", "tomato", "gold", "salmon", "crimson", "orange")
    server.add("pizza", [(f"{i}.png", png(Image.new("RGB", (64, 64), name))) for i, name in enumerate(colours)])
    wait_for_thumbnails(browser, 6)
    tab_to(browser, "Take out 0.png")
    browser.keys(ENTER)
    wait_for_thumbnails(browser, 5)
    assert "Take out" in browser.run(FOCUS), "focus stays among the pictures"
    tab_to(browser, "More for owl")
    browser.keys(ENTER)
    tab_to(browser, "Rename")
    browser.keys(ENTER)
    browser.wait("document.activeElement.id === 'dialog-input'")
    browser.keys(ESCAPE)
    browser.wait("!document.getElementById('dialog').open")
    assert browser.run(FOCUS) == "More for owl", "focus returns to where it was"
    tab_to(browser, "Teach")
    browser.keys(ENTER)
    browser.wait("document.querySelector('#outcome .chips')?.textContent.includes('pizza')")
    browser.wait("document.activeElement.id === 'outcome'")
    assert "pizza" in server.classes


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 900, 375])
def test_every_width_in_light_and_dark(browser: Browser, server: Server, folder: Path, width: int, scheme: str) -> None:
    server.add(LONG, [("0.png", (folder / "new" / "fox" / "0.png").read_bytes()), (f"{LONG}.png", b"x")])
    show(browser, server, width, scheme)
    verdict(browser, folder / "new" / "owl" / "0.png")
    browser.wait("document.querySelector('.broken')")
    assert browser.run("return document.documentElement.scrollWidth") <= width
    cut = "[...document.querySelectorAll('.class-words p, .note, .broken')].filter(e => e.scrollWidth > e.clientWidth)"
    assert browser.run(f"return {cut}.map(e => e.className)") == [], "a long name is broken, not cut off"
    server.call("DELETE", "/api/waiting", name=LONG)
    places = "[...document.querySelectorAll('.column')].map(each => Math.round(each.getBoundingClientRect().x))"
    assert browser.run(f"return new Set({places}).size") == {1440: 3, 900: 2, 375: 1}[width]
    red = "Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert (browser.run(f"return {red}") > 200) == (scheme == "light")
    assert browser.console() == []


@pytest.mark.parametrize("width", [1280, 390])
def test_many_classes_are_rows(browser: Browser, server: Server, folder: Path, width: int) -> None:
    picture = (folder / "new" / "fox" / "0.png").read_bytes()
    show(browser, server, width, height=720)
    height = f"{CARD % json.dumps('owl')}.offsetHeight"
    before = browser.run(f"return {height}")
    for number in range(12):
        server.add(f"class {number}", [("a.png", picture)])
    wait_for_thumbnails(browser, 12)
    assert browser.run(f"return {height}") < 0.7 * before
    colours = [colour(browser, name) for name in browser.run(f"return {CARDS}")]
    assert len(set(colours)) == len(colours) > 13
    assert browser.run("return document.documentElement.scrollWidth") <= width
    for number in range(12):
        server.call("DELETE", "/api/waiting", name=f"class {number}")
    wait_for_thumbnails(browser, 0)


def test_every_address_is_described(browser: Browser, server: Server) -> None:
    show(browser, server, path="docs")
    assert browser.run("return document.querySelectorAll('#operations h2').length") >= 18
    described = browser.run("return document.getElementById('operations').textContent")
    assert "text/event-stream" in described and "image/jpeg" in described and '"pictures": [' in described
    assert browser.console() == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The source of axe-core, fetched for the moment of the test."""
    if not shutil.which("npm"):
        pytest.skip("needs npm, to fetch axe-core")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", "axe-core@4"]
    if subprocess.run(command, capture_output=True, timeout=120).returncode:
        pytest.skip("axe-core cannot be fetched with npm here")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 375])
def test_accessibility_audit(browser: Browser, server: Server, folder: Path, axe: str, width: int, scheme: str) -> None:
    for path in ("", "docs"):
        show(browser, server, width, scheme, path)
        if not path:
            server.add("owl", [("0.png", (folder / "new" / "owl" / "0.png").read_bytes()), ("bad.png", b"x")])
            wait_for_thumbnails(browser, 1)
            verdict(browser, folder / "new" / "owl" / "0.png")
        browser.run(axe + "; window.axe = axe")
        browser.run("window.found = null; axe.run().then(result => { window.found = result.violations })")
        broken = browser.wait("window.found && [window.found]")[0]
        assert [(each["id"], [node["target"] for node in each["nodes"]]) for each in broken] == []
    server.call("DELETE", "/api/waiting", name="owl")


def test_from_nothing_to_an_explained_answer_with_example_pictures(
    browser: Browser, server: Server, folder: Path
) -> None:
    """And when the server dies, the page says how to start it, and goes on once it is there again."""
    model, cache = folder / "examples", folder / "examples-cache"
    with running(model, cache, method="simplecil") as demo:
        show(browser, demo, 1280, height=720)
        click(browser, "#keep-small")
        browser.wait("document.querySelector('.toast')")
        click(browser, "#examples button")
        wait_for_thumbnails(browser, 18)
        teach(browser, "pizza")
        browser.wait("document.querySelectorAll('.kept img').length === 18")
        click(browser, "#samples button[data-name=pizza]")
        assert browser.wait("document.querySelector('.verdict')?.textContent") == "pizza"
        click(browser, "#why button")
        browser.wait("document.querySelectorAll('#why figure img').length === 2")
        assert browser.wait("[...document.querySelectorAll('#why img')].every(each => each.naturalWidth > 30)")
        click(browser, "#examples button")
        teach(browser, "fox")
        assert sorted(demo.classes) == ["apple", "banana", "dolphin", "fox", "pizza"]
        # Two classes that look the same are confused, and are shown so.
        red = [png(Image.new("RGB", (side, side), "red")) for side in range(40, 52)]
        demo.teach({"red": red[:6], "scarlet": red[6:]})
        browser.wait("document.querySelector('.confused')?.textContent.includes('scarlet')")
        assert browser.wait(
            "[...document.querySelectorAll('.confused .looks img')].every(each => each.naturalWidth > 0)"
        )
        assert browser.run("return document.querySelectorAll('.confused .looks').length") >= 2
        assert [each for each in browser.console() if "/thumbnail?" not in each["message"]] == [], "see `own_console`"
        demo.add("fox", [("new.png", (folder / "new" / "fox" / "0.png").read_bytes())])
        wait_for_thumbnails(browser, 1)
        demo.kill()
        assert "clipcil serve" in browser.wait(
            "!document.getElementById('lost').hidden && document.getElementById('lost').textContent"
        )
        assert browser.run(f"return {TEACH}.disabled")
    with running(model, cache, port=demo.port):
        browser.wait("document.getElementById('lost').hidden")
        wait_for_thumbnails(browser, 0)
    sent = [url for url in browser.requests() if not url.startswith(("blob:", "data:", "about:", "chrome:"))]
    assert len(sent) > 60
    assert {url for url in sent if not url.startswith((f"{server.address}/", f"{demo.address}/"))} == set(), "all tests"
