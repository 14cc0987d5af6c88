"""A lesson that is cancelled or killed leaves the model whole, and nobody else changes a model that is served."""

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import clipcil
from support.lessons import FAST, pictures, write_tree
from support.server import Server, environment, running


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A taught model whose next lesson would take hours."""
    folder = tmp_path_factory.mktemp("killed") / "model"
    classifier = clipcil.Classifier("dmc-ot", **FAST)
    classifier.learn(pictures(["fox", "owl"]))
    classifier.save(folder)
    text = (folder / "model.toml").read_text()
    slow = text.replace("[settings.stage1]\nepochs = 1\n", "[settings.stage1]\nepochs = 100000\n")
    slow = slow.replace("most_steps = 48\n", "most_steps = 0\n", 1)
    assert "epochs = 100000\nsteps = 0\nmost_steps = 0\n" in slow
    (folder / "model.toml").write_text(slow)
    return folder


def start_long_lesson(server: Server, emoji: dict[str, list[bytes]]) -> None:
    server.add("rocket", [(f"{i}.png", picture) for i, picture in enumerate(emoji["rocket"])])
    assert server.call("POST", "/api/lesson").status_code == 202
    end = time.monotonic() + 120
    while not (state := server.call("GET", "/api/lesson").json())["total"] > 1000:  # the tower is being trained
        assert state["state"] == "running" and time.monotonic() < end, state
        time.sleep(0.1)


def test_cancel_then_kill(
    model: Path, tmp_path: Path, emoji: dict[str, list[bytes]], fresh_emoji: dict[str, bytes]
) -> None:
    cache = tmp_path / "cache"
    with running(model, cache) as server:
        before = server.predict(fresh_emoji["fox"])
        start_long_lesson(server, emoji)
        assert server.predict(fresh_emoji["fox"]) == before, "the model before the lesson answers"
        for call in ("POST /api/lesson", "POST /api/undo", "DELETE /api/classes?name=fox"):
            assert server.call(*call.split()).status_code == 409, call
        server.add("tiger", [("0.png", emoji["tiger"][0])])
        assert server.call("DELETE", "/api/lesson").status_code == 202
        assert server.wait_for_lesson()["state"] == "cancelled"
        assert server.waiting == {"rocket": 6, "tiger": 1}
        assert server.predict(fresh_emoji["fox"]) == before
        start_long_lesson(server, emoji)
        server.kill()
    left = list((cache / "serve").iterdir())
    assert len(left) == 1 and any(left[0].glob("*.picture")), "a killed process cannot clean up"
    with running(model, cache) as server:
        assert not list(left[0].iterdir()), "the next one does"
        assert server.classes == ["fox", "owl"] and server.predict(fresh_emoji["fox"]) == before
        assert server.waiting == {}
    assert list((cache / "serve").iterdir()) == []


def test_the_second_is_told_that_the_model_is_in_use(model: Path, tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", pictures(["tiger"]))
    with running(model, tmp_path / "cache") as server, ExitStack() as stack:
        weights = sorted(path.name for path in model.iterdir())
        for words in (["serve", str(model), "--port", "0", "--no-open"], ["learn", str(model), str(tree)]):
            command, own = [sys.executable, "-m", "clipcil", *words], environment(tmp_path / "cache")
            done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=120)
            assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
            assert f"{model} is in use" in done.stderr
        assert sorted(path.name for path in model.iterdir()) == weights
        listening = stack.enter_context(server.client.stream("GET", "/api/events"))
        assert listening.status_code == 200, "a page that listens does not keep the server from ending"
        server.process.send_signal(signal.SIGINT)
        server.process.wait(20)
