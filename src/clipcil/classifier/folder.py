"""A model on disk: `model.toml` (readable), the weights (safetensors), `README.md` (a model card).

The weights go into a file named after their checksum; then `model.toml`, which names that file, is replaced in one
step; only then is the old file deleted. So a reader sees the old model or the new one, and a process killed at any
moment leaves one of the two intact. Nothing is ever unpickled.

The model before the last change can be kept beside the new one, as `previous.toml` and the weights that it names, until
the next change; `restore_previous` restores it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save

from clipcil.classifier.card import model_card
from clipcil.classifier.state import WEIGHTS, Facts, ModelState, NewerFormatError, parse_facts, to_table
from clipcil.errors import UserError, printable, quoted
from clipcil.signals import uninterrupted
from clipcil.storage import (
    LOCK,
    MOST_TENSORS,
    TEMPORARY,
    MissingFileError,
    read_bytes,
    read_toml,
    run_lock,
    sha256,
    toml_bytes,
    whole_file,
)
from clipcil.tensor_store import read_tensors

COPY = "restore the folder from a copy"
"""How errors about a damaged model end."""
MODEL, CARD, PREVIOUS = "model.toml", "README.md", "previous.toml"


@contextmanager
def hold_model(folder: Path) -> Iterator[None]:
    """Hold the folder of a model, or one that is to become one, for one writer.

    A folder that holds other things and no model is refused untouched. In the folder of a model, what a killed process
    left behind is deleted: half-written files, and weights that no model names.
    """
    refuse_other_folders(folder)
    with run_lock(folder):
        sweep(folder)
        yield


def refuse_other_folders(folder: Path) -> None:
    """Refuse a file, and a folder that holds anything but a model."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the model")
    if not folder.is_dir():
        return
    if os.path.lexists(folder / MODEL):
        if _named_weights(folder / MODEL) is None:
            raise UserError(f"{folder / MODEL} is damaged, or was not written by clipcil; {COPY}, or name a new folder")
        return
    try:  # a first lesson that was killed while it wrote leaves weights and half-written files
        others = sorted(
            path.name for path in folder.iterdir() if path.name not in (LOCK, TEMPORARY) and not _is_own_weights(path)
        )
    except OSError as error:
        raise UserError(f"cannot look into {folder}: {error.strerror or error}") from error
    if others:
        raise UserError(f"{folder} holds other things ({printable(others[0])}) and no model; name a new folder")


def sweep(folder: Path) -> None:
    """Delete the weights that no model names: a killed process left them. The caller holds the lock."""
    for path in _weights_left(folder):
        path.unlink(missing_ok=True)


def _weights_left(folder: Path) -> list[Path]:
    """Weights that no model names; an empty list if a damaged file may name any of them."""
    named = {_named_weights(folder / name) for name in (MODEL, PREVIOUS)}
    if None in named or not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.name not in named and _is_own_weights(path)]


def _named_weights(path: Path) -> str | None:
    """The weights that `model.toml` names: "" if the file is missing, None if clipcil did not write it."""
    try:
        table = read_toml(path)
    except MissingFileError:
        return ""
    except UserError:
        return None
    named = table.get("weights")
    return named if isinstance(named, str) and "format" in table and "fingerprint" in table else None


def _is_own_weights(path: Path) -> bool:
    """Whether `write_model` wrote this file: its name contains its own checksum."""
    if not WEIGHTS.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    # A sparse file can claim any size, and take days to read.
    return path.stat().st_size <= MOST_TENSORS and sha256(path)[:12] == path.name[8:20]


def write_model(folder: Path, state: ModelState, *, keep_previous: bool = False) -> Facts:
    """Replace the model in `folder`, or make the folder; returns the facts with the name of the weights.

    With `keep_previous` the model that was there is kept for `restore_previous`; otherwise nothing of it is left, nor
    of the one before it. The caller holds the lock.
    """
    for key, value in state.tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise UserError(f"the model is not written: its '{key}' holds a NaN or an infinity")
    data = save({key: value.detach().cpu().contiguous().clone() for key, value in state.tensors.items()})
    digest = hashlib.sha256(data).hexdigest()
    facts = replace(state.facts, weights=f"weights-{digest[:12]}.safetensors", sha256=digest)
    files = {facts.weights: data, CARD: _card(facts), MODEL: toml_bytes(folder / MODEL, to_table(facts))}
    if keep_previous and (folder / MODEL).is_file():
        files = {PREVIOUS: read_bytes(folder / MODEL), **files}
    _replace(folder, files, keep_previous)
    return facts


def restore_previous(folder: Path) -> Facts:
    """Bring back the model before the last change; doing it again brings back what was undone. The caller
    holds the lock."""
    facts = read_previous(folder)
    if facts is None:
        raise UserError(
            f"{folder} keeps no earlier model, so nothing can be undone: none is kept of before the first lesson, nor"
            " after a class was forgotten"
        )
    _read_weights(folder, facts)
    files = {MODEL: read_bytes(folder / PREVIOUS), PREVIOUS: read_bytes(folder / MODEL), CARD: _card(facts)}
    _replace(folder, files, keep_previous=True)
    return facts


def _replace(folder: Path, files: dict[str, bytes], keep_previous: bool) -> None:
    """Put `files` into place in their order.

    All files are written before the first is renamed, so that a full disk leaves everything as it was. `ExitStack`
    unwinds in reverse, so they are entered in reverse.
    """
    with uninterrupted():
        try:
            with ExitStack() as renames:
                for name in reversed(files):
                    renames.enter_context(whole_file(folder / name)).write_bytes(files[name])
                if not keep_previous:  # before the new model is there: a process killed now leaves less, not more
                    (folder / PREVIOUS).unlink(missing_ok=True)
        finally:
            sweep(folder)


def _card(facts: Facts) -> bytes:
    return model_card(facts).encode("utf-8", "backslashreplace")


def read_model(folder: Path, name: str = MODEL) -> Facts:
    """The contents of `model.toml`, or of `previous.toml`; a `UserError` if this program cannot use them."""
    path = folder / name
    try:
        return parse_facts(read_toml(path))
    except MissingFileError as error:
        raise MissingFileError(
            f"{folder} holds no model (no {name} in it); make one with: clipcil learn {quoted(folder)} FOLDER"
        ) from error
    except NewerFormatError as error:
        raise UserError(f"{path} {error}") from error
    except UserError as error:
        raise UserError(f"{path} is damaged ({str(error).removeprefix(f'{path} ')}); {COPY}") from error


def read_previous(folder: Path) -> Facts | None:
    """The model before the last change, if it was kept."""
    try:
        return read_model(folder, PREVIOUS)
    except MissingFileError:
        return None


def _read_weights(folder: Path, facts: Facts) -> ModelState:
    try:
        return ModelState(facts, read_tensors(folder / facts.weights, facts.sha256))
    except UserError as error:
        raise UserError(f"{error}; {COPY}") from error


def load_model(folder: Path) -> ModelState:
    """Facts and weights of the same moment, even while another process writes a new model.

    Weights that a process killed in the middle of a change left beside them are deleted, unless another process holds
    the folder.
    """
    facts = read_model(folder)
    while True:
        try:
            state = _read_weights(folder, facts)
            break
        except UserError:
            newer = read_model(folder)
            if newer.weights == facts.weights:
                raise
            facts = newer
    with suppress(UserError, OSError):  # reading a model never fails because it cannot be written to
        if _weights_left(folder):
            with run_lock(folder):
                sweep(folder)
    return state


def size_on_disk(folder: Path) -> int:
    """Bytes of the files of the model."""
    own = (MODEL, CARD, PREVIOUS)
    files = (path for path in folder.iterdir() if path.name in own or WEIGHTS.fullmatch(path.name))
    return sum(path.lstat().st_size for path in files)
