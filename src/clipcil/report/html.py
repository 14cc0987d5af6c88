"""Small pieces of HTML. Every text that comes from outside passes `text`."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from clipcil.errors import UserError
from clipcil.files import refuse_links, write_text
from clipcil.reading import open_regular
from clipcil.report.figures import Drawn
from clipcil.report.strip import Shown
from clipcil.report.style import INKS


def text(value: object) -> str:
    """Escaped for HTML: a class may be called `<script>`."""
    return escape(str(value), quote=True)


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture(name: str, light: Drawn, dark: Drawn, alt: str, caption: str) -> str:
    """A figure in two variants; the browser takes the one that suits its colour scheme. Both have the same points."""
    return (
        f'<figure id="{text(name)}" data-points="{text(json.dumps(light.points, ensure_ascii=False))}"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{data_url("image/png", dark.png)}">'
        f'<img src="{data_url("image/png", light.png)}" alt="{text(alt)}"></picture>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def cell(shown: str, value: float | None = None, kind: str = "") -> str:
    """A cell of a table: `shown` is HTML, `value` is what it is sorted by, `kind` its class in the style sheet."""
    by = "" if value is None else f' data-value="{value:.6g}"'
    return f"<td{by}{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{shown}</td>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], sortable: bool = False) -> str:
    """Cells are HTML already; the first of a row is its heading. A cell that begins with `<td` stands as it is.

    Args:
        head: The headings of the columns.
        rows: The cells of each row.
        sortable: Whether a click on a heading sorts the rows.
    """
    inner = [f'<button type="button">{name}</button>' if sortable else name for name in head]
    heads = "".join(f'<th scope="col">{name}</th>' for name in inner)
    lines = []
    for first, *rest in rows:
        cells = "".join(each if each.startswith("<td") else f"<td>{each}</td>" for each in rest)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    kind = ' class="sortable"' if sortable else ""
    body = "".join(lines)
    return f'<div class="wide"><table{kind}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, body: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{body}</details>"


def strip(pictures: Sequence[Shown]) -> str:
    items = []
    for shown in pictures:
        guess = shown.prediction
        sure = "" if guess.probability is None else f" {100 * guess.probability:.0f} %"
        said = f"{text(guess.guess)}{sure}" + ("" if guess.right else f"<br>is: {text(guess.true)}")
        image = f'<img src="{data_url("image/jpeg", shown.jpeg)}" alt="{text(guess.true)}">'
        items.append(f'<li>{image}<span class="{"right" if guess.right else "wrong"}">{said}</span></li>')
    return f'<ul class="strip">{"".join(items)}</ul>'


def page(title: str, body: str) -> str:
    """The whole file, with its styles and its script (sorting, and words where the pointer rests) inside."""
    files = resources.files("clipcil.report")
    template = Template((files / "page.html").read_text(encoding="utf-8"))
    script = (files / "page.js").read_text(encoding="utf-8")
    inks = {f"{theme}_{name}": value for theme, ink in INKS.items() for name, value in vars(ink).items()}
    return template.substitute(title=text(title), body=body, script=script, **inks)


def write_page(out: Path, title: str, body: str) -> None:
    """Write the whole file; a page of clipcil in its place is replaced, anything else is refused."""
    refuse_others_page(out)
    write_text(out, page(title, body))


def refuse_others_page(out: Path) -> bool:
    """Refuse a folder, a link, or a file that is no page of clipcil; returns whether there is a page."""
    refuse_links(out)
    if out.is_dir():
        raise UserError(f"{out} is a folder; name a file for the page, such as {out / 'report.html'}")
    if not os.path.lexists(out):
        return False
    with open_regular(out) as file:
        if b"<title>clipcil: " not in file.read(4096):
            raise UserError(f"{out} is there already and no report of clipcil; name another file")
    return True
