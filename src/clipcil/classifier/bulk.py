"""Prediction of any number of pictures on Ray.

The source is cut into parts of `PART` pictures (parquet files: into their row groups). Ray Data hands the parts to a
pool of actors, each with the model loaded; an actor writes the answers for a part to one parquet file, under another
name first. The driver sees part numbers only, so its memory does not grow with the pictures, and a job that is stopped
and given again does only the parts whose file is not there.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipcil.classifier.predict import Prediction
from clipcil.cluster import connect
from clipcil.data.parquet import ROWS, holds_pictures, open_parquet
from clipcil.data.sources import list_files, no_pictures
from clipcil.errors import UserError, printable
from clipcil.settings import typed
from clipcil.storage import read_json, run_lock, sha256, whole_file, write_json

PART = 1000
"""Pictures per part."""
JOB, MANIFEST = "job.json", "pictures.parquet"


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
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Predict every picture of `source` and write parquet files to `out`.

    Columns: path, class (empty where unknown or broken), probability, classes and probabilities of the likeliest
    `top`, unknown, error. A picture that cannot be read is a row with an error.

    Args:
        model: Folder of a taught model; every node of the cluster must be able to read it.
        source: A folder of pictures, a parquet file or a folder of them, or a text file with one path per line.
        out: Folder for the answers, on storage that every node can write to. Given again, finished parts are kept.
        top: Number of classes named for each picture.
        actors: Models working at the same time.
        gpus: GPUs of each; 0: the CPU.
        address: Address of a Ray cluster; None starts one on this machine.
        backbone: Path of the model's backbone, if it has moved.
        on_progress: Called with the number of parts done and of all parts.

    Returns:
        Numbers of `pictures`, `errors` and `parts` in `out`.

    Raises:
        UserError: Ray is missing, the source has no pictures, or `out` holds another job.
    """
    with run_lock(out):
        parts = _prepare(model, source, out, top)
        missing = [part for part in parts if not (out / part.name).is_file()]
        done = len(parts) - len(missing)
        on_progress(done, len(parts))
        if missing:
            _run(missing, (str(model.resolve()), str(out.resolve()), top, backbone, gpus), actors, gpus, address,
                 lambda count: on_progress(done + count, len(parts)))  # fmt: skip
        return _count(out, parts)


def _run(
    parts: Sequence[Part],
    settings: tuple[Any, ...],
    actors: int,
    gpus: float,
    address: str | None,
    on_part: Callable[[int], None],
) -> None:
    connect(address, num_cpus=actors)
    ray_data = importlib.import_module("ray.data")
    ray_data.DataContext.get_current().enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    data = ray_data.from_items([vars(part) for part in parts], override_num_blocks=len(parts))
    pool = ray_data.ActorPoolStrategy(size=min(actors, len(parts)))
    options = {"batch_size": 1, "num_cpus": 1, "num_gpus": gpus or None}
    results = data.map_batches(_Predictor, fn_constructor_args=settings, compute=pool, **options)
    for count, _ in enumerate(results.iter_rows(), start=1):
        on_part(count)


class _Predictor:
    """An actor: a loaded model that predicts parts."""

    def __init__(self, model: str, out: str, top: int, backbone: str | None, gpus: float) -> None:
        from clipcil.classifier.load import load

        self.out, self.top = Path(out), top
        self.classifier = load(model, backbone=backbone, device="cuda" if gpus else "cpu")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        for number, file, group in zip(batch["number"], batch["file"], batch["group"], strict=True):
            part = Part(int(number), str(file), int(group))
            write_answers(self.out / part.name, self.answers(part))
        return {"number": batch["number"]}

    def answers(self, part: Part) -> Iterator[tuple[str, Prediction]]:
        """The path and the prediction of every picture of a part."""
        names: list[str] = []

        def pictures() -> Iterator[Any]:
            for name, picture in read_part(part):
                names.append(name)
                yield picture

        for index, (_, prediction) in enumerate(self.classifier.predict_stream(pictures(), self.top)):
            yield names[index], prediction


def read_part(part: Part) -> Iterator[tuple[str, Any]]:
    """Name and picture (a path, or the bytes of an encoded picture) of every row of a part."""
    with open_parquet(Path(part.file)) as reader:
        place, row = _picture_column(reader.schema_arrow), 0
        for batch in reader.iter_batches(ROWS, row_groups=[part.group]):
            for value in batch.column(place).to_pylist():
                name = f"{part.file}#{part.group}.{row}"
                if isinstance(value, str):
                    yield value, Path(value)
                elif isinstance(value, dict):
                    yield str(value.get("path") or name), value["bytes"] or b""
                else:
                    yield name, value or b""  # a row without a picture gets its line, as one that cannot be read
                row += 1


def _picture_column(schema: Any) -> int:
    """The place of the column that holds the pictures, or of the only one where that holds paths."""
    import pyarrow as pa

    found = [place for place, field in enumerate(schema) if holds_pictures(field.type)]
    if not found and len(schema) == 1 and pa.types.is_string(schema.field(0).type):
        found = [0]
    if not found:
        raise UserError("the parquet file has no column of pictures (bytes, or a struct with bytes)")
    return found[0]


def write_answers(path: Path, answers: Iterator[tuple[str, Prediction]]) -> None:
    """One parquet file with a row for each picture."""
    import pyarrow as pa
    import pyarrow.parquet as pq

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
    text, number = pa.string(), pa.float32()
    fields = [("path", text), ("class", text), ("probability", number), ("classes", pa.list_(text))]
    fields += [("probabilities", pa.list_(number)), ("unknown", pa.bool_()), ("error", text)]
    with whole_file(path) as part:
        pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(fields)), part)


def _prepare(model: Path, source: Path, out: Path, top: int) -> list[Part]:
    """Cut the source into parts and claim the folder; the same job again finds the same parts."""
    facts = {"model": sha256(model / "model.toml"), "source": str(source.resolve()), "top": top}
    if (out / JOB).is_file():
        found = typed(read_json(out / JOB), dict, JOB)
        different = [key for key, value in facts.items() if found.get(key) != value]
        if different:
            raise UserError(f"{out} holds the answers of another job (another {different[0]}); name another folder")
    elif out.is_dir() and any(entry.suffix == ".parquet" for entry in out.iterdir()):
        raise UserError(f"{out} holds parquet files of something else; name a new folder with --out")
    files, marks = _parquet_files(source), {}
    if not files:
        paths = _paths(source)
        marks["pictures"] = _mark(paths)
        if not (out / MANIFEST).is_file():
            _write_manifest(paths, out / MANIFEST)
        files = [out / MANIFEST]
    parts = [Part(number, str(file.resolve()), group) for number, (file, group) in enumerate(_groups(files))]
    marks["parts"] = _mark([vars(part) for part in parts])
    if (out / JOB).is_file():
        found = typed(read_json(out / JOB), dict, JOB)
        if any(found.get(key, mark) != mark for key, mark in marks.items()):
            raise UserError(f"{source} has changed since {out} was begun; name another folder")
    write_json(out / JOB, {**facts, **marks})
    return parts


def _mark(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _parquet_files(source: Path) -> list[Path]:
    if source.is_dir():
        return sorted(source.glob("*.parquet"))
    return [source] if source.suffix == ".parquet" else []


def _groups(files: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    for file in files:
        with open_parquet(file) as reader:
            count = reader.num_row_groups
        yield from ((file, group) for group in range(count))


def _paths(source: Path) -> list[str]:
    """The pictures of a folder, or those that a text file names."""
    if source.is_dir():
        paths = [str(file.resolve()) for file in list_files(source)]
    elif source.is_file():
        try:
            with source.open(encoding="utf-8") as lines:
                paths = [line.strip() for line in lines if line.strip()]
        except UnicodeDecodeError as error:
            raise UserError(
                f"{source} is not a list of paths (UTF-8 text); give such a list, a folder of pictures or parquet files"
            ) from error
    else:
        raise UserError(f"{source} is not there; give a folder of pictures, parquet files, or a list of paths")
    if not paths:
        raise no_pictures(source) if source.is_dir() else UserError(f"there are no pictures in {source}")
    return paths


def _write_manifest(paths: Sequence[str], path: Path) -> None:
    """The paths of all pictures, a row group for each part."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("path", pa.string())])
    with whole_file(path) as part, pq.ParquetWriter(part, schema) as writer:
        for start in range(0, len(paths), PART):
            try:
                table = pa.table({"path": paths[start : start + PART]}, schema=schema)
                writer.write_table(table, row_group_size=PART)
            except UnicodeEncodeError as error:
                raise UserError(f"the name '{printable(error.object)}' is not UTF-8; rename the file") from error


def _count(out: Path, parts: Sequence[Part]) -> dict[str, int]:
    import pyarrow.parquet as pq

    pictures = errors = 0
    for part in parts:
        column = pq.read_table(out / part.name, columns=["error"])["error"]
        pictures += len(column)
        errors += sum(1 for value in column if value.as_py())
    return {"pictures": pictures, "errors": errors, "parts": len(parts)}
