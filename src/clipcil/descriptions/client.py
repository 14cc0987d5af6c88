"""Asking a language model what tells classes apart: one question for each pair, to any OpenAI-compatible endpoint.

Answers are kept in a file, which is written every few answers; asking again continues from the file.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt

from clipcil.data.names import clean_name
from clipcil.descriptions.file import Table, read_descriptions
from clipcil.errors import UserError, printable
from clipcil.settings import typed
from clipcil.storage import need_writable, parse_json, write_json

SAVE_EVERY = 20
"""Answers between two writes of the file: the most that a crash can lose."""
LARGEST_ANSWER = 1 << 20
"""Maximum bytes read of an answer."""
LONGEST_WAIT = 60.0
"""Maximum seconds between two attempts, whatever the server asks for."""
LONGEST_FEATURE = 300
"""Maximum characters of a feature; the rest is cut off."""
HOPELESS = 10
"""Consecutive unusable answers after which no more questions are asked."""

QUESTION = """Two classes of an image dataset are easily confused: "{first}" and "{second}".
Name 5 short visual features that a picture of {first} shows and a picture of {second} does not, and 5 the \
other way round. Only what can be seen: shape, parts, colour, texture, surroundings. Each feature must fit into \
"a photo of {first} with <feature>", in at most ten words, and must not name the other class.
Answer with JSON alone: {{"first": [features of {first}], "second": [features of {second}]}}
For "lynx" and "wolf" a good answer begins {{"first": ["long black tufts on the ears", "a short stubby tail"], \
"second": ["a long narrow muzzle", "a bushy hanging tail"]}}."""


class AnswerError(Exception):
    """An answer that cannot be used."""


class _BusyError(UserError):
    """An error of the server that may pass; `delay` is the number of seconds that the server asks for."""

    delay = 0.0


@dataclass(frozen=True)
class Endpoint:
    """Address, model and key of a language model, and the limits of a question."""

    url: str
    model: str
    key: str = field(default="", repr=False)
    attempts: int = 5
    timeout: float = 60.0
    """Seconds that one answer may take."""
    pause: float = 1.0
    """Seconds before the second attempt; doubled for each further one."""

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
            url.host.encode("idna")  # as the lookup does, which fails for long and empty parts
        except (httpx.InvalidURL, UnicodeError):
            url = httpx.URL()
        if url.scheme not in ("http", "https") or not url.host or url.userinfo:  # not shown: it may hold a password
            raise UserError(
                "--endpoint is not an address such as http://localhost:8000/v1; the key is given with --key-from"
            )
        if not (self.key.isascii() and self.key.isprintable() and " " not in self.key):
            raise UserError("the key has blanks or other characters that no key has; set the variable again")

    @property
    def address(self) -> httpx.URL:
        """The address of the chat completions."""
        url = httpx.URL(self.url)
        return url.copy_with(path=f"{url.path.rstrip('/').removesuffix('/chat/completions')}/chat/completions")

    async def ask(self, client: httpx.AsyncClient, first: str, second: str) -> tuple[list[str], list[str]]:
        """Features of `first` against `second`, and of `second` against `first`.

        An `AnswerError` is raised where no attempt gave a usable answer, a `UserError` where the server refuses.
        """
        stop, retry = stop_after_attempt(self.attempts), retry_if_exception_type((AnswerError, _BusyError))
        retrying = AsyncRetrying(stop=stop, wait=self._wait, retry=retry, reraise=True)
        return await retrying(self._ask_once, client, QUESTION.format(first=first, second=second))

    def _wait(self, state: RetryCallState) -> float:
        asked: float = getattr(state.outcome and state.outcome.exception(), "delay", 0.0)
        return min(LONGEST_WAIT, max(asked, self.pause * 2.0 ** (state.attempt_number - 1)))

    async def _ask_once(self, client: httpx.AsyncClient, question: str) -> tuple[list[str], list[str]]:
        body = {"model": self.model, "messages": [{"role": "user", "content": question}]}
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        shown = self.address.copy_with(query=None)  # a query may hold a key
        try:
            post = client.stream("POST", self.address, json=body, headers=headers)
            async with asyncio.timeout(self.timeout), post as response:
                text = (await anext(response.aiter_bytes(LARGEST_ANSWER), b"")).decode("utf-8", "replace")
        except (httpx.HTTPError, TimeoutError) as error:
            reason = "the answer takes too long" if isinstance(error, TimeoutError) else error
            raise _BusyError(self._clean(f"{shown} cannot be reached: {reason}")) from None
        if response.is_success:
            return parse_answer(text)
        code, line = response.status_code, f"{shown} answered {response.status_code} {response.reason_phrase}"
        with suppress(UserError, LookupError, TypeError):
            line += f" ({parse_json(text, 'the answer')['error']['message']})"
        hints = {401: "; check the key (--key-from)", 403: "; check the key (--key-from)", 404: "; check --endpoint"}
        line = self._clean(line) + hints.get(code, "")
        if code < 500 and code not in (408, 409, 429):
            raise UserError(line)
        busy, asked = _BusyError(line), response.headers.get("Retry-After", "")
        busy.delay = float(asked) if asked.isdecimal() else 0.0
        raise busy

    def _clean(self, text: str) -> str:
        """One line of at most 300 characters, without the key, which some servers repeat."""
        line = printable(" ".join(text.split()))
        return (line.replace(self.key, "***") if self.key else line)[:300]


def parse_answer(text: str) -> tuple[list[str], list[str]]:
    """The two lists of features in a chat completion; words or a code fence around the JSON do no harm."""
    try:
        content = parse_json(text, "the answer")["choices"][0]["message"]["content"]
        found = parse_json(content[content.index("{") : content.rindex("}") + 1], "the answer")
        both = typed([found["first"], found["second"]], list[list[str]])
    except (UserError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise AnswerError(f"not the JSON that was asked for ({type(error).__name__})") from error
    first, second = ([name for one in found if (name := clean_name(one[:LONGEST_FEATURE]))] for found in both)
    if not first or not second:
        raise AnswerError("an empty list of features")
    return first, second


def ask_for_descriptions(
    classes: Sequence[str],
    endpoint: Endpoint,
    out: Path,
    jobs: int = 4,
    on_progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> int:
    """Fill the file `out` with D[a][b] for all pairs of `classes`; an existing file is continued.

    The file keeps all answers however the function ends. Pairs without a usable answer are left out and named in a
    `UserError`. `jobs` questions are asked at the same time. Returns the number of questions that were answered now.
    """
    if len(set(classes)) < max(2, len(classes)):
        raise UserError(f"descriptions need at least two different class names, each once; given: {', '.join(classes)}")
    table: Table = read_descriptions(out) if out.exists() else {}
    pairs = list(combinations(classes, 2))
    missing = [(a, b) for a, b in pairs if not (table.get(a, {}).get(b) and table.get(b, {}).get(a))]
    coming, failed, in_a_row, done = iter(missing), list[str](), 0, len(pairs) - len(missing)
    on_progress("pairs", done, len(pairs))

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done, in_a_row
        for a, b in coming:
            if in_a_row == HOPELESS:
                return
            try:
                answer = await endpoint.ask(client, a, b)
            except AnswerError as error:
                failed.append(f"'{a}' and '{b}': {error}")
                in_a_row += 1
                continue
            table.setdefault(a, {})[b], table.setdefault(b, {})[a] = answer
            done, in_a_row = done + 1, 0
            if done % SAVE_EVERY == 0:
                write_json(out, table)
            on_progress("pairs", done, len(pairs))

    async def ask_all() -> None:
        async with httpx.AsyncClient(timeout=None) as client:  # `ask` has its own
            await asyncio.gather(*(work(client) for _ in range(jobs)))

    if missing:
        need_writable(out)  # questions cost money: find out now that the answers cannot be kept
        try:
            asyncio.run(ask_all())
        finally:
            if table:
                write_json(out, table)
    if failed:
        line = f"{len(failed)} of {len(pairs)} pairs have no usable answer, the first {failed[0]}"
        raise UserError(f"{line}; the other answers are saved, run the same command again for the rest")
    return len(missing)
