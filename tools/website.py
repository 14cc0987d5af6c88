"""The hook of `mkdocs build --strict`: the pages that are made from the code and from the files beside `docs/`.

A page for each method and one for the datasets come from docstrings and options; the README is the start page. Links
between `docs/` and the files beside it are written for readers of the repository, and are turned here into those of
the site.
"""

import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import clipcil
from clipcil.settings import field_docs

ROOT = Path(__file__).resolve().parents[1]
BESIDE = {"README.md": "index.md", **{f"{name}.md": f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG")}}
"""Files of the root of the repository, and the pages they become."""
LINK = re.compile(r"(\[[^\[\]]*\]|\])\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the page of each method below the page about all of them."""
    section = next(item["Methods"] for item in config.nav or [] if "Methods" in item)
    section += [f"methods/{name}.md" for name in own_methods()]
    return config


@event_priority(100)  # before the plugin that turns notebooks into pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the notebooks."""
    made = {page: (ROOT / name).read_text(encoding="utf-8") for name, page in BESIDE.items()}
    made |= {f"methods/{name}.md": method_page(name, kind) for name, kind in own_methods().items()}
    made["methods/index.md"] = methods_page(own_methods())
    made["datasets.md"] = datasets_page()
    for uri, content in made.items():
        files.append(File.generated(config, uri, content=content))
    for notebook in sorted((ROOT / "examples").glob("*.ipynb")):
        files.append(File(notebook.name, str(notebook.parent), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as the site has them: a file that is on no page becomes plain words."""
    if page.file.src_uri.startswith("methods/"):
        return markdown
    folder = Path("/") if page.file.src_uri in BESIDE.values() else Path("/docs")

    def link(found: re.Match[str]) -> str:
        target = os.path.normpath(folder / found[2]).lstrip("/")
        uri = BESIDE.get(target, target.removeprefix("docs/"))
        return f"{found[1]}({uri}{found[3] or ''})" if files.get_file_from_path(uri) else found[1].strip("[]")

    return LINK.sub(link, markdown)


def own_methods() -> dict[str, type[clipcil.Method]]:
    """The methods of this package, without those of other installed ones."""
    return {name: kind for name, kind in sorted(clipcil.methods().items()) if kind.__module__.startswith("clipcil.")}


def methods_page(methods: dict[str, type[clipcil.Method]]) -> str:
    """All methods in one table."""
    rows = [
        f"| [`{name}`]({name}.md) | {kind.title} | {'tuned' if kind.tunes_tower else 'frozen'} | {kind.keeps} |"
        for name, kind in methods.items()
    ]
    head = ["# Methods", "", "Each method is one file in `src/clipcil/methods`.", ""]
    return "\n".join([*head, "| name | method | vision tower | keeps of old classes |", "|---|---|---|---|", *rows])


def method_page(name: str, kind: type[clipcil.Method]) -> str:
    """Idea and equations from the docstring of the file, then a run, then every option with its reason."""
    said = inspect.getdoc(inspect.getmodule(kind)) or ""
    text = re.sub(
        r"(?m)((?:^ {4,}.*\n?(?:\n(?= {4}))?)+)", lambda found: f"```\n{inspect.cleandoc(found[0])}\n```\n", said
    )
    lines = [f"# {kind.title}", "", re.sub(r"(?<![(<])(https?://[^\s):,]+)", r"<\1>", text), "", "## Use", "", "```"]
    lines += [f"clipcil run {name} --data cifar100 --data-root DIR", f"clipcil methods {name}", "```", ""]
    lines += ["A_B ± the standard deviation over class orders (Ā) with the embedded backbone, in percent:", ""]
    lines += [*measured(kind.title), "", "[Results](../results.md) compares all methods.", "", "## Options", ""]
    options = option_rows(kind.Config())
    return "\n".join([*lines, *(options or ["There are no options."])])


def measured(title: str) -> list[str]:
    """The columns of the tables of results in which a method stands, as a list."""
    found, head = list[str](), list[str]()
    for line in (ROOT / "docs" / "results.md").read_text(encoding="utf-8").partition("## Parts")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| A_B"):
            head = cells
        elif head and cells[0] == title:
            found += [f"- {name}: {cell}" for name, cell in zip(head[1:], cells[1:], strict=True) if cell != "–"]
    return found or ["It was not measured."]


def datasets_page() -> str:
    """Every dataset with what it needs and its options."""
    lines = ["# Datasets", ""]
    for name, entry in clipcil.datasets().items():
        lines += [f"## `{name}`", "", f"{entry.summary}. Needs: {entry.needs}.", "", *option_rows(entry.options()), ""]
    return "\n".join(lines)


def option_rows(config: Any, prefix: str = "") -> list[str]:
    """A table of options with their defaults and reasons; empty if there are none."""
    reasons, rows = field_docs(type(config)), list[str]()
    for field in dataclasses.fields(config):
        value, why = getattr(config, field.name), " ".join(reasons.get(field.name, "").split()).replace("|", "\\|")
        if dataclasses.is_dataclass(value):
            rows += [f"| **`{prefix}{field.name}`** | | {why} |", *option_rows(value, f"{prefix}{field.name}.")]
        else:
            rows.append(f"| `{prefix}{field.name}` | `{value!r}` | {why} |")
    return rows if prefix or not rows else ["| option | default | what it is |", "|---|---|---|", *rows]
