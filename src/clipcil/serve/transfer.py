"""Zip files of a model: to download, to upload, and exported to run without clipcil."""

from __future__ import annotations

import errno
import io
import os
import re
import zipfile
import zlib
from pathlib import Path

from clipcil.classifier.classifier import Classifier
from clipcil.classifier.export import Format, export
from clipcil.classifier.facts import WEIGHTS
from clipcil.classifier.model_folder import CARD, MODEL, read_model
from clipcil.errors import UserError

CHUNK = 2**20
"""Bytes read at a time."""
DAMAGED = (zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, EOFError, IndexError, RuntimeError, ValueError)
"""Errors of `zipfile` for a damaged file, besides an OSError with EINVAL for a place before the start."""
PACKING = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Allowed compression. `zipfile` unpacks other kinds in one piece: 500 bytes made 400 MB."""


def pack_model(folder: Path, into: Path) -> Path:
    """Pack the model in `folder` into the zip file `into`: the files of the model, and no others.

    If a lesson replaces the model meanwhile, the new one is packed, never a mixture of both.

    Raises:
        UserError: The model is damaged, or keeps changing.
    """
    for _ in range(20):
        weights = read_model(folder).weights
        try:
            _zip(into, [folder / MODEL, *folder.glob(CARD), folder / weights])
        except FileNotFoundError:
            continue
        if read_model(folder).weights == weights:
            return into
    raise UserError(f"{folder / weights} is missing, or the model keeps changing; try again later")


def unpack_model(archive: Path, folder: Path, most: int) -> None:
    """Unpack an uploaded model into the new folder `folder`: only files of a model, at most `most` bytes.

    Raises:
        UserError: `archive` is not a zip file of a model.
    """
    folder.mkdir(mode=0o700)
    try:
        with _InPieces(archive) as file, zipfile.ZipFile(file) as packed:
            entries = [entry for entry in packed.infolist() if not entry.is_dir()]
            names = [entry.filename for entry in entries]
            others = [name for name in names if name not in (MODEL, CARD) and not WEIGHTS.fullmatch(name)]
            if others or len(set(names)) != len(names) or MODEL not in names or len(names) > 3:
                raise UserError(f"the zip file must hold {MODEL}, {CARD} and one file of weights, and nothing else")
            for entry in entries:
                if entry.compress_type not in PACKING:
                    raise zipfile.BadZipFile("unusual compression")
                with packed.open(entry) as source, (folder / entry.filename).open("wb") as target:
                    while chunk := source.read(CHUNK):
                        most -= len(chunk)
                        if most < 0:
                            raise UserError("the zip file unpacks to more bytes than a model may have")
                        target.write(chunk)
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise UserError(f"not a zip file of a model ({type(error).__name__}); upload one downloaded here") from error


class _InPieces(io.FileIO):
    """A file that refuses to read more than `CHUNK` bytes at once.

    `zipfile` reads a zip file's directory in one piece; a directory of a gigabyte takes several times that in memory.
    """

    def read(self, size: int | None = -1) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        if (left if size is None or size < 0 else min(left, size)) > CHUNK:
            raise zipfile.BadZipFile("the directory is too large")
        return super().read(size) or b""


def pack_export(model: Classifier, form: Format, into: Path) -> Path:
    """Export a model into the zip file `into`. Give a copy: tracing disturbs predictions made at the same time."""
    out = into.with_suffix(".export")
    out.mkdir(mode=0o700)
    export(model, out, form)
    return _zip(into, sorted(path for path in out.iterdir() if path.is_file()))


def download_name(folder: Path, what: str) -> str:
    """A plain file name for a browser's downloads."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"
    return f"{stem}-{what}.zip"


def _zip(into: Path, files: list[Path]) -> Path:
    # Without strict timestamps, because a machine without a clock gives files times before 1980, which zip lacks.
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED, strict_timestamps=False) as packed:
        for path in files:
            packed.write(path, path.name)
    return into
