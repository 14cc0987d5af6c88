"""The "python version" of CIFAR-100: pickles, read only when their checksum is the official one.

A pickle can run any code. So a file is opened only if its MD5 is the one its authors published, and even then by a
reader that can build nothing but arrays, lists, dicts, text and numbers.
"""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from PIL import Image

from clipcil.data.pictures import PictureSet
from clipcil.errors import UserError

ARCHIVE, FOLDER = "cifar-100-python.tar.gz", "cifar-100-python"
MD5 = {
    ARCHIVE: "eb9058c3a382ffc7106e4002c42a8d85",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "meta": "7973b15100ade9c7d40fb424638fde48",
}
"""As published with the dataset."""


class ArrayPictures(Sequence[Image.Image]):
    """Rows of 3,072 bytes (red, green, blue planes of 32×32), made into pictures one at a time."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Image.Image]: ...
    def __getitem__(self, index: int | slice) -> Image.Image | Sequence[Image.Image]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Image.fromarray(np.ascontiguousarray(self.rows[index].reshape(3, 32, 32).transpose(1, 2, 0)))


def find_python_version(root: Path) -> Path | None:
    """The archive or the folder of pickles that `root` is or holds."""
    if root.name == ARCHIVE and root.is_file():
        return root
    for folder in (root, root / FOLDER):
        if all((folder / name).is_file() for name in ("train", "test", "meta")):
            return folder
    return root / ARCHIVE if (root / ARCHIVE).is_file() else None


def read_python_version(source: Path) -> tuple[list[str], tuple[PictureSet, PictureSet]]:
    """Class names as in the files, and the training and test pictures."""
    contents = _read_archive(source) if source.is_file() else _read_folder(source)
    names = [bytes(name).decode() for name in _load(contents["meta"], source)[b"fine_label_names"]]
    train, test = (_pictures(part, contents[part], source) for part in ("train", "test"))
    return names, (train, test)


def _pictures(part: str, content: bytes, source: Path) -> PictureSet:
    table = _load(content, source)
    rows, labels = np.asarray(table[b"data"]), torch.tensor(table[b"fine_labels"], dtype=torch.int64)
    if rows.dtype != np.uint8 or rows.shape != (len(labels), 3072):
        raise UserError(f"{source}: '{part}' does not hold CIFAR-100 pictures but {rows.dtype} {rows.shape}")
    return PictureSet(f"cifar100 {part}", ArrayPictures(rows), labels, f"cifar100-{MD5[part][:16]}")


def _read_folder(folder: Path) -> dict[str, bytes]:
    contents = {}
    for name in ("train", "test", "meta"):
        try:
            contents[name] = (folder / name).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {folder / name}: {error.strerror or error}") from error
        _check(hashlib.md5(contents[name], usedforsecurity=False).hexdigest(), MD5[name], folder / name)
    return contents


def _read_archive(archive: Path) -> dict[str, bytes]:
    """Read from the archive itself: nothing is unpacked to disk."""
    try:
        with archive.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False))
        _check(digest.hexdigest(), MD5[ARCHIVE], archive)
        with tarfile.open(archive) as tar:
            contents = {name: _member(tar, f"{FOLDER}/{name}") for name in ("train", "test", "meta")}
    except (OSError, KeyError, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{archive} cannot be read ({error}); download it again") from error
    for name, content in contents.items():
        _check(hashlib.md5(content, usedforsecurity=False).hexdigest(), MD5[name], archive / name)
    return contents


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)
    if file is None:
        raise KeyError(f"{name} is not a file")
    return file.read()


def _check(found: str, wanted: str, what: Path) -> None:
    if found != wanted:
        raise UserError(
            f"{what} is not the official file of CIFAR-100 (MD5 {found}, not {wanted}) and is not opened;"
            " download it again"
        )


class _Plain(pickle.Unpickler):
    """Builds arrays, lists, dicts, text and numbers; a pickle that asks for anything else is refused."""

    ALLOWED: dict[tuple[str, str], Callable[..., Any]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")):
            return _empty_array
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.ALLOWED[module, name]


def _empty_array(kind: type, shape: tuple[int, ...], letter: bytes | str) -> np.ndarray:
    """What numpy pickles an array as: an empty one, whose state is set after that."""
    if kind is not np.ndarray or tuple(shape) != (0,):
        raise pickle.UnpicklingError("it does not hold a plain array")
    return np.ndarray((0,), np.uint8)


def _load(content: bytes, source: Path) -> dict[bytes, Any]:
    try:
        table = _Plain(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a pickle can fail in any way its bytes tell it to
        raise UserError(f"{source} holds a pickle that is not opened ({error})") from error
    if not isinstance(table, dict):
        raise UserError(f"{source} holds a pickle of {type(table).__name__}, not of CIFAR-100")
    return table
