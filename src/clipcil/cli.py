"""The command line: `clipcil COMMAND …`. Nothing heavy is imported before a command needs it."""

import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cyclopts import App, CycloptsError, Parameter

from clipcil import __version__
from clipcil.commands.bench import bench, sweep
from clipcil.commands.doctor import doctor
from clipcil.commands.hub import pull, push
from clipcil.commands.info import datasets, describe, methods
from clipcil.commands.report import report
from clipcil.commands.run import run
from clipcil.commands.teach import forget, learn, rename, serve, undo
from clipcil.commands.types import declare_options
from clipcil.commands.use import export, predict, show, test
from clipcil.errors import LostProcessError, UserError, nearest, printable
from clipcil.signals import stops_once

_MODELS = (learn, predict, serve, test, show, forget, rename, undo, export, push, pull)
_RUNS = (run, bench, sweep, report, methods, datasets, describe, doctor)
COMMANDS: dict[str, Callable[..., Any]] = {command.__name__: command for command in (*_MODELS, *_RUNS)}
DESCRIPTION = """Class-incremental learning with CLIP: DMC, DMC-OT and the methods they are compared with.

Type `clipcil COMMAND --help` for the help of a command, and `clipcil --version` for the version."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command. A `UserError` is printed as one line on stderr, with exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Waiting threads sleep instead of spinning, which would take the cores from others; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed: the next file that is opened would be given what is printed
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal's encoding lacks becomes an escape
            stream.reconfigure(errors="backslashreplace")
    _run(words, for_good=arguments is None)


OUT_OF_MEMORY = ("allocate memory", "could not create a primitive", "out of memory")
"""Words with which torch, oneDNN and CUDA report that memory is used up; none of them raises MemoryError."""


def _run(words: list[str], for_good: bool) -> None:
    try:
        with stops_once(for_good):
            _dispatch(words)
            sys.stdout.flush()
    except UserError as error:
        _say(str(error))
        if isinstance(error, LostProcessError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(2)  # an ordinary exit sometimes aborts: gloo's threads still wait for the process that is gone
        sys.exit(2)
    except KeyboardInterrupt as stop:
        _say(str(stop) or "stopped")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(said in str(error) for said in OUT_OF_MEMORY):
            raise
        _say("there is not enough memory for this")
        sys.exit(2)
    except OSError as error:  # a file that vanished, a full disk: where no other code handles it
        _say(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}")
        sys.exit(2)


def _dispatch(words: list[str]) -> None:
    """Parse the words, and call the command; a parsing error becomes one line."""
    if any("\0" in word for word in words):
        raise UserError("an argument contains a NUL byte")
    if words and not words[0].startswith("-") and words[0] not in COMMANDS:
        raise UserError(f"there is no command '{words[0]}'{nearest(words[0], COMMANDS)}")
    if words[:1] and words[0] in COMMANDS and sys.stderr.isatty() and not {"--help", "-h", "--quiet"} & {*words}:
        print(f"clipcil {words[0]}: loading PyTorch, which takes a few seconds …", file=sys.stderr, flush=True)
    app = App(
        name="clipcil",
        help=DESCRIPTION,
        help_format="plaintext",
        version=f"clipcil {__version__}",
        default_parameter=Parameter(negative_iterable=(), consume_multiple=True, allow_repeating=True),
        result_action="return_value",
        suppress_keyboard_interrupt=False,  # _run prints how to continue
    )
    if words and words[0] in COMMANDS:
        declare_options(COMMANDS[words[0]])
    for number, (name, command) in enumerate(COMMANDS.items()):
        app.command(command, name=name, help=_help_text(command), sort_key=number)
    try:
        app(words, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        error.verbose = False
        said, asked = str(error).rstrip("."), " ".join(["clipcil", *(word for word in words[:1] if word in COMMANDS)])
        raise UserError(f"{said}{'' if said.endswith('?') else ';'} {asked} --help tells more") from error


def _help_text(command: Callable[..., Any]) -> str:
    """The docstring of a command above its arguments, each paragraph in one line; examples keep their lines."""
    text = inspect.cleandoc(command.__doc__ or "").partition("\n\nArgs:")[0]
    return "\n\n".join(part if "\n  " in part else " ".join(part.split("\n")) for part in text.split("\n\n"))


def _say(line: str) -> None:
    """Print a line on stderr, if it can be written to."""
    with suppress(OSError):
        print(f"clipcil: {printable(' '.join(line.split()))}", file=sys.stderr, flush=True)
