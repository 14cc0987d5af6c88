"""Prediction of any number of pictures on Ray.

The source is cut into parts of `PICTURES_PER_PART` pictures (parquet files: into their row groups). A pool of actors,
each with the model loaded, shares the parts; an actor writes the answers for a part to one parquet file. The driver
sends parts without their pictures, so its memory does not grow with them, and a job that is stopped and given again
does only the parts whose file is missing.
"""

import hashlib
import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from clipcil.classifier.folder import MODEL
from clipcil.classifier.lesson import Progress
from clipcil.classifier.load import load
from clipcil.classifier.predict import Prediction
from clipcil.cluster import connect
from clipcil.data.datasets.parquet import ROWS_AT_ONCE, holds_pictures, open_parquet
from clipcil.data.sources import list_files, no_pictures
from clipcil.errors import UserError, printable
from clipcil.limits import MOST_OWN_TEXT
from clipcil.settings import typed
from clipcil.storage import read_json, read_text, run_lock, sha256, whole_file, write_json

PICTURES_PER_PART = 1000
"""Pictures per part."""
JOB, MANIFEST = "job.json", "pictures.parquet"
ANSWERS = pa.schema(
    [
        ("path", pa.string()),
        ("class", pa.string()),
        ("probability", pa.float32()),
        ("classes", pa.list_(pa.string())),
        ("probabilities", pa.list_(pa.float32())),
        ("unknown", pa.bool_()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True)
class Part:
    """A row group of a parquet file: of the list of paths, or of a source that holds the pictures themselves."""

    number: int
    file: str
    group: int

    @property
    def name(self) -> str:
        """The file of its answers."""
        return f"part-{self.number:06d}.parquet"


def predict_on_ray(
    model: Path,
    source: Path,
    out: Path,
    *,
    top: int = 5,
    actors: int = 2,
    gpus: float = 0.0,
    address: str | None = None,
    backbone: str | None = None,
    on_progress: Progress = lambda stage, done, total: None,
) -> dict[str, int]:
    """Predict every picture of `source` and write parquet files with the columns of `ANSWERS` to `out`.

    The column `class` is empty where a picture is unknown or cannot be read; then `error` says why. Every node of the
    cluster must be able to read `model` and to write to `out`, where finished parts are kept. The arguments are the
    options of `clipcil predict --on ray`.

    Returns:
        Numbers of `pictures`, `errors` and `parts` in `out`.
    """
    with run_lock(out):
        parts = _prepare(model, source, out, top)
        missing = [part for part in parts if not (out / part.name).is_file()]
        done = len(parts) - len(missing)
        on_progress("parts", done, len(parts))
        if missing:
            settings = model.resolve(), out.resolve(), top, backbone, gpus
            for count, _ in enumerate(_run(missing, settings, actors, address), start=1):
                on_progress("parts", done + count, len(parts))
        errors = [error for part in parts for error in pq.read_table(out / part.name)["error"].to_pylist()]
        return {"pictures": len(errors), "errors": sum(map(bool, errors)), "parts": len(parts)}


def _run(parts: Sequence[Part], settings: tuple[Any, ...], actors: int, address: str | None) -> Iterator[Any]:
    """Predict the parts on Ray; yields once for each part that is done."""
    ray = connect(address, num_cpus=actors)
    # An actor that is lost with its machine is started again elsewhere, and its part is done again.
    kind = ray.remote(num_cpus=1, num_gpus=settings[-1], max_restarts=-1, max_task_retries=-1)(_Predictor)
    pool = importlib.import_module("ray.util").ActorPool([kind.remote(*settings) for _ in parts[:actors]])
    yield from pool.map_unordered(lambda actor, part: actor.predict.remote(part), parts)


class _Predictor:
    """An actor: a loaded model that predicts parts."""

    def __init__(self, model: Path, out: Path, top: int, backbone: str | None, gpus: float) -> None:
        self.out, self.top = out, top
        self.classifier = load(model, backbone=backbone, device="cuda" if gpus else "cpu")

    def predict(self, part: Part) -> None:
        """Write the answers for a part."""
        named, pictures = tee(read_part(part))
        found = self.classifier.predict_stream((picture for _, picture in pictures), self.top)
        answers = ((name, answer) for (name, _), (_, answer) in zip(named, found, strict=True))
        write_answers(self.out / part.name, answers)


def read_part(part: Part) -> Iterator[tuple[str, Any]]:
    """Name and picture (a path, or the bytes of an encoded picture) of every row of a part."""
    with open_parquet(Path(part.file)) as reader:
        place, row = _picture_column(reader.schema_arrow), 0
        for batch in reader.iter_batches(ROWS_AT_ONCE, row_groups=[part.group]):
            for value in batch.column(place).to_pylist():
                name = f"{part.file}#{part.group}.{row}"
                if isinstance(value, str):
                    yield value, Path(value)
                elif isinstance(value, dict):
                    yield str(value.get("path") or name), value["bytes"] or b""
                else:
                    yield name, value or b""  # a row without a picture becomes an answer with an error
                row += 1


def _picture_column(schema: Any) -> int:
    """The place of the column that holds the pictures, or of the only one where that holds paths."""
    for place, field in enumerate(schema):
        if holds_pictures(field.type) or (len(schema) == 1 and pa.types.is_string(field.type)):
            return place
    raise UserError("the parquet file has no column of pictures (bytes, or a struct with bytes)")


def write_answers(path: Path, answers: Iterator[tuple[str, Prediction]]) -> None:
    """Write one parquet file with a row for each picture."""
    rows = [
        {
            "path": name,
            "class": prediction.name or "",
            "probability": prediction.probabilities[0] if prediction.probabilities else 0.0,
            "classes": prediction.names,
            "probabilities": prediction.probabilities,
            "unknown": prediction.unknown,
            "error": prediction.error or "",
        }
        for name, prediction in answers
    ]
    with whole_file(path) as part:
        pq.write_table(pa.Table.from_pylist(rows, schema=ANSWERS), part)


def _prepare(model: Path, source: Path, out: Path, top: int) -> list[Part]:
    """Cut the source into parts and claim the folder; the same job again finds the same parts."""
    if not (out / JOB).is_file() and any(out.glob("*.parquet")):
        raise UserError(f"{out} holds parquet files of something else; name a new folder with --out")
    files = sorted(source.glob("*.parquet")) if source.is_dir() else [source] if source.suffix == ".parquet" else []
    paths = [] if files else _paths(source)
    if paths:
        files = [out / MANIFEST]
        if not files[0].is_file():  # a row group for each part
            try:
                table = pa.table({"path": pa.array(paths, pa.string())})
            except UnicodeEncodeError as error:
                raise UserError(f"the name '{printable(error.object)}' is not UTF-8; rename the file") from error
            with whole_file(files[0]) as part:
                pq.write_table(table, part, row_group_size=PICTURES_PER_PART)
    parts: list[Part] = []
    for file in files:
        with open_parquet(file) as reader:
            parts += [Part(len(parts) + group, str(file.resolve()), group) for group in range(reader.num_row_groups)]
    marks = (hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in (paths, [vars(part) for part in parts]))
    job = {"model": sha256(model / MODEL), "source": str(source.resolve()), "top": top}
    job |= zip(("pictures", "parts"), marks, strict=True)
    if (out / JOB).is_file():
        before = typed(read_json(out / JOB), dict[str, Any], JOB)
        if changed := [key for key in job if before.get(key) != job[key]]:
            raise UserError(f"{out} holds the answers of another job ('{changed[0]}' has changed); name another folder")
    write_json(out / JOB, job)
    return parts


def _paths(source: Path) -> list[str]:
    """The pictures of a folder, or those that a text file names."""
    if source.is_dir():
        paths = [str(file.resolve()) for file in list_files(source)]
    elif source.is_file():
        paths = [line.strip() for line in read_text(source, MOST_OWN_TEXT, links=True).splitlines() if line.strip()]
    else:
        raise UserError(f"{source} is not there; give a folder of pictures, parquet files, or a list of paths")
    if not paths:
        raise no_pictures(source)
    return paths
