"""`clipcil describe` against a stand-in server on this machine."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from clipcil.commands.info import describe as command
from clipcil.descriptions import client as module
from clipcil.descriptions.client import AnswerError, Endpoint, ask_for_descriptions, parse_answer
from clipcil.descriptions.file import read_descriptions, require_pairs
from clipcil.errors import UserError
from support.errors import one_line

CLASSES = ["lynx", "wolf", "crow", "fire engine"]
KEY = "sk-very-secret-123"
Reply = tuple[int, str]


def chat(content: str) -> Reply:
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


def good(question: str) -> Reply:
    """Features that name the two classes asked about, so that a mix-up would show."""
    a, b = [name for name in sorted(CLASSES, key=question.find) if f'"{name}"' in question.splitlines()[0]]
    return chat(json.dumps({"first": [f"{a} not {b}", "x"], "second": [f"{b} not {a}"]}))


class StandIn(ThreadingHTTPServer):
    """Answers like a chat endpoint; what it says to the n-th question is up to the test."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        self.questions: list[str] = []
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.reply: Callable[[int, str], Reply] = lambda number, question: good(question)
        self.location = ""
        self.lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        question = body["messages"][-1]["content"]
        with self.server.lock:
            number = len(self.server.questions)
            self.server.questions.append(question)
            self.server.requests.append((self.path, body, dict(self.headers)))
        code, text = self.server.reply(number, question)
        self.send_response(code)
        self.send_header("Location", self.server.location)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        """The test's output stays clean."""


@contextmanager
def answering() -> Iterator[StandIn]:
    with StandIn() as stand_in:
        threading.Thread(target=stand_in.serve_forever, args=(0.01,), daemon=True).start()
        yield stand_in
        stand_in.shutdown()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with answering() as stand_in:
        yield stand_in


def endpoint(server: StandIn, **options: Any) -> Endpoint:
    return Endpoint(server.url, "some-model", **{"pause": 0.01, "timeout": 5.0, "attempts": 3, **options})


def check_whole(out: Path) -> None:
    table = read_descriptions(out)
    require_pairs(table, CLASSES, out)
    for a, b in permutations(CLASSES, 2):
        assert table[a][b][0] == f"{a} not {b}"


def test_every_pair_is_asked_once_and_lands_in_its_place(server: StandIn, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    ask = endpoint(server)
    asked = ask_for_descriptions(CLASSES, ask, tmp_path / "d.json", 3, lambda stage, *at: seen.append(at))
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
    given: dict[str, Any] = {"endpoint": f"{server.url}/?version=1", "model": "some-model", "key_from": "SOME_KEY"}
    monkeypatch.setenv("SOME_KEY", f"{KEY}\n")
    command(str(names), out=out, jobs=2, **given)
    check_whole(out)
    assert {path for path, _, _ in server.requests} == {"/v1/chat/completions?version=1"}
    assert {headers["Authorization"] for _, _, headers in server.requests} == {f"Bearer {KEY}"}
    printed = capsys.readouterr()
    assert "4 classes, 6 pairs, 6 asked now" in " ".join(printed.out.split())
    assert KEY not in printed.out + printed.err + out.read_text(encoding="utf-8")
    monkeypatch.delenv("SOME_KEY")
    with one_line("SOME_KEY"):
        command(str(names), out=out, **given)


def test_errors_that_pass_are_tried_again(server: StandIn, tmp_path: Path) -> None:
    bad = {0: (500, "busy"), 1: (429, "busy"), 4: (503, "busy"), 6: chat("I cannot say."), 8: (200, "<html>")}
    server.reply = lambda number, question: bad.get(number) or good(question)
    ask_for_descriptions(CLASSES, endpoint(server), tmp_path / "d.json", jobs=1)
    check_whole(tmp_path / "d.json")
    assert len(server.questions) == 11


def test_a_pair_that_stays_malformed_is_named_and_the_rest_is_kept(server: StandIn, tmp_path: Path) -> None:
    out = tmp_path / "d.json"
    server.reply = lambda number, question: (
        chat("no") if {'"wolf"', '"crow"'} <= set(re.findall('"[a-z]+"', question.splitlines()[0])) else good(question)
    )
    with one_line("1 of 6 pairs", "'wolf' and 'crow'"):
        ask_for_descriptions(CLASSES, endpoint(server), out, jobs=2)
    assert sum(map(len, read_descriptions(out).values())) == 10
    server.questions.clear()
    server.reply = lambda number, question: good(question)
    assert ask_for_descriptions(CLASSES, endpoint(server), out) == len(server.questions) == 1
    check_whole(out)


@pytest.mark.parametrize(
    ("reply", "asked"),
    [
        (lambda question: chat("no"), 2),
        # Of an endless answer only the beginning is read.
        (lambda question: (200, " " * module.LARGEST_ANSWER + good(question)[1]), 2),
        (lambda question: (302, ""), 1),
    ],
)
def test_a_model_that_never_answers_properly_is_given_up(
    reply: Callable[[str], Reply], asked: int, server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HOPELESS", 2)
    server.reply = lambda number, question: reply(question)
    with answering() as other:
        server.location = other.url  # a redirect is refused: the key stays at home
        with one_line("2 of 6 pairs" if asked == 2 else "302"):
            ask_for_descriptions(CLASSES, endpoint(server, attempts=1, key=KEY), tmp_path / "d.json", jobs=1)
        assert len(server.questions) == asked and other.requests == []
    with one_line("cannot be reached"):
        ask_for_descriptions(CLASSES, endpoint(other, attempts=2), tmp_path / "d.json")  # it is gone


def test_a_refused_key_stops_at_once_and_is_not_repeated(server: StandIn, tmp_path: Path) -> None:
    said = json.dumps({"error": {"message": f"Incorrect API key provided: {KEY}.\nSee the docs."}})
    server.reply = lambda number, question: (401, said)
    with pytest.raises(UserError) as caught:
        ask_for_descriptions(CLASSES, endpoint(server, key=KEY), tmp_path / "d.json", jobs=1)
    message = str(caught.value)
    assert all(words in message for words in ("401", "Incorrect API key", "***", "--key-from"))
    assert len(server.questions) == 1 and KEY not in message and "\n" not in message
    assert caught.value.__cause__ is None and KEY not in repr(endpoint(server, key=KEY))
    assert not (tmp_path / "d.json").exists()


def test_interrupted_and_continued(server: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "d.json"

    def stop(stage: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask_for_descriptions(CLASSES, endpoint(server), out, jobs=1, on_progress=stop)
    assert sum(map(len, read_descriptions(out).values())) == 8
    answered = len(server.questions)
    monkeypatch.setattr(module, "SAVE_EVERY", 1)
    seen: list[int] = []

    def watch(stage: str, done: int, total: int) -> None:
        seen.append(done)
        assert sum(map(len, read_descriptions(out).values())) == 2 * done  # every answer is in the file at once

    assert ask_for_descriptions(CLASSES, endpoint(server), out, jobs=1, on_progress=watch) == 2
    assert seen == [4, 5, 6]
    # Distinct ones: the request under way at the interrupt may reach the server late, and is asked once more.
    assert len(set(server.questions[answered:])) <= 2
    check_whole(out)
    assert ask_for_descriptions(CLASSES, endpoint(server), out) == 0
    assert list(tmp_path.iterdir()) == [out]


def test_nothing_is_asked_where_the_answers_could_not_be_kept(server: StandIn, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    with one_line("cannot write"):
        ask_for_descriptions(CLASSES, endpoint(server), tmp_path / "a file" / "d.json")
    for classes in (["lynx"], ["lynx", "wolf", "lynx"]):
        with one_line("two different class names"):
            ask_for_descriptions(classes, endpoint(server), tmp_path / "d.json")
    assert not server.questions and [path.name for path in tmp_path.iterdir()] == ["a file"]


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8000", "file:///etc/hosts", f"http://{'a' * 64}", "http://a..b"),
        *("http://me:two words@localhost/v1", "htp://me:two words@x", "http://x?two words\x07"),
    ],
)
def test_wrong_endpoints_are_refused_and_no_password_is_shown(url: str) -> None:
    for given, words in (({"url": url, "key": ""}, "--endpoint"), ({"url": "http://a", "key": "two words"}, "the key")):
        with pytest.raises(UserError, match=words) as caught:
            Endpoint(model="m", **given)
        assert "two words" not in str(caught.value)


def test_answers_with_words_or_fences_around_them() -> None:
    lists = '{"first": [" tufted  ears ", ""], "second": ["a muzzle"]}'
    for content in (lists, f"```json\n{lists}\n```", f"Here you are: {lists} Anything else?"):
        assert parse_answer(chat(content)[1]) == (["tufted ears"], ["a muzzle"])
    wrong = ("tufted ears", {"1": "tufted ears"}, [" ", ""], [], 3)
    for content in ('{"first": ["a"]}', *(json.dumps({"first": each, "second": ["b"]}) for each in wrong), "[]", ""):
        with pytest.raises(AnswerError):
            parse_answer(chat(content)[1])
