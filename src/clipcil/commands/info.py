"""`clipcil methods` and `clipcil datasets`: lists of both; `clipcil describe`: what tells the classes of one apart."""

import dataclasses
import inspect
import os
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from clipcil.commands.types import Folder
from clipcil.errors import UserError


def methods(
    method: Annotated[str, Parameter(metavar="METHOD", show_default=False)] = "",
    /,
    *,
    data: Annotated[str, Parameter(metavar="NAME", show_default=False)] = "",
    backbone: Annotated[str, Parameter(metavar="NAME")] = "mini",
) -> None:
    """List the methods, or the settings of one with their values and reasons.

    For example:
      clipcil methods
      clipcil methods dmc-ot
      clipcil methods dmc-ot --data cub200 --backbone openai/clip-vit-base-patch16

    Args:
        method: Show the settings of this method, a name or a file such as mine.py.
        data: Show the values that a run on this dataset uses: those of its preset, where there is one.
        backbone: Show the values for this backbone; some presets have other values for mini.
    """
    from clipcil.commands.text import print_table, say
    from clipcil.data.dataset import find_dataset
    from clipcil.experiment.spec import RunSpec, method_settings, read_preset
    from clipcil.methods.registry import methods, named_method

    if data and not method:
        raise UserError(f"--data shows the preset of one method; name a method: clipcil methods METHOD --data {data}")
    if not method:
        rows = []
        for name, kind in sorted(methods().items()):
            summary = (inspect.getdoc(inspect.getmodule(kind)) or "").split("\n")[0]
            if kind.title not in summary:  # a variant, whose file begins with the name of the method
                summary = f"{kind.title}: {summary.partition(': ')[2] or summary}"
            rows.append((name, kind.keeps, "tuned" if kind.tunes_tower else "frozen", summary))
        print_table(("name", "keeps", "tower", "in short"), rows, left=4)
        say("keeps: what remains of old classes; tower: the vision tower. clipcil methods NAME shows the settings.")
        return
    if data:
        find_dataset(data)
    kind = named_method(method)
    spec = RunSpec(method=kind.name, data=data or "emoji", backbone=backbone)
    config = method_settings(spec, {}, preset=bool(data))
    kept = data and read_preset(data, kind.presets or kind.name, spec.backbone)
    about = f", with the preset for {data}" if kept else f"; there is no preset for {data}" if data else ""
    say(f"{kind.title}: settings for --set key=value{about}")
    print_table(("setting", "value", "what it is"), _settings(config), left=3)
    if not data:
        say("A run may take other values from its dataset's preset: --data NAME shows them.")


def datasets(data: Annotated[str, Parameter(metavar="DATASET", show_default=False)] = "", /) -> None:
    """List the datasets and the files that each needs, or the options of one.

    For example:
      clipcil datasets
      clipcil datasets cub200

    Args:
        data: Show the options of this dataset, for --data-options key=value.
    """
    from clipcil.commands.text import print_table, say
    from clipcil.data.dataset import datasets, find_dataset

    if data:
        entry = find_dataset(data)
        say(f"{data}: {entry.summary}; needs {entry.needs}. Options for --data-options key=value:")
        print_table(("option", "value", "what it is"), _settings(entry.options()), left=3)
    else:
        rows = ((name, entry.summary, entry.needs) for name, entry in datasets().items())
        print_table(("name", "what", "needs"), rows, left=3)


def _settings(config: Any, prefix: str = "", reason: str = "") -> list[tuple[str, str, str]]:
    """Every setting with its value and reason; the reason of a group stands above its settings."""
    from clipcil.settings import field_docs

    reasons, rows = field_docs(type(config)), [(f"{prefix}…", "", reason)] if reason else []
    for field in dataclasses.fields(config):
        value, why = getattr(config, field.name), reasons.get(field.name, "")
        if dataclasses.is_dataclass(value):
            rows += _settings(value, f"{prefix}{field.name}.", why)
        else:
            rows.append((f"{prefix}{field.name}", str(value), why))
    return rows


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
    from clipcil.commands import text
    from clipcil.data.dataset import open_dataset
    from clipcil.data.names import check_names
    from clipcil.descriptions.client import Endpoint, ask_for_descriptions
    from clipcil.storage import read_text

    key = os.environ.get(key_from, "").strip() if key_from else ""
    if key_from and not key:
        raise UserError(f"the environment variable {key_from} is empty or not set; put the API key there")
    if (path := Path(classes)).is_file():
        names = [name for line in read_text(path, links=True).splitlines() if (name := line.strip())]
        check_names(classes, names)
    else:
        names = open_dataset(classes, data_root).classes
    with text.progress_bar() as on_progress:
        asked = ask_for_descriptions(names, Endpoint(endpoint, model, key), out, jobs, on_progress)
    text.say(f"{out}: {len(names)} classes, {len(names) * (len(names) - 1) // 2} pairs, {asked} asked now")
