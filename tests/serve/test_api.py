"""The API as a program uses it, from an empty model to one that was taught, changed and carried elsewhere.

The tests of this file tell one story on one server, in the order in which they stand.
"""

import base64
import io
import json
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from support.server import Server, form, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server on a model that does not exist yet, without training, so that a lesson takes a moment."""
    folder = tmp_path_factory.mktemp("served")
    with running(folder / "model", folder / "cache", method="simplecil") as found:
        yield found


def test_before_the_first_lesson(server: Server, emoji: dict[str, list[bytes]]) -> None:
    assert server.call("GET", "/api/health").json()["status"] == "ok"
    assert server.model["exists"] is False and server.model["method"] == "simplecil"
    asks = ("POST /api/predict", "POST /api/explain")
    for call in (*asks, "POST /api/lesson", "DELETE /api/lesson", "POST /api/undo", "GET /api/export"):
        answer = server.call(*call.split(), body=emoji["fox"][0] if call in asks else None)
        assert answer.status_code == 409 and "\n" not in answer.json()["error"], call
    for wanted in (True, False):
        assert server.call("PATCH", "/api/settings", {"keep_small_pictures": wanted}).status_code == 200
        assert server.model["keep_small_pictures"] is wanted
        assert not (Path(server.model["folder"]) / "small-pictures").exists()
    for call, status in (("GET /api/nothing", 404), ("PUT /api/undo", 405), ("HEAD /api/events", 405)):
        assert server.call(*call.split()).status_code == status


def test_example_pictures_are_those_of_emoji(
    server: Server, emoji: dict[str, list[bytes]], fresh_emoji: dict[str, bytes]
) -> None:
    for index, expected in enumerate([*emoji["fox"], fresh_emoji["fox"]]):
        found = server.call("GET", "/api/examples/picture", name="fox", index=index)
        assert found.headers["Content-Type"] == "image/png"
        assert Image.open(io.BytesIO(found.content)).convert("RGB") == Image.open(io.BytesIO(expected)).convert("RGB")
    for place in ({"name": "fox", "index": 8}, {"name": "../fox", "index": 0}):
        assert server.call("GET", "/api/examples/picture", **place).status_code == 404


def test_what_waits(server: Server, emoji: dict[str, list[bytes]]) -> None:
    broken = emoji["fox"][1][:200]
    answer = server.add("fox", [("a.png", emoji["fox"][0]), ("b.png", broken), ("again.png", emoji["fox"][0])])
    first, second, third = answer.json()["pictures"]
    assert first["broken"] is None and second["broken"]
    assert third["id"] == first["id"], "the same picture waits once"
    small = server.call("GET", "/api/waiting/thumbnail", id=first["id"])
    assert small.headers["Content-Type"] == "image/jpeg" and small.headers["Cache-Control"] == "no-store"
    assert server.call("GET", "/api/waiting/thumbnail", id=second["id"]).status_code == 404
    assert server.call("DELETE", "/api/waiting", id=first["id"]).status_code == 200
    assert server.call("DELETE", "/api/waiting", id=first["id"]).status_code == 404
    assert server.waiting == {"fox": 1}
    assert server.call("DELETE", "/api/waiting", name="FOX").status_code == 200
    assert server.waiting == {}


def test_one_class_then_a_second_and_a_third(
    server: Server, emoji: dict[str, list[bytes]], fresh_emoji: dict[str, bytes]
) -> None:
    events: list[str] = []
    listening = threading.Thread(target=_listen, args=(server, events), daemon=True)
    listening.start()
    alone, model = server.teach({"fox": emoji["fox"]}), server.model
    for about in (alone["result"], model, *model["lessons"], *model["classes"]):
        assert about["accuracy"] is None and about["held_out"] == 1, "one class is always right, which says nothing"
    state = server.teach({"owl": emoji["owl"]})
    assert server.model["lesson"] == state["id"]
    assert state["state"] == "done" and state["result"]["new"] == {"owl": 6}
    assert state["result"]["held_out"] == 2 and state["result"]["accuracy"] is not None
    listening.join(30)
    assert {"lesson", "model", "waiting"} <= {line.split(": ")[1] for line in events if line.startswith("event")}
    assert events[:2] == ["event: lesson", "data: null"], "a page that was open when a server died hears so"
    assert server.waiting == {}
    assert server.predict(fresh_emoji["fox"])["classes"][0]["name"] == "fox"
    state = server.teach({"rocket": emoji["rocket"], "Fox": [fresh_emoji["fox"], emoji["fox"][0]]})
    assert state["result"]["new"] == {"rocket": 6} and list(state["result"]["again"].values()) == [1]
    assert state["result"]["repeated"] == 1, "a picture that was taught before is recognised"
    for name in ("fox", "owl", "rocket"):
        found = server.predict(fresh_emoji[name], top=3)
        assert found["classes"][0]["name"] == name
        assert sum(each["probability"] for each in found["classes"]) == pytest.approx(1, abs=1e-6)
    assert [each["classes"] for each in server.model["lessons"]] == [1, 2, 3]
    assert server.classes == ["fox", "owl", "rocket"]


def _listen(server: Server, events: list[str]) -> None:
    with server.client.stream("GET", "/api/events") as answer:
        for line in answer.iter_lines():
            events.append(line)
            if '"state":"done"' in line:
                break


def test_many_clients_each_get_their_own_answer(server: Server, emoji: dict[str, list[bytes]]) -> None:
    everything = [picture for name in ("fox", "owl", "rocket") for picture in emoji[name]]
    alone = [server.predict(picture, top=3) for picture in everything]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda picture: server.predict(picture, top=3), everything * 2))
    files = form([("x.png", picture) for picture in everything])
    files.insert(1, *form([("broken", b"not a picture")]))
    in_one = server.client.post("/api/predict?top=3", files=files).json()["predictions"]
    broken = in_one.pop(1)
    assert broken["error"] and not broken["classes"] and not any(each["error"] for each in in_one)
    for each, expected in zip([*together, *in_one], alone * 3, strict=True):
        assert [c["name"] for c in each["classes"]] == [c["name"] for c in expected["classes"]]
        for mine, theirs in zip(each["classes"], expected["classes"], strict=True):
            assert mine["probability"] == pytest.approx(theirs["probability"], abs=1e-4)


def test_rename_and_forget(server: Server, emoji: dict[str, list[bytes]], fresh_emoji: dict[str, bytes]) -> None:
    server.teach({"tiger": emoji["tiger"]})
    before = server.predict(fresh_emoji["fox"])["classes"][0]
    # As `curl -d` sends it: JSON that is said to be a form.
    body, kind = json.dumps({"name": "red_fox"}).encode(), "application/x-www-form-urlencoded"
    assert server.call("PATCH", "/api/classes", body, kind, name="fox").json() == {"name": "red fox"}
    assert server.predict(fresh_emoji["fox"])["classes"][0] == {**before, "name": "red fox"}
    assert server.model["lesson"] is None, "what the last lesson says is not about this model"
    assert server.call("PATCH", "/api/classes", {"name": "OWL"}, name="red fox").status_code == 400
    assert server.call("DELETE", "/api/classes", name="fox").status_code == 400
    assert server.call("DELETE", "/api/classes", name="tiger").status_code == 200
    assert server.classes == ["red fox", "owl", "rocket"]


def test_undo_goes_back_one_change(server: Server, emoji: dict[str, list[bytes]]) -> None:
    for expected in (["red fox", "owl", "rocket", "tiger"], ["red fox", "owl", "rocket"]):  # the forgotten one and back
        assert server.call("POST", "/api/undo").status_code == 200
        assert server.classes == expected
    result = server.teach({"tiger": [*emoji["owl"][:3], *emoji["tiger"]]})["result"]
    assert result["warnings"] and not any("/" in line for line in result["warnings"]), "a picture goes by its title"
    model = server.model
    assert len(model["classes"]) == 4 and model["previous"]["classes"] == 3
    assert server.call("POST", "/api/undo").status_code == 200
    assert server.classes == ["red fox", "owl", "rocket"]
    assert len(server.model["lessons"]) == len(model["lessons"]) - 1
    # Pictures that wait follow a rename and its undo.
    assert server.add("owl", [("a.png", emoji["owl"][0])]).status_code == 201
    server.call("PATCH", "/api/classes", {"name": "barn owl"}, name="owl")
    assert server.waiting == {"barn owl": 1}
    server.call("POST", "/api/undo")
    assert server.classes == ["red fox", "owl", "rocket"] and server.waiting == {"owl": 1}
    server.call("DELETE", "/api/waiting", name="owl")


def test_download_upload_and_export(server: Server, tmp_path: Path, fresh_emoji: dict[str, bytes]) -> None:
    model = server.call("GET", "/api/model/download")
    assert 'filename="model-model.zip"' in model.headers["Content-Disposition"]
    names = zipfile.ZipFile(io.BytesIO(model.content)).namelist()
    assert {"model.toml", "README.md"} < set(names) and len(names) == 3
    with running(tmp_path / "copy", tmp_path / "cache") as other:
        assert other.call("POST", "/api/model/upload", model.content, "application/zip").status_code == 200
        assert other.classes == server.classes
        assert other.predict(fresh_emoji["owl"]) == server.predict(fresh_emoji["owl"])
        exported = other.call("GET", "/api/export")
        with zipfile.ZipFile(io.BytesIO(exported.content)) as packed:
            assert {"model.pt2", "classes.json"} <= set(packed.namelist())
            assert json.loads(packed.read("classes.json"))["classes"] == server.classes
        end = time.monotonic() + 30
        while left := [path for path in (tmp_path / "cache" / "serve").rglob("*") if path.is_file()]:
            assert time.monotonic() < end, f"a file that was sent is not deleted: {left}"
            time.sleep(0.05)  # it is deleted after its last byte was sent


def test_an_answer_is_explained(server: Server, fresh_emoji: dict[str, bytes]) -> None:
    found = server.call("POST", "/api/explain", fresh_emoji["owl"], "image/png").json()
    assert found["name"] == server.predict(fresh_emoji["owl"])["name"] and found["similar"] is None
    kind, _, picture = found["heatmap"].partition(",")
    assert kind == "data:image/png;base64" and Image.open(io.BytesIO(base64.b64decode(picture))).format == "PNG"
    assert server.call("POST", "/api/explain", b"no picture", "image/png").status_code == 400


def test_everything_is_described(server: Server) -> None:
    described = server.call("GET", "/api/openapi.json").json()
    assert described["openapi"].startswith("3.1") and len(described["paths"]) >= 12
    for path, methods in described["paths"].items():
        for method in {"get", "post", "put", "patch", "delete"} - set(methods):
            assert server.call(method.upper(), path).status_code == 405, (path, method)
    for path in ("/api/health", "/api/model", "/api/waiting"):
        answer = described["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        schema = described["components"]["schemas"][answer["schema"]["$ref"].split("/")[-1]]
        assert set(schema["properties"]) == set(server.call("GET", path).json()), path
    assert "/static/docs.js" in server.call("GET", "/docs").text


def test_small_pictures_follow_the_model(server: Server, emoji: dict[str, list[bytes]]) -> None:
    def counts() -> dict[str, int]:
        return {each["name"]: each["small_pictures"] for each in server.model["classes"] if each["small_pictures"]}

    small = Path(server.model["folder"]) / "small-pictures"
    assert not small.exists(), "none are kept until it is switched on"
    assert server.call("PATCH", "/api/settings", {"keep_small_pictures": True}).json() == {"keep_small_pictures": True}
    server.teach({"lion": emoji["tiger"]})
    assert server.call("GET", "/api/classes/picture", name="lion", index=5).content[:2] == b"\xff\xd8"
    assert server.call("GET", "/api/classes/picture", name="lion", index=6).status_code == 404
    similar = server.call("POST", "/api/explain", emoji["tiger"][3], "image/png").json()["similar"]
    expected = server.call("GET", "/api/classes/picture", name="lion", index=3).content
    assert server.call("GET", similar).content == expected, "of the kept pictures it is the picture itself"
    server.call("PATCH", "/api/classes", {"name": "big cat"}, name="lion")
    assert counts() == {"big cat": 6}
    server.call("POST", "/api/undo")
    assert counts() == {"lion": 6}, "a name that is taken back keeps its pictures"
    server.teach({"banana": emoji["owl"]})
    server.call("POST", "/api/undo")
    assert counts() == {"lion": 6}
    assert server.call("GET", "/api/classes/picture", name="banana", index=0).status_code == 404
    server.call("POST", "/api/undo")
    assert counts() == {"lion": 6, "banana": 6}, "a lesson that is brought back brings them along"
    server.call("DELETE", "/api/classes", name="banana")
    server.call("DELETE", "/api/classes", name="lion")
    assert len(list(small.iterdir())) == 1, "those of the lion, for an undo"
    server.call("PATCH", "/api/classes", {"name": "big rocket"}, name="rocket")
    assert not list(small.iterdir())
    server.call("PATCH", "/api/settings", {"keep_small_pictures": False})
    assert not small.exists()
