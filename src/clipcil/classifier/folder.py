"""A model on disk: `model.toml` (readable), the weights (safetensors), `README.md` (a model card).

The weights go into a file named after their checksum; then `model.toml`, which names that file, is replaced; only then
is the old file deleted. So a reader sees the old model or the new one, a killed process leaves one of them whole.
`previous.toml` and the weights that it names are the model before the last change, for `restore_previous`.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from clipcil.classifier.state import WEIGHTS, Facts, ModelState, NewerFormatError, parse_facts, to_table
from clipcil.errors import UserError, printable, quoted
from clipcil.methods.base import Method
from clipcil.methods.registry import find_method
from clipcil.signals import uninterrupted
from clipcil.storage import MissingFileError, claim, read_bytes, read_toml, run_lock, toml_bytes, whole_file
from clipcil.tensor_store import pack, read_entry

RESTORE_ADVICE = "restore the folder from a copy"
"""How errors about a damaged model end."""
MODEL, CARD, PREVIOUS = "model.toml", "README.md", "previous.toml"
CARD_TEXT = """# A clipcil model

Method {method} on backbone {backbone}, seed {seed}. {classes} classes from {pictures} pictures in {lessons} lessons. \
Its weights hold {kept}.

{accuracy}Unknown pictures: {unknown}.

```
clipcil predict . picture.jpg
clipcil learn . more-pictures/
```

It distinguishes only these classes. It was not evaluated for use on people, or where mistakes do harm.

| class | learnt | pictures |
|---|---|---|
{rows}
"""


@contextmanager
def hold_model(folder: Path) -> Iterator[None]:
    """Lock the folder of a model, existing or new, for one writer.

    A folder that holds other things and no model is refused untouched. Half-written files, and weights that no model
    names, are deleted: a killed process left them.
    """
    refuse_other_folders(folder)
    with run_lock(folder):
        sweep(folder)
        yield


def refuse_other_folders(folder: Path) -> None:
    """Refuse a file, a folder that holds anything but a model, and a model that this program cannot read."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a folder for the model")
    if os.path.lexists(folder / MODEL):
        read_model(folder)
    else:  # a first lesson that was killed while it wrote leaves weights and a model card
        claim(folder / CARD, "# A clipcil model", "model")
        claim(folder.resolve(), MODEL, "model", ignore=(CARD, *_weights(folder)))


def sweep(folder: Path) -> None:
    """Delete the weights that no model names: a killed process left them. The caller holds the lock."""
    with suppress(UserError):  # a damaged model may name any of them
        models = [read_model(folder, name) for name in (MODEL, PREVIOUS) if os.path.lexists(folder / name)]
        for name in _weights(folder) - {facts.weights for facts in models}:
            (folder / name).unlink(missing_ok=True)


def _weights(folder: Path) -> set[str]:
    """Names of the files of weights in a folder."""
    return {path.name for path in folder.glob("weights-*") if WEIGHTS.fullmatch(path.name) and path.is_file()}


def write_model(folder: Path, state: ModelState, *, keep_previous: bool = False) -> Facts:
    """Replace the model in `folder`, or make the folder; returns the facts with the name of the weights.

    With `keep_previous` the model that was there is kept for `restore_previous`; otherwise nothing of an earlier model
    is left. The caller holds the lock.
    """
    data = b"".join(pack(state.tensors))
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
    try:
        facts = read_model(folder, PREVIOUS)
    except MissingFileError as error:
        raise UserError(
            f"nothing can be undone: {folder} keeps no model of before the first lesson or before forgetting for good"
        ) from error
    _read_weights(folder, facts)
    files = {MODEL: read_bytes(folder / PREVIOUS), PREVIOUS: read_bytes(folder / MODEL), CARD: _card(facts)}
    _replace(folder, files, keep_previous=True)
    return facts


def _replace(folder: Path, files: dict[str, bytes], keep_previous: bool) -> None:
    """Put `files` into place in their order, after all of them are written: a full disk leaves everything as it was.

    `ExitStack` unwinds in reverse, so they are entered in reverse.
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
    """The model card: what the model knows, how it was made, what it holds of pictures, how to use it."""
    kind, (right, total) = find_method(facts.method), facts.right
    kept = "features of training pictures (exemplars), no picture itself"
    if not kind.keeps_exemplars:
        statistics = kept_statistics(kind) or "what was trained"
        kept = f"no picture: {statistics}, and the features of pictures kept for evaluation"
    text = CARD_TEXT.format(
        method=kind.title,
        backbone=f"`{facts.backbone}` ({facts.fingerprint})",
        seed=facts.seed,
        classes=len(facts.known),
        pictures=sum(known.pictures for known in facts.known),
        lessons=facts.lessons,
        kept=kept,
        accuracy=f"It classifies {right} of {total} pictures kept for evaluation correctly.\n" if total else "",
        unknown=facts.calibration.when_unknown,
        rows="\n".join(f"| {_cell(known.name)} | {known.learnt} | {known.pictures} |" for known in facts.known),
    )
    return text.encode("utf-8", "backslashreplace")


def _cell(text: str) -> str:
    """A name as Markdown shows it unchanged: it may hold line breaks, marks of Markdown and HTML."""
    return re.sub(r"([\\`*_\[\]<>&|~])", r"\\\1", printable(text))


def kept_statistics(kind: type[Method]) -> str:
    """The statistics that a method keeps of its training pictures, and what they reveal; "" for none, and for
    exemplars, which are counted elsewhere.

    The mean of one picture is its features, and the centred rows of a scatter are those of as many pictures.
    """
    if kind.keeps_exemplars or kind.keeps in ("nothing", "prompts"):
        return ""
    return f"{kind.keeps} (of a class with few training pictures, their features can be computed from these)"


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
        raise UserError(f"{path} is damaged ({str(error).removeprefix(f'{path} ')}); {RESTORE_ADVICE}") from error


def _read_weights(folder: Path, facts: Facts) -> ModelState:
    try:
        return ModelState(facts, read_entry(folder / facts.weights, facts.sha256)[0])
    except UserError as error:
        raise UserError(f"{error}; {RESTORE_ADVICE}") from error


def load_model(folder: Path) -> ModelState:
    """Facts and weights of the same moment, even while another process writes a new model."""
    facts = read_model(folder)
    while True:
        try:
            return _read_weights(folder, facts)
        except UserError:
            newer = read_model(folder)
            if newer.weights == facts.weights:
                raise
            facts = newer


def size_on_disk(folder: Path) -> int:
    """Bytes of the files of the model."""
    own = {MODEL, CARD, PREVIOUS, *_weights(folder)}
    return sum(path.lstat().st_size for path in folder.iterdir() if path.name in own)
