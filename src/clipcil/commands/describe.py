"""`clipcil describe`: make the descriptions of classes that ENGINE uses for re-ranking."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators

from clipcil.commands.types import Folder


def describe(
    classes: Annotated[str, Parameter(metavar="DATASET|FILE")],
    /,
    *,
    endpoint: Annotated[str, Parameter(metavar="URL")],
    model: Annotated[str, Parameter(metavar="NAME")],
    out: Annotated[Path, Parameter(metavar="FILE")],
    key_from: Annotated[str, Parameter(metavar="VARIABLE", show_default=False)] = "",
    jobs: Annotated[int, Parameter(metavar="N", validator=validators.Number(gte=1, lte=64))] = 4,
    data_root: Folder = None,
) -> None:
    """Ask a language model how each pair of classes differs, and keep the answers for ENGINE.

    It asks one question for each pair: 4,950 for 100 classes. After a stop, the same command continues.

    For example:
      clipcil describe emoji --endpoint http://localhost:8000/v1 --model NAME --out emoji.json
      clipcil run engine --set descriptions=emoji.json

    Args:
        classes: A dataset (`clipcil datasets` lists them), or a text file with one class name per line.
        endpoint: Address of an OpenAI-compatible API, such as http://localhost:8000/v1.
        model: Name of the model there.
        out: JSON file for the answers; an existing one is continued.
        key_from: Environment variable that holds the API key. The key is never printed or written.
        jobs: Number of questions asked at the same time.
        data_root: Folder that holds the dataset, or a folder for each dataset.
    """
    import os

    from rich.console import Console
    from rich.progress import Progress

    from clipcil.descriptions.client import Endpoint, ask_for_descriptions
    from clipcil.errors import UserError, printable

    key = os.environ.get(key_from, "").strip() if key_from else ""
    if key_from and not key:
        raise UserError(f"the environment variable {key_from} is empty or not set; put the API key there")
    names = class_names(classes, data_root)
    where = Endpoint(endpoint, model, key)
    console = Console(highlight=False, soft_wrap=True)
    with Progress(console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("pairs", total=None)
        asked = ask_for_descriptions(
            names, where, out, jobs, lambda done, total: bars.update(bar, completed=done, total=total)
        )
    print(f"{printable(out)}: {len(names)} classes, {len(names) * (len(names) - 1) // 2} pairs, {asked} asked now")


def class_names(source: str, root: Path | None) -> list[str]:
    """Names from a text file, one a line, or those of a dataset."""
    from clipcil.data.dataset import open_dataset
    from clipcil.data.names import check_names
    from clipcil.storage import read_text

    path = Path(source)
    if not path.is_file():
        return open_dataset(source, root).classes
    names = [name for line in read_text(path, links=True).splitlines() if (name := line.strip())]
    check_names(str(path), names)
    return names
