"""A model as one file: to download, to upload, and exported to run without clipcil."""

from __future__ import annotations

import errno
import io
import os
import re
import zipfile
import zlib
from pathlib import Path

from clipcil.classifier.export import Format, export
from clipcil.classifier.facts import WEIGHTS
from clipcil.classifier.model_folder import CARD, COPY, MODEL, read_model
from clipcil.errors import UserError
from clipcil.serve.keeper import Keeper

CHUNK = 2**20
DAMAGED = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    zlib.error,
    EOFError,
    IndexError,
    OSError,
    RuntimeError,
    ValueError,
)
"""What reading a damaged zip file raises."""
PACKING = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How entries may be packed. Of the others `zipfile` unpacks in one piece what it has read: 500 bytes made 400 MB."""


def pack_model(folder: Path, into: Path) -> Path:
    """Pack the model in `folder` into a zip file: only the files it needs, not others in the folder.

    If a lesson replaces the model in the meantime, the new one is packed, never a mixture of both.

    Raises:
        UserError: The model is damaged, or keeps changing.
    """
    for _ in range(20):
        weights = read_model(folder).weights
        try:
            card = [folder / CARD] if (folder / CARD).is_file() else []
            _zip(into, [folder / MODEL, *card, folder / weights])
        except FileNotFoundError as error:
            if read_model(folder).weights == weights:
                raise UserError(f"{folder / weights} is missing; {COPY}") from error
        if read_model(folder).weights == weights:
            return into
    raise UserError(f"{folder} keeps changing; try again later")


def unpack_model(archive: Path, folder: Path, most: int) -> None:
    """Unpack an uploaded model into a new folder: only the files of a model, at most `most` bytes.

    Raises:
        UserError: It is not a zip file of a model.
    """
    folder.mkdir(mode=0o700)
    try:
        with _InPieces(archive) as file, zipfile.ZipFile(file) as packed:
            entries = [entry for entry in packed.infolist() if not entry.is_dir()]
            names = [entry.filename for entry in entries]
            if len(set(names)) != len(names) or MODEL not in names or len(names) > 3:
                raise UserError(f"this zip file holds no model; {MODEL}, {CARD} and one file of weights belong in it")
            for entry in entries:
                if entry.filename not in (MODEL, CARD) and not WEIGHTS.fullmatch(entry.filename):
                    raise UserError(
                        "this zip file holds files that are not part of a model; upload one downloaded here"
                    )
                if entry.compress_type not in PACKING:
                    raise zipfile.BadZipFile("its entries are packed in an unusual way")
                with packed.open(entry) as source, (folder / entry.filename).open("wb") as target:
                    while chunk := source.read(CHUNK):
                        most -= len(chunk)
                        if most < 0:
                            raise UserError("this zip file unpacks to more than a model may have")
                        target.write(chunk)
    except DAMAGED as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # the disk; EINVAL: a place before the start
            raise
        raise UserError(
            f"this is not a zip file of a model ({type(error).__name__}); upload one downloaded here"
        ) from error


class _InPieces(io.FileIO):
    """A file that is read at most `CHUNK` bytes at a time. A zip file's directory is read in one piece, before anything
    in it can be looked at; one of a gigabyte would take several times that much memory."""

    def read(self, size: int | None = -1) -> bytes:
        left = os.fstat(self.fileno()).st_size - self.tell()
        if min(left, left if size is None or size < 0 else size) > CHUNK:
            raise zipfile.BadZipFile("its directory is too large")
        return super().read(size) or b""


def pack_export(keeper: Keeper, form: Format, into: Path) -> Path:
    """Export a copy of the model (tracing one that answers at the same time would disturb it) into a zip file."""
    out = into.with_suffix(".export")
    out.mkdir(mode=0o700)
    export(keeper.copy(), out, form)
    return _zip(into, sorted(path for path in out.iterdir() if path.is_file()))


def download_name(folder: Path, what: str) -> str:
    """A plain file name for a browser's downloads."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-.") or "model"
    return f"{stem}-{what}.zip"


def _zip(into: Path, files: list[Path]) -> Path:
    # A machine without a clock of its own, or a reproducible archive, gives files times before 1980, which zip has not.
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED, strict_timestamps=False) as packed:
        for path in files:
            packed.write(path, path.name)
    return into
