"""The command line: `clipcil COMMAND …`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from clipcil import __version__
from clipcil.commands.bench import bench, sweep
from clipcil.commands.change import forget, rename, undo
from clipcil.commands.describe import describe
from clipcil.commands.export import export
from clipcil.commands.help import wrapped_help
from clipcil.commands.info import datasets, methods
from clipcil.commands.learn import learn
from clipcil.commands.predict import predict
from clipcil.commands.report import report
from clipcil.commands.run import run
from clipcil.commands.serve import serve
from clipcil.commands.show import show
from clipcil.commands.test import test
from clipcil.commands.wrong_words import explain, known_options
from clipcil.errors import LostProcessError, UserError, nearest, printable
from clipcil.terminal import escape_what_cannot_be_shown, stops_once

COMMANDS: dict[str, Callable[..., Any]] = {
    "learn": learn,
    "predict": predict,
    "serve": serve,
    "test": test,
    "show": show,
    "forget": forget,
    "rename": rename,
    "undo": undo,
    "export": export,
    "run": run,
    "bench": bench,
    "sweep": sweep,
    "report": report,
    "methods": methods,
    "datasets": datasets,
    "describe": describe,
}
DESCRIPTION = """Class-incremental learning with CLIP: DMC, DMC-OT and the methods they are compared with.

Type `clipcil COMMAND --help` for the help of a command, and `clipcil --version` for the version."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A `UserError` is printed as one line on stderr, with exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Waiting threads sleep instead of spinning, which would take the cores from others; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if words == ["--version"]:
        print(f"clipcil {__version__}")
        return
    escape_what_cannot_be_shown()
    with stops_once(for_good=arguments is None):
        _run(words)


OUT_OF_MEMORY = ("allocate memory", "could not create a primitive", "out of memory")
"""What torch, its oneDNN kernels, and CUDA say where the memory is used up; none raises MemoryError."""
GRID_LISTS = ("--methods", "--only", "--data", "--orders", "--data-root", "--kept")
"""Options of `bench` and `sweep` that take several words."""


def _run(words: list[str]) -> None:
    try:
        words = _join(words, GRID_LISTS) if words[:1] in (["bench"], ["sweep"]) else words
        _dispatch(_gather(words, "--set", "--data-options") or ["--help"])
        sys.stdout.flush()
    except LostProcessError as error:
        _say(str(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)  # an ordinary exit sometimes aborts: gloo's threads still wait for the process that is gone
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt as stop:
        _fail(str(stop) or "stopped", code=130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(said in str(error) for said in OUT_OF_MEMORY):
            raise
        _fail("there is not enough memory for this")
    except OSError as error:  # a file that vanished, a full disk: where no other code handles it
        _fail(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}")


def _dispatch(words: list[str]) -> None:
    """Let tyro parse the words, and call the command; a parsing error becomes one line."""
    if any("\0" in word for word in words):
        raise UserError("a word of the command holds a zero byte, which no file name can have")
    if not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UserError(f"there is no command '{words[0]}'{nearest(words[0], COMMANDS)}")
    brief = words[0].startswith("-")  # the list of commands shows the first line of each
    held = io.StringIO()
    try:
        with contextlib.redirect_stderr(held):
            chosen = _parse(words, brief)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        options = known_options(lambda: _parse([words[0], "--help"], brief)) if words[0] in COMMANDS else set()
        _fail(explain(held.getvalue(), words, options))
        return
    chosen()


def _parse(words: list[str], brief: bool) -> Callable[[], None]:
    with wrapped_help():
        chosen: Callable[[], None] = tyro.extras.subcommand_cli_from_dict(
            {name: _later(function, brief) for name, function in COMMANDS.items()},
            prog="clipcil",
            description=DESCRIPTION,
            args=words,
            config=(tyro.conf.OmitArgPrefixes,),
        )
    return chosen


def _later(function: Callable[..., None], brief: bool) -> Callable[..., Callable[[], None]]:
    """The same signature and help, but the call is returned, not made: errors of parsing and of running differ."""

    @functools.wraps(function)
    def parsed(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return lambda: function(*args, **kwargs)

    if brief and function.__doc__:
        parsed.__doc__ = function.__doc__.split("\n")[0]
    return parsed


def _gather(words: list[str], *flags: str) -> list[str]:
    """`--set a=1 --set=b=2` → `--set a=1 b=2`: a flag given twice adds instead of replacing."""
    for flag in flags:
        values: list[str] = []
        rest: list[str] = []
        taking = False
        for word in words:
            name, equals, value = word.partition("=")
            if name.replace("_", "-") == flag:  # tyro takes --data_options, too
                taking = True
                values += [value] if equals else []
            elif taking and "=" in word and not word.startswith("-"):
                values.append(word)
            else:
                taking = False
                rest.append(word)
        words = [*rest, flag, *values] if values else words
    return words


def _join(words: list[str], flags: Sequence[str]) -> list[str]:
    """`--data a --data b c` → `--data a b c`; the parser would forget the first."""
    values: dict[str, list[str]] = {}
    rest: list[str] = []
    taking: list[str] | None = None
    for word in words:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        if name in flags:
            own = values.setdefault(name, [])
            own += [value] if equals else []
            taking = None if equals else own
        elif taking is not None and not word.startswith("-"):
            taking.append(word)
        else:
            taking = None
            rest.append(word)
    return [*rest, *(word for name, own in values.items() for word in (name, *own))]


def _fail(line: str, code: int = 2) -> None:
    _say(line)
    sys.exit(code)


def _say(line: str) -> None:
    """Print a line on stderr."""
    if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) in ("", "0"):  # the first process speaks for all
        print(f"clipcil: {printable(' '.join(line.split()))}", file=sys.stderr)


if __name__ == "__main__":
    main()
