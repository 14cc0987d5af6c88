"""What runs share on disk: trained stages, and the features of the towers they trained.

Stage 1 of DMC depends on the backbone, the task's pictures and texts, its own settings and the seed, and on nothing
else: runs that differ in calibration, prompts, M, β or λ have the same tower after it, and the same features of every
picture (`Reader` keeps those here too). The key of what is kept is a hash of everything it depends on, the code, the
number of threads and the processor's instructions included: a hit gives the same bits as computing it again.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from clipcil.errors import UserError
from clipcil.files import cache_folder, part_names, write_bytes
from clipcil.reading import read_tensors

MOST_BYTES = 4 * 2**30
"""The cache holds no more than this; what was unused for the longest time is deleted first."""
SIZE = "CLIPCIL_STAGES_GIB"
"""Environment variable with another bound: ten towers of ViT-B/16 take 3.4 GiB, and a grid over class orders or seeds
comes back to a tower only after those of all of them."""
LOOKS = 64
"""A process looks at what the cache holds when it has saved this part of it, and exceeds the bound by no more."""
ABANDONED = 3600
"""Seconds after which a file that is half written has no writer any more."""
Given = Tensor | str


class RunCache:
    """Tensors in a folder, those of a stage or of a tower in a file named by their key and their checksum."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self.folder, self.most_bytes = folder, most_bytes
        self.hits = 0
        self._unseen = most_bytes
        """Bytes that this process has saved since it last looked at what the folder holds."""

    @classmethod
    def of_user(cls) -> RunCache:
        """The cache in the user's cache folder, at most as large as `$CLIPCIL_STAGES_GIB` says.

        Raises:
            UserError: The variable is no number above 0.
        """
        words = os.environ.get(SIZE, "").strip()
        try:
            size = float(words) * 2**30 if words else MOST_BYTES
        except ValueError:
            size = 0
        if not 0 < size < float("inf"):
            raise UserError(f"{SIZE} is '{words}'; give the largest size of the cache of stages in GiB, such as 20")
        return cls(cache_folder() / "stages", int(size))

    def key(self, depends_on: Iterable[Given]) -> str:
        """The hash of everything that the tensors depend on."""
        machine = f"{torch.get_num_threads()} {torch.backends.cpu.get_cpu_capability()}"  # some share their folders
        digest = hashlib.sha256(f"{_code()} {torch.__version__} {machine}".encode())
        for each in depends_on:
            if isinstance(each, Tensor):
                held = each.detach().cpu().contiguous()
                digest.update(f"{held.dtype} {tuple(held.shape)};".encode())
                digest.update(held.flatten().view(torch.uint8).numpy().tobytes())
            else:
                digest.update(f"{len(each)} {each};".encode())
        return digest.hexdigest()

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The tensors kept under `key`; None where there are none, or where they are damaged (they are deleted)."""
        for path in self.folder.glob(f"{key}-*.safetensors"):
            try:
                tensors = read_tensors(path, path.stem.removeprefix(f"{key}-"), self.most_bytes)
            except UserError:
                with suppress(OSError):
                    path.unlink()
                continue
            with suppress(OSError):
                os.utime(path)
            self.hits += 1
            return tensors
        return None

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors under `key`. A disk that is full is no reason to stop a run."""
        from safetensors.torch import save

        content = save({name: value.detach().cpu().contiguous() for name, value in tensors.items()})
        if len(content) > self.most_bytes:
            return
        with suppress(UserError):
            write_bytes(self.folder / f"{key}-{hashlib.sha256(content).hexdigest()}.safetensors", content)
            self._unseen += len(content)
            if self._unseen * LOOKS > self.most_bytes:  # not at every save: a grid keeps thousands of small files
                self._shrink()
                self._unseen = 0

    def _shrink(self) -> None:
        """Delete what was unused for the longest time until the rest fits; another process may be doing the same.

        A file that a killed process left half written is deleted first; one that another process is writing is young.
        """
        for name in part_names(self.folder, lambda _: True):
            with suppress(OSError):
                if time.time() - (self.folder / name).stat().st_mtime > ABANDONED:
                    (self.folder / name).unlink()
        found = []
        for path in self.folder.glob("*-*.safetensors"):
            with suppress(OSError):
                found.append((path.stat().st_mtime, path.stat().st_size, path))
        spare = self.most_bytes - sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if spare >= 0:
                return
            with suppress(OSError):
                path.unlink()
            spare += size


@cache
def _code() -> str:
    """A hash of the code that training uses: after a change nothing old is found."""
    root, packages = Path(__file__).parent, ("clip", "data", "training", "methods", "prompts")
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
