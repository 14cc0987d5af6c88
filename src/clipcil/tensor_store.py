"""One store of tensors on disk: checkpoints and stages of a run, and stages and features that runs share.

An entry is a safetensors file named by its key and its SHA-256, with facts as JSON in its header. Nothing is unpickled,
every float is finite, and a file that does not match its name is not read.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from clipcil.errors import UserError
from clipcil.limits import MOST_ENTRIES, MOST_HEADER, MOST_TENSORS
from clipcil.signals import uninterrupted
from clipcil.storage import cache_folder, open_regular, parse_json, read_bytes, refuse_links, write_bytes

SHARED_BYTES = 4 * 2**30
"""Default size of the user's cache of trained stages and features; `TensorStore.of_user` is this cache."""
STAGES_GIB = "CLIPCIL_STAGES_GIB"
"""Environment variable for another size. Ten towers of ViT-B/16 take 3.4 GiB, and a grid over class orders reuses a
tower only after all other orders have run, so the cache must hold the towers of all orders."""
CHECKS = 64
"""The size of a store is checked after each 1/64 of its limit that a process has written."""
ANY_SHA256 = "?" * 64
"""A pattern for the end of a file's name."""
DTYPES = {torch.int64: "I64", torch.float64: "F64", torch.float32: "F32", torch.int32: "I32", torch.bfloat16: "BF16"}
DTYPES |= {torch.float16: "F16", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
"""Their names in safetensors files, in the order of the tensors there."""
Input = Tensor | str
"""An input of a stage: a tensor by its bytes, a text by its letters."""


class TensorStore:
    """Tensors in a folder, an entry for each key.

    Args:
        folder: Where the files are; it is made when the first entry is saved.
        most_bytes: The store holds no more than this; entries unused for the longest time are deleted first.
    """

    def __init__(self, folder: Path, most_bytes: int = MOST_TENSORS) -> None:
        refuse_links(folder)
        self.folder, self.most_bytes = folder, most_bytes
        self.hits = 0
        self._unchecked = most_bytes  # bytes saved since the size was last checked

    @classmethod
    def of_user(cls) -> Self:
        """The store in the user's cache folder, at most as large as `$CLIPCIL_STAGES_GIB` says."""
        words = os.environ.get(STAGES_GIB, "").strip()
        try:
            size = float(words) * 2**30 if words else SHARED_BYTES
        except ValueError:
            size = 0
        if not 0 < size < float("inf"):
            raise UserError(f"{STAGES_GIB} is '{words}'; give the size of the cache of stages in GiB, such as 20")
        return cls(cache_folder() / "stages", int(size))

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The tensors saved under `key`; None where there are none, or where the file is damaged (it is deleted)."""
        for path in self.paths(key):
            try:
                tensors = read_entry(path)[0]
            except UserError:
                with suppress(OSError):
                    path.unlink()
                continue
            with suppress(OSError):
                os.utime(path)
            self.hits += 1
            return tensors
        return None

    def save(self, key: str, tensors: dict[str, Tensor], facts: dict[str, Any] | None = None) -> Path:
        """Replace the entry of `key` by these tensors and facts; a value that is not finite is refused."""
        parts = pack(tensors, facts)
        path = self.folder / f"{key}-{sha256(parts)}.safetensors"
        if (size := sum(map(len, parts))) > self.most_bytes:
            return path
        with uninterrupted():
            older = [each for each in self.paths(key) if each != path]
            write_bytes(path, *parts)
            for each in older:
                each.unlink(missing_ok=True)
        self._unchecked += size
        if self._unchecked * CHECKS > self.most_bytes:  # listing the folder at every save took a fifth of a short run
            self._shrink()
            self._unchecked = 0
        return path

    def paths(self, key: str) -> list[Path]:
        """The files saved under `key`."""
        return list(self.folder.glob(f"{key}-{ANY_SHA256}.safetensors"))

    def all_keys(self) -> list[str]:
        """The keys of all entries, sorted."""
        return sorted({path.stem[:-65] for path in self.paths("*")})

    def drop(self, key: str) -> None:
        """Delete the entry of `key`."""
        for path in self.paths(key):
            path.unlink(missing_ok=True)

    def _shrink(self) -> None:
        """Delete the entries unused for the longest time until the rest fits; another process may be doing the same."""
        found = self._entries()
        spare = self.most_bytes - sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if spare >= 0:
                return
            with suppress(OSError):
                path.unlink()
            spare += size

    def _entries(self) -> list[tuple[float, int, Path]]:
        """When each file was last used, its bytes and its place; another process may be deleting some."""
        found = []
        for path in self.paths("*"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        return found

    def held_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(size for _, size, _ in self._entries())


def pack(tensors: Mapping[str, Tensor], facts: dict[str, Any] | None = None) -> list[bytes | memoryview]:
    """The contents of a safetensors file, as `safetensors.torch.save` makes them, in parts: the bytes of tensors on a
    CPU are not copied. A value that is not finite is refused.
    """
    header: dict[str, Any] = {} if facts is None else {"__metadata__": {"facts": json.dumps(facts, allow_nan=False)}}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, value in sorted(tensors.items(), key=lambda item: (list(DTYPES).index(item[1].dtype), item[0])):
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"training diverged: '{name}' holds a NaN or an infinity; try a lower learning rate")
        data = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        start, end = end, end + len(data)
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [start, end]}
        parts.append(data)
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *parts]


def sha256(parts: Iterable[bytes | memoryview]) -> str:
    """The SHA-256 of the bytes of all parts, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_entry(path: Path, sha256: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and facts of a safetensors file, whose name ends in its checksum unless `sha256` is given.

    A `UserError` names a damaged file, a number type that clipcil does not use, and a NaN or infinity.
    """
    check_header(path)
    data = read_bytes(path, MOST_TENSORS)
    if hashlib.sha256(data).hexdigest() != (sha256 or path.stem[-64:]):
        raise UserError(f"{path} does not match its checksum")
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({type(error).__name__})") from error
    for key, value in tensors.items():
        if value.dtype not in DTYPES:
            raise UserError(f"{path}: '{key[:80]}' holds {value.dtype}, which is not used here")
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"{path}: '{key[:80]}' holds a NaN or an infinity")
    header = parse_json(data[8 : 8 + int.from_bytes(data[:8], "little")], str(path))
    return tensors, parse_json(header.get("__metadata__", {}).get("facts", "{}"), str(path))


def check_header(path: Path, *, links: bool = False) -> None:
    """Refuse a safetensors file that is too large, or that lists too many tensors, before more than its header is read.

    Symbolic links are followed only with `links`, as by `open_regular`.
    """
    with open_regular(path, links=links) as file:
        length = int.from_bytes(file.read(8), "little")
        large = file.seek(0, os.SEEK_END) > MOST_TENSORS or length > MOST_HEADER
        file.seek(8)
        if large or file.read(length).count(b"{") > MOST_ENTRIES:
            raise UserError(f"{path} is not read: it is larger than {MOST_TENSORS >> 30} GiB, or has too many tensors")


def content_key(inputs: Iterable[Input]) -> str:
    """A hash of everything that the tensors of an entry depend on.

    The code, the number of threads and the processor's instructions are part of it: a hit gives the same bits as
    computing the tensors again.
    """
    machine = f"{torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}"  # some machines share folders
    digest = hashlib.sha256(f"{_code()} {torch.__version__} {machine}".encode())
    for each in inputs:
        if isinstance(each, Tensor):
            held = each.detach().cpu().contiguous()
            digest.update(f"{held.dtype} {tuple(held.shape)};".encode())
            digest.update(held.flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{len(each)} {each};".encode())
    return digest.hexdigest()


@cache
def _code() -> str:
    """A hash of the code that training uses: after a change nothing old is found."""
    root, packages = Path(__file__).parent, ("clip", "data", "training", "methods", "prompts")
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
