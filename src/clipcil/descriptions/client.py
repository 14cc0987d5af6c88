"""Asking a language model what tells classes apart: one question for each pair, any OpenAI-compatible endpoint.

What has been answered is kept in the file, which is written whole every few answers; asking again goes on from there.
"""

from __future__ import annotations

import http.client
import json
import string
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path
from threading import Event
from typing import Any
from urllib.parse import urlsplit

from clipcil.descriptions.file import Table, read_table
from clipcil.errors import UserError
from clipcil.files import write_json

SAVE_EVERY = 20
"""Answers between two writes of the file: what a crash can lose."""
LARGEST = 1 << 20
"""Bytes of an answer that are read at the most."""
LONGEST_WAIT = 60.0
"""Seconds waited between two attempts at the most, whatever the server asks for."""
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
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"endpoint '{self.url}' is not an address; give one such as http://localhost:8000/v1")
        if not set(self.key) <= set(string.ascii_letters + string.digits + string.punctuation):
            raise UserError("the key has blanks or other characters that no key has; set the variable again")

    @property
    def address(self) -> str:
        url = self.url.rstrip("/")
        return url if url.endswith("/chat/completions") else f"{url}/chat/completions"

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
                return parse_answer(self._post(body))
            except AnswerError:
                if attempt == self.attempts:
                    raise
            except urllib.error.HTTPError as error:
                if (error.code < 500 and error.code not in (408, 409, 429)) or attempt == self.attempts:
                    raise UserError(self._refusal(error)) from None
                delay = max(delay, _asked_delay(error))
            except (OSError, http.client.HTTPException) as error:
                if attempt == self.attempts:
                    reason = getattr(error, "reason", error)
                    raise UserError(f"{self.address} cannot be reached: {self._clean(str(reason))}") from None
            if stop.wait(delay):
                break
        raise AnswerError("stopped before an answer came")

    def _post(self, body: dict[str, Any]) -> str:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.address, json.dumps(body).encode(), headers, method="POST")
        # A redirect would carry the key to another host: it is refused like any other error.
        opener = urllib.request.build_opener(_NoRedirect)
        with opener.open(request, timeout=self.timeout) as response:
            return str(response.read(LARGEST).decode("utf-8", "replace"))

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        hints = {401: "; check the key (--key-from)", 403: "; check the key (--key-from)", 404: "; check --endpoint"}
        try:
            said = error.read(LARGEST).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            said = ""
        try:
            said = json.loads(said)["error"]["message"]
        except (ValueError, KeyError, TypeError, IndexError):
            said = ""
        reason = self._clean(f" ({said})") if said else ""
        return f"{self.address} answered {error.code} {error.reason}{reason}{hints.get(error.code, '')}"

    def _clean(self, text: str) -> str:
        """One line of at most 200 characters, without the key: some servers repeat it."""
        text = " ".join(text.split())
        return (text.replace(self.key, "***") if self.key else text)[:200]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def parse_answer(text: str) -> tuple[list[str], list[str]]:
    """The two lists of features in a chat completion; words or a code fence around the JSON do no harm."""
    try:
        content = json.loads(text)["choices"][0]["message"]["content"]
        start, end = content.index("{"), content.rindex("}") + 1
        found = json.loads(content[start:end])
        lists = [[" ".join(str(one).split()) for one in found[side] if isinstance(one, str)] for side in _SIDES]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise AnswerError(f"not the JSON that was asked for ({type(error).__name__})") from error
    first, second = ([one for one in side if one] for side in lists)
    if not first or not second:
        raise AnswerError("an empty list of features")
    return first, second


_SIDES = ("first", "second")


def describe(
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
    """Answers as they come, `jobs` questions under way at a time and none waiting: stopping is quick."""
    coming, stop = iter(pairs), Event()
    pool = ThreadPoolExecutor(max(1, jobs), thread_name_prefix="describe")
    try:
        running: dict[Future[Answer], Pair] = {
            pool.submit(endpoint.ask, *pair, stop): pair for pair in islice(coming, max(1, jobs))
        }
        while running:
            ready, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in ready:
                pair = running.pop(future)
                if (following := next(coming, None)) is not None:
                    running[pool.submit(endpoint.ask, *following, stop)] = following
                error = future.exception()
                if error is not None and not isinstance(error, AnswerError):
                    raise error
                yield pair, error if error is not None else future.result()
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)


def _asked_delay(error: urllib.error.HTTPError) -> float:
    """The seconds a server asks for in Retry-After, within reason."""
    try:
        return min(LONGEST_WAIT, max(0.0, float(error.headers.get("Retry-After", 0))))
    except (TypeError, ValueError):
        return 0.0
