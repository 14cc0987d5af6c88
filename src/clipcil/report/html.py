"""Small pieces of HTML. Every text that comes from outside passes `text`."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from string import Template

from clipcil.report.strip import Shown
from clipcil.report.style import INKS


def text(value: object) -> str:
    """Made harmless: a class may be called `<script>`."""
    return escape(str(value), quote=True)


def data_url(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def picture(name: str, light: bytes, dark: bytes, alt: str, caption: str) -> str:
    """A figure in two variants; the browser takes the one that suits its colour scheme."""
    return (
        f'<figure id="{text(name)}"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{data_url("image/png", dark)}">'
        f'<img src="{data_url("image/png", light)}" alt="{text(alt)}"></picture>'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already; the first of a row is its heading. A cell that begins with `<td` stands as it is."""
    heads = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    lines = []
    for first, *rest in rows:
        cells = "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def details(summary: str, body: str, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}><summary>{summary}</summary>{body}</details>"


def strip(pictures: Sequence[Shown]) -> str:
    items = []
    for shown in pictures:
        verdict = "right" if shown.right else "wrong"
        said = text(shown.true) if shown.right else f"{text(shown.guess)}<br>is: {text(shown.true)}"
        image = f'<img src="{data_url("image/jpeg", shown.jpeg)}" alt="{text(shown.true)}">'
        items.append(f'<li>{image}<span class="{verdict}">{said}</span></li>')
    return f'<ul class="strip">{"".join(items)}</ul>'


def page(title: str, body: str) -> str:
    """The whole file; styles are inside, scripts there are none."""
    template = Template((resources.files("clipcil.report") / "page.html").read_text(encoding="utf-8"))
    inks = {f"{theme}_{name}": value for theme, ink in INKS.items() for name, value in vars(ink).items()}
    return template.substitute(title=text(title), body=body, **inks)
