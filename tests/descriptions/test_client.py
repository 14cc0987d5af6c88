"""`clipcil describe` against a stand-in server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from clipcil.commands.info import describe as command
from clipcil.descriptions import client as module
from clipcil.descriptions.client import AnswerError, Endpoint, ask_for_descriptions, parse_answer
from clipcil.descriptions.file import Descriptions, read_table
from clipcil.errors import UserError

CLASSES = ["lynx", "wolf", "crow", "fire engine"]
KEY = "sk-very-secret-123"
Reply = tuple[int, str]


def chat(content: str) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


def good(question: str) -> Reply:
    """Features that name the two classes asked about, so that a mix-up would show."""
    a, b = [name for name in sorted(CLASSES, key=question.find) if f'"{name}"' in question.splitlines()[0]]
    return chat(json.dumps({"first": [f"{a} not {b}", "x"], "second": [f"{b} not {a}"]}))


class StandIn:
    """Answers like a chat endpoint; what it says to the n-th question is up to the test."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.reply: Callable[[int, str], Reply] = lambda number, question: good(question)
        self.headers: dict[str, str] = {}
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                question = body["messages"][-1]["content"]
                with outer._lock:
                    number = len(outer.questions)
                    outer.questions.append(question)
                    outer.requests.append((self.path, body, dict(self.headers)))
                code, text = outer.reply(number, question)
                self.send_response(code)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: Any) -> None:
                """The test's output stays clean."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    stand_in = StandIn()
    yield stand_in
    stand_in.close()


def endpoint(server: StandIn, **options: Any) -> Endpoint:
    return Endpoint(server.url, "some-model", **{"pause": 0.01, "timeout": 5.0, "attempts": 3, **options})


def check_whole(out: Path) -> None:
    table = read_table(out)
    Descriptions(table).require(CLASSES)
    for a, b in permutations(CLASSES, 2):
        assert table[a][b][0] == f"{a} not {b}"


def test_every_pair_is_asked_once_and_lands_in_its_place(server: StandIn, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    asked = ask_for_descriptions(
        CLASSES, endpoint(server), tmp_path / "d.json", jobs=3, on_progress=lambda stage, *at: seen.append(at)
    )
    assert asked == len(server.questions) == 6
    check_whole(tmp_path / "d.json")
    assert seen == [(done, 6) for done in range(7)]
    path, body, headers = server.requests[0]
    assert path == "/v1/chat/completions" and body["model"] == "some-model"
    assert "Authorization" not in headers


def test_the_command_reads_names_from_a_file_and_the_key_from_a_variable(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names, out = tmp_path / "names.txt", tmp_path / "d.json"
    names.write_text("\ufefflynx\n wolf \n\ncrow\nfire engine\n", encoding="utf-8")
    monkeypatch.setenv("SOME_KEY", f"{KEY}\n")
    command(str(names), endpoint=server.url, model="some-model", out=out, key_from="SOME_KEY", jobs=2)
    check_whole(out)
    assert {headers["Authorization"] for _, _, headers in server.requests} == {f"Bearer {KEY}"}
    printed = capsys.readouterr()
    assert "4 classes, 6 pairs, 6 asked now" in " ".join(printed.out.split())
    assert KEY not in printed.out + printed.err + out.read_text(encoding="utf-8")
    monkeypatch.delenv("SOME_KEY")
    with pytest.raises(UserError, match="SOME_KEY"):
        command(str(names), endpoint=server.url, model="some-model", out=out, key_from="SOME_KEY")


def test_errors_that_pass_are_tried_again(server: StandIn, tmp_path: Path) -> None:
    bad = {0: (500, "busy"), 1: (429, "busy"), 4: (503, "busy"), 6: chat("I cannot say."), 8: (200, "<html>")}
    server.reply = lambda number, question: bad.get(number) or good(question)
    ask_for_descriptions(CLASSES, endpoint(server), tmp_path / "d.json", jobs=1)
    check_whole(tmp_path / "d.json")
    assert len(server.questions) == 11


def test_a_pair_that_stays_malformed_is_named_and_the_rest_is_kept(server: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "d.json"

    def reply(number: int, question: str) -> Reply:
        asked = question.splitlines()[0]
        return chat("no") if "wolf" in asked and "crow" in asked else good(question)

    server.reply = reply
    with pytest.raises(UserError, match=r"1 of 6 pairs.*'wolf' and 'crow'") as caught:
        ask_for_descriptions(CLASSES, endpoint(server), out, jobs=2)
    assert "\n" not in str(caught.value)
    assert sum(map(len, read_table(out).values())) == 10
    server.questions.clear()
    server.reply = lambda number, question: good(question)
    assert ask_for_descriptions(CLASSES, endpoint(server), out) == len(server.questions) == 1
    check_whole(out)


def test_a_model_that_never_answers_properly_is_given_up(
    server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOPELESS", 2)
    server.reply = lambda number, question: chat("no")
    with pytest.raises(UserError, match="2 of 6 pairs"):
        ask_for_descriptions(CLASSES, endpoint(server, attempts=1), tmp_path / "d.json", jobs=1)
    assert len(server.questions) == 2


def test_of_an_endless_answer_only_the_beginning_is_read(server: StandIn, tmp_path: Path) -> None:
    server.reply = lambda number, question: (200, " " * module.LARGEST + good(question)[1])
    with pytest.raises(UserError, match="1 of 1 pairs"):
        ask_for_descriptions(CLASSES[:2], endpoint(server, attempts=1), tmp_path / "d.json")


def test_a_refused_key_stops_at_once_and_is_not_repeated(server: StandIn, tmp_path: Path) -> None:
    said = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}.\nSee the docs."}})
    server.reply = lambda number, question: (401, said)
    with pytest.raises(UserError, match=r"401 .*Incorrect API key.*--key-from") as caught:
        ask_for_descriptions(CLASSES, endpoint(server, key=KEY), tmp_path / "d.json", jobs=1)
    assert len(server.questions) == 1
    assert KEY not in str(caught.value) and "***" in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.__cause__ is None and KEY not in repr(endpoint(server, key=KEY))
    assert not (tmp_path / "d.json").exists()


def test_a_redirect_is_refused_with_the_key_at_home(server: StandIn, tmp_path: Path) -> None:
    other = StandIn()
    try:
        server.headers = {"Location": other.url}
        server.reply = lambda number, question: (302, "")
        with pytest.raises(UserError, match="302"):
            ask_for_descriptions(CLASSES, endpoint(server, key=KEY), tmp_path / "d.json", jobs=1)
        assert other.requests == []
    finally:
        other.close()


def test_a_server_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    gone = StandIn()
    gone.close()
    with pytest.raises(UserError, match="cannot be reached") as caught:
        ask_for_descriptions(CLASSES, endpoint(gone, attempts=2), tmp_path / "d.json")
    assert "\n" not in str(caught.value)


def test_interrupted_and_continued(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "d.json"

    def stop(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_for_descriptions(CLASSES, endpoint(server), out, jobs=1, on_progress=stop)
    assert sum(map(len, read_table(out).values())) == 8
    answered = len(server.questions)
    monkeypatch.setattr(module, "SAVE_EVERY", 1)
    seen: list[int] = []

    def watch(stage: str, done: int, total: int) -> None:
        seen.append(done)
        assert sum(map(len, read_table(out).values())) == 2 * done  # every answer is in the file at once

    assert ask_for_descriptions(CLASSES, endpoint(server), out, jobs=1, on_progress=watch) == 2
    assert seen == [4, 5, 6]
    # Distinct ones: the request under way at the interrupt may reach the server late, and is asked once more.
    assert len(set(server.questions[answered:])) <= 2
    check_whole(out)
    assert ask_for_descriptions(CLASSES, endpoint(server), out) == 0
    assert list(tmp_path.iterdir()) == [out]


def test_nothing_is_asked_where_the_answers_could_not_be_kept(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        ask_for_descriptions(CLASSES, endpoint(server), tmp_path / "a file" / "d.json")
    assert not server.questions and [path.name for path in tmp_path.iterdir()] == ["a file"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "not an address"),
        ({"url": "file:///etc/hosts"}, "not an address"),
        ({"url": "http://me:two words@localhost/v1"}, "--key-from"),
        ({"url": f"http://{'a' * 64}/v1"}, "not an address"),
        ({"url": "http://local..host/v1"}, "not an address"),
        ({"key": "two words"}, "key has blanks"),
    ],
)
def test_wrong_endpoints_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Endpoint(**{"url": "http://localhost/v1", "model": "m", **options})
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize("classes", [["lynx"], [], ["lynx", "wolf", "lynx"]])
def test_too_few_or_repeated_names(server: StandIn, tmp_path: Path, classes: list[str]) -> None:
    with pytest.raises(UserError, match="two different class names"):
        ask_for_descriptions(classes, endpoint(server), tmp_path / "d.json")


def test_answers_with_words_or_fences_around_them() -> None:
    lists = '{"first": [" tufted  ears ", ""], "second": ["a muzzle"]}'
    for content in (lists, f"```json\n{lists}\n```", f"Here you are: {lists} Anything else?"):
        assert parse_answer(chat(content)[1]) == (["tufted ears"], ["a muzzle"])
    wrong = ['{"first": "tufted ears", "second": ["b"]}', '{"first": {"1": "tufted ears"}, "second": ["b"]}', "[]", ""]
    for content in ('{"first": ["a"]}', '{"first": [], "second": ["b"]}', '{"first": 3, "second": ["b"]}', *wrong):
        with pytest.raises(AnswerError):
            parse_answer(chat(content)[1])
