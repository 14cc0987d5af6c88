"""Asking a language model what tells classes apart: one question for each pair, any OpenAI-compatible endpoint.

What has been answered is kept in the file, which is written whole every few answers; asking again goes on from there.
"""

from __future__ import annotations

import http.client
import json
import string
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Lock, Semaphore, Thread
from typing import Any
from urllib.parse import urlsplit

from clipcil.data.names import clean_name
from clipcil.descriptions.file import Table, read_table
from clipcil.errors import UserError, printable
from clipcil.files import need_writable, write_json
from clipcil.reading import parse_json

SAVE_EVERY = 20
"""Answers between two writes of the file: what a crash can lose."""
LARGEST = 1 << 20
"""Maximum bytes read of an answer."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two attempts, whatever the server asks for."""
LONGEST = 300
"""Characters of a feature that are kept."""
HOPELESS = 10
"""Unusable answers in a row after which no more are asked for: the model does not do what is wanted."""

QUESTION = """Two classes of an image dataset are easily confused: "{first}" and "{second}".
Name {count} short visual features that a picture of {first} shows and a picture of {second} does not, and {count} the \
other way round. Only what can be seen: shape, parts, colour, texture, surroundings. Each feature must fit into \
"a photo of {first} with <feature>", in at most ten words, and must not name the other class.
Answer with JSON alone: {{"first": [features of {first}], "second": [features of {second}]}}
For "lynx" and "wolf" a good answer begins {{"first": ["long black tufts on the ears", "a short stubby tail"], \
"second": ["a long narrow muzzle", "a bushy hanging tail"]}}."""


class AnswerError(Exception):
    """An answer came, but not one that can be used."""


@dataclass(frozen=True)
class Endpoint:
    """Where to ask, and how patiently."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    count: int = 5
    """Features asked for, for each of the two classes."""
    attempts: int = 5
    timeout: float = 60.0
    pause: float = 1.0
    """Seconds before the second attempt; doubled for each one after it."""

    def __post_init__(self) -> None:
        advice = "give one such as http://localhost:8000/v1"
        if "@" in self.url:
            raise UserError(f"the endpoint holds a name or a password (an @); {advice}, and the key with --key-from")
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            (parts.hostname or "").encode("idna")  # as the lookup will do, where a part is too long or empty
        except ValueError:
            good = False
        if not good or not (self.url.isascii() and self.url.isprintable() and " " not in self.url):
            raise UserError(f"endpoint '{printable(self.url.partition('?')[0])}' is not an address; {advice}")
        if not set(self.key) <= set(string.ascii_letters + string.digits + string.punctuation):
            raise UserError("the key has blanks or other characters that no key has; set the variable again")

    @property
    def address(self) -> str:
        url = self.url.rstrip("/")
        return url if url.endswith("/chat/completions") else f"{url}/chat/completions"

    @property
    def shown(self) -> str:
        """The address as messages show it: what stands behind a question mark can be a key."""
        return self.address.partition("?")[0]

    def ask(self, first: str, second: str, stop: Event | None = None) -> tuple[list[str], list[str]]:
        """Features of `first` against `second`, and of `second` against `first`; tries again where that can help.

        `stop` ends the waiting between attempts when the answer is no longer wanted.
        """
        stop = stop or Event()
        question = QUESTION.format(first=first, second=second, count=self.count)
        body = {"model": self.model, "messages": [{"role": "user", "content": question}]}
        for attempt in range(1, self.attempts + 1):
            delay = min(LONGEST_WAIT, self.pause * 2 ** (attempt - 1))
            try:
                return parse_answer(self._post(body, stop))
            except AnswerError:
                if attempt == self.attempts:
                    raise
            except urllib.error.HTTPError as error:
                if (error.code < 500 and error.code not in (408, 409, 429)) or attempt == self.attempts:
                    raise UserError(self._refusal(error, stop)) from None
                delay = max(delay, _asked_delay(error))
            except (OSError, http.client.HTTPException) as error:
                if attempt == self.attempts:
                    reason = getattr(error, "reason", error)
                    raise UserError(f"{self.shown} cannot be reached: {self._clean(str(reason))}") from None
            if stop.wait(delay):
                break
        raise AnswerError("stopped before an answer came")

    def _post(self, body: dict[str, Any], stop: Event) -> str:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.address, json.dumps(body).encode(), headers, method="POST")
        # A redirect would carry the key to another host: it is refused like any other error.
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=self.timeout) as response:
            return self._read(response, stop)

    def _read(self, response: Any, stop: Event) -> str:
        """What the server sends, up to `LARGEST` bytes; a server that sends it too slowly is given up on."""
        until, data = time.monotonic() + self.timeout, bytearray()
        while len(data) < LARGEST and (part := response.read1(LARGEST - len(data))):
            data += part
            if stop.is_set() or time.monotonic() > until:
                raise TimeoutError("the answer takes too long")
        return data.decode("utf-8", "replace")

    def _refusal(self, error: urllib.error.HTTPError, stop: Event) -> str:
        hints = {401: "; check the key (--key-from)", 403: "; check the key (--key-from)", 404: "; check --endpoint"}
        try:
            said = parse_json(self._read(error.fp, stop), "the answer")["error"]["message"]
        except (OSError, http.client.HTTPException, UserError, KeyError, TypeError, IndexError, AttributeError):
            said = ""
        reason = f" ({self._clean(str(said))})" if said else ""
        return f"{self.shown} answered {error.code} {self._clean(error.reason)}{reason}{hints.get(error.code, '')}"

    def _clean(self, text: str) -> str:
        """One line of at most 200 characters, without the key: some servers repeat it."""
        text = printable(" ".join(str(text).split()))
        return (text.replace(self.key, "***") if self.key else text)[:200]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def parse_answer(text: str) -> tuple[list[str], list[str]]:
    """The two lists of features in a chat completion; words or a code fence around the JSON do no harm."""
    try:
        content = parse_json(text, "the answer")["choices"][0]["message"]["content"]
        start, end = content.index("{"), content.rindex("}") + 1
        found = parse_json(content[start:end], "the answer")
        if not all(isinstance(found[side], list) for side in _SIDES):
            raise TypeError("the letters of a text, or the keys of an object, are no features")
        lists = [[clean_name(one[:LONGEST]) for one in found[side] if isinstance(one, str)] for side in _SIDES]
    except (UserError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AnswerError(f"not the JSON that was asked for ({type(error).__name__})") from error
    first, second = ([one for one in side if one] for side in lists)
    if not first or not second:
        raise AnswerError("an empty list of features")
    return first, second


_SIDES = ("first", "second")


def ask_for_descriptions(
    classes: Sequence[str],
    endpoint: Endpoint,
    out: Path,
    jobs: int = 4,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Fill the file `out` with D[a][b] for all pairs of `classes`; returns how many questions were answered now.

    A pair whose answers stay unusable is left out and named at the end. Ten such in a row, or a server that refuses or
    cannot be reached, stop everything at once. In any case, and when interrupted, what was answered is in the file.
    """
    repeated = {name for name in classes if list(classes).count(name) > 1}
    if repeated or len(classes) < 2:
        what = f"'{sorted(repeated)[0]}' is there twice" if repeated else f"there is {len(classes)}"
        raise UserError(f"descriptions need at least two different class names; {what}")
    table: Table = read_table(out) if out.exists() else {}
    total = len(classes) * (len(classes) - 1) // 2
    missing = [(a, b) for a, b in combinations(classes, 2) if not (table.get(a, {}).get(b) and table.get(b, {}).get(a))]
    done, failed, unsaved, in_a_row = total - len(missing), [], 0, 0
    on_progress(done, total)
    if missing:  # questions cost money: find out now that the answers could not be kept
        need_writable(out)
    answers = _answers(missing, endpoint, jobs)
    try:
        for (a, b), answer in answers:
            if isinstance(answer, AnswerError):
                failed.append((a, b, answer))
                in_a_row += 1
                if in_a_row == HOPELESS:
                    break
                continue
            in_a_row = 0
            table.setdefault(a, {})[b], table.setdefault(b, {})[a] = answer
            done, unsaved = done + 1, unsaved + 1
            if unsaved >= SAVE_EVERY:
                write_json(out, table)
                unsaved = 0
            on_progress(done, total)
    finally:
        answers.close()
        if unsaved:
            write_json(out, table)
    if failed:
        a, b, reason = failed[0]
        raise UserError(
            f"{len(failed)} of {total} pairs have no usable answer, the first '{a}' and '{b}': {reason};"
            " what was answered is saved, run the same command again for the rest"
        )
    return len(missing)


Pair = tuple[str, str]
Answer = tuple[list[str], list[str]]


def _answers(pairs: Sequence[Pair], endpoint: Endpoint, jobs: int) -> Generator[tuple[Pair, Answer | AnswerError]]:
    """Answers as they come, `jobs` questions at a time that are not answered or whose answer was not looked at yet.

    The threads are daemons: a server that never ends its answer does not keep the process from ending.
    """
    coming, stop, turn, room = iter(pairs), Event(), Lock(), Semaphore(max(1, jobs))
    results: SimpleQueue[tuple[Pair, Answer | Exception]] = SimpleQueue()

    def work() -> None:
        while True:
            room.acquire()
            with turn:
                pair = next(coming, None)
            if pair is None or stop.is_set():
                return
            try:
                results.put((pair, endpoint.ask(*pair, stop)))
            except AnswerError as error:  # one bad answer: the others are still wanted
                results.put((pair, error))
            except Exception as error:  # handed over to whoever waits for the answer; nothing more is asked
                results.put((pair, error))
                stop.set()

    for number in range(min(max(1, jobs), len(pairs))):
        Thread(target=work, name=f"describe-{number}", daemon=True).start()
    try:
        for _ in pairs:
            pair, answer = results.get()
            if isinstance(answer, Exception) and not isinstance(answer, AnswerError):
                raise answer
            yield pair, answer
            room.release()
    finally:
        stop.set()
        room.release(max(1, jobs))  # whoever waits may see that nothing more is asked


def _asked_delay(error: urllib.error.HTTPError) -> float:
    """The seconds a server asks for in Retry-After, within reason."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(error.headers.get("Retry-After", 0))))
    except (TypeError, ValueError):
        return 0.0
