"""Backbones from the Hugging Face hub: safetensors only, offline mode honoured, one line when it cannot be had."""

from __future__ import annotations

import re
from pathlib import Path

from clipcil.clip import open_clip
from clipcil.clip.tokenizer import FILES, Tokenizer
from clipcil.clip.weights import shard_names
from clipcil.errors import UserError, first_line
from clipcil.network import ASK_FIRST, downloads_allowed

OPENAI_REPOSITORY = "openai/clip-vit-base-patch16"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")


def is_id(name: str) -> bool:
    """Whether `name` has the form owner/name or owner/name@revision; open_clip's `hf-hub:` before it is allowed."""
    return _ID.fullmatch(name.removeprefix("hf-hub:")) is not None


def pinned(name: str, folder: Path) -> str:
    """`owner/name` with the commit that `folder`, found by `download`, is of: `owner/name@0a1b…`."""
    commit = folder.name if folder.parent.name == "snapshots" else ""
    return name if "@" in name or not commit else f"{name}@{commit}"


def download(name: str) -> Path:
    """The folder of the cache that holds the repository's weights, config, tokenizer and preprocessing.

    `owner/name@revision` names a commit, a tag or a branch; without one it is the newest commit of the main branch.
    """
    repository = name.removeprefix("hf-hub:")
    config = _file(repository, "config.json")
    weights = _file(repository, "model.safetensors") if config else None
    if config and not weights and (index := _file(repository, "model.safetensors.index.json")):
        for shard in shard_names(index):
            weights = _file(repository, shard)
    if config and not weights and repository.startswith("openai/"):
        # Some of OpenAI's own repositories have no safetensors. The file is read as tensors only (see `openai`).
        weights = _file(repository, "pytorch_model.bin")
    if not weights:
        config = _file(repository, open_clip.CONFIG)
        weights = config and _file(repository, open_clip.WEIGHTS[0])
    if not weights or not config:
        if not downloads_allowed():
            raise UserError(f"'{repository}' is not on this machine; {ASK_FIRST}")
        raise UserError(f"hub repository '{repository}' has no safetensors weights of a CLIP; {_by_hand()}")
    for file in (*_TOKENIZER_FILES, "preprocessor_config.json"):
        _file(repository, file)
    return weights.parent


def openai_tokenizer(folder: Path, context: int) -> Tokenizer:
    """OpenAI's vocabulary, which its own and open_clip's files leave out: from beside the weights, else the hub."""
    if (folder / "tokenizer.json").is_file() or (folder / "vocab.json").is_file():
        return Tokenizer.from_folder(folder, context)
    try:
        found = _file(OPENAI_REPOSITORY, "tokenizer.json")
    except UserError:
        found = None
    if found is None:
        raise UserError(f"no tokenizer beside the weights: put {FILES} of {OPENAI_REPOSITORY} in {folder.resolve()}")
    return Tokenizer.from_folder(found.parent, context)


def _file(repository: str, file: str) -> Path | None:
    """A file of `owner/name[@revision]`, from the cache or the hub; None where the repository has none."""
    repository, _, revision = repository.partition("@")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        if not downloads_allowed():  # hf_hub_download(local_files_only=True) would still ask the hub something else
            found = try_to_load_from_cache(repository, file, revision=revision or None)
            return Path(found) if isinstance(found, str) else None
        return Path(hf_hub_download(repository, file, revision=revision or None))
    except LocalEntryNotFoundError as error:
        raise UserError(f"cannot get {file} of '{repository}' from the hub; {_by_hand()}") from error
    except EntryNotFoundError:
        return None
    except Exception as error:  # gated, misspelt, no network: the library has a class for each
        raise UserError(f"cannot get '{repository}' from the hub ({first_line(error)}); {_by_hand()}") from error


def _by_hand() -> str:
    return f"put config.json, model.safetensors and {FILES} in a folder and give its path as the backbone"
