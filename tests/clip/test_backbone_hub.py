"""Hub ids, with the hub replaced by a folder: the files that are fetched, and errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from clipcil.clip import CLIP, load_clip
from clipcil.clip.loading import HUB_ID, MINI
from support.towers import make_tiny_clip, refused, to_openai_names


class NoEntryError(EntryNotFoundError):
    """The hub has no such file; the library's own error needs a response."""

    def __init__(self) -> None:
        Exception.__init__(self, "no such file")


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """A folder that plays the repository, and the list of files that were asked for."""
    asked: list[str] = []

    def hf_hub_download(repository: str, file: str, **_kwargs: Any) -> str:
        asked.append(file)
        if not (tmp_path / file).is_file():
            raise NoEntryError
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return tmp_path, asked


def test_hugging_face_layout(served: tuple[Path, list[str]], mini: CLIP) -> None:
    folder, asked = served
    shutil.copytree(MINI, folder, dirs_exist_ok=True)
    clip = load_clip("someone/mini-clip")
    assert (clip.fingerprint, clip.name, clip.pinned) == (mini.fingerprint, *2 * ("someone/mini-clip",))
    assert not [file for file in asked if file.endswith((".bin", ".pt", ".msgpack", ".h5"))]


def test_open_clip_layout(served: tuple[Path, list[str]]) -> None:
    folder, _ = served
    clip = make_tiny_clip(3, "gelu", width=128, heads=2, dim=40)
    save_file(to_openai_names(clip), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text('{"model_cfg": {}}')
    shutil.copy(MINI / "tokenizer.json", folder)
    assert load_clip("hf-hub:laion/some-clip").fingerprint == clip.fingerprint


def test_a_pickle_is_fetched_from_openais_own_repositories_only(served: tuple[Path, list[str]], mini: CLIP) -> None:
    folder, asked = served
    shutil.copytree(MINI, folder, dirs_exist_ok=True)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    refused("stranger/clip", "stranger/clip")
    assert "pytorch_model.bin" not in asked
    assert load_clip("openai/clip-x").fingerprint == mini.fingerprint


def test_offline_says_which_files_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real library: in offline mode and with an empty cache nothing is fetched."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    refused("openai/clip-vit-base-patch16", "openai/clip-vit-base-patch16", "config.json, model.safetensors")


@pytest.mark.parametrize("failure", [LocalEntryNotFoundError("no\nnetwork"), ValueError(), RuntimeError("x\ny")])
def test_any_failure_of_the_hub_is_one_line(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise failure

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    refused("owner/name", "owner/name")


def test_what_a_hub_id_looks_like() -> None:
    assert all(map(HUB_ID.fullmatch, ("a/b", "hf-hub:laion/CLIP-ViT", "a/b@v1")))
    assert not any(map(HUB_ID.fullmatch, ("a/b/c", "mini", "./a", "/a/b")))
