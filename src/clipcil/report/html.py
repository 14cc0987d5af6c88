"""HTML pages from the templates in `templates/`. Jinja2 escapes every value: a class may be called `<script>`."""

import base64
import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from clipcil.errors import UserError, printable
from clipcil.intervals import signed, wilson_interval
from clipcil.report.style import INKS
from clipcil.storage import claim, write_text


@cache
def environment() -> Environment:
    """The templates, with their filters `data_url`, `json` and `signed`."""
    made = Environment(loader=PackageLoader("clipcil.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    # Direction marks in the names of a stranger's run would turn the text of the page around.
    made.finalize = lambda value: printable(value) if type(value) is str else value
    made.filters["data_url"] = lambda content, kind: f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
    made.filters["json"] = lambda value: json.dumps(value)
    made.filters["signed"] = signed
    made.globals |= {
        "inks": INKS,
        "interval": wilson_interval,
        "A_B": Markup("A<sub>B</sub>"),
        "A_k": Markup("A<sub>k</sub>"),
    }
    return made


def render(template: str, **values: Any) -> str:
    """The text of a template with these variables."""
    return environment().get_template(template).render(values)


def write_page(out: Path, template: str, **values: Any) -> None:
    """Render a template to a file; only a page of clipcil is replaced. The variable `title` begins with "clipcil: "."""
    claim_page(out)
    write_text(out, render(template, **values))


def claim_page(out: Path) -> None:
    """Refuse a folder, a link, or a file that is not a page of clipcil."""
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file for the page, such as {out / 'report.html'}")
    claim(out, "<title>clipcil: ", "page")
