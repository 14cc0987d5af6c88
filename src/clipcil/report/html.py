"""HTML pages from the templates in `templates/`. Jinja2 escapes every value: a class may be called `<script>`."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from clipcil.errors import UserError
from clipcil.intervals import wilson_interval
from clipcil.report.style import INKS
from clipcil.storage import claim, write_text


class Cell(NamedTuple):
    """A cell of a table: its text, and the value that sorts it."""

    text: str
    value: float


@cache
def environment() -> Environment:
    """The templates, with their filters `data_url` and `json`."""
    made = Environment(loader=PackageLoader("clipcil.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters["data_url"] = data_url
    made.filters["json"] = lambda value: json.dumps(value, ensure_ascii=False)
    made.globals |= {"inks": INKS, "interval": wilson_interval, "A_B": Markup("A<sub>B</sub>")}
    return made


def data_url(content: bytes, kind: str) -> str:
    """The content as a URL that needs no other file."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def table(head: Sequence[str], rows: Iterable[Sequence[str | Cell]], sortable: bool = False) -> Markup:
    """A table as HTML.

    Args:
        head: The headings of the columns.
        rows: The cells of each row; the first is its heading. Texts are escaped unless they are `Markup`.
        sortable: Whether a click on a heading sorts the rows.
    """
    macros: Any = environment().get_template("macros.html").module
    return Markup(macros.table(head, list(rows), sortable))


def render(template: str, **values: Any) -> str:
    """The text of a template with these variables."""
    return environment().get_template(template).render(values)


def write_page(out: Path, template: str, **values: Any) -> None:
    """Render a template to a file; a page of clipcil in its place is replaced, anything else is refused.

    Args:
        out: The file.
        template: The name of the template.
        values: The variables of the template; `title` begins with "clipcil: ".

    Raises:
        UserError: `out` is a folder, a link, or a file that is not a page of clipcil.
    """
    claim_page(out)
    write_text(out, render(template, **values))


def claim_page(out: Path) -> None:
    """Refuse a folder, a link, or a file that is not a page of clipcil."""
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file for the page, such as {out / 'report.html'}")
    claim(out, "<title>clipcil: ", "page")
