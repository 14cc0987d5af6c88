"""Hub ids, with the hub replaced by a folder: what is asked for, what never is, what is said when it fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from clipcil.clip import CLIP, load_clip
from clipcil.clip.loading import MINI, is_hub_id
from clipcil.errors import UserError
from support.towers import make_tiny_clip, to_openai_names


@pytest.fixture
def served(tmp_path: Path, monkeypatch) -> tuple[Path, list[str]]:
    """A folder that plays the repository, and the list of files that were asked for."""
    asked: list[str] = []

    def hf_hub_download(repository: str, file: str, **_kwargs) -> str:
        asked.append(file)
        if not (tmp_path / file).is_file():
            raise EntryNotFoundError.__new__(EntryNotFoundError)
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    return tmp_path, asked


def test_hugging_face_layout(served, mini: CLIP) -> None:
    folder, asked = served
    shutil.copytree(MINI, folder, dirs_exist_ok=True)
    clip = load_clip("someone/mini-clip")
    assert clip.fingerprint == mini.fingerprint
    assert clip.name == "someone/mini-clip"
    assert not [file for file in asked if file.endswith((".bin", ".pt", ".msgpack", ".h5"))]


def test_an_index_that_is_no_text_is_one_line(served) -> None:
    folder, _ = served
    shutil.copy(MINI / "config.json", folder)
    (folder / "model.safetensors.index.json").write_bytes(b'{"weight_map": {"a": "\xff.safetensors"}}')
    with pytest.raises(UserError, match="is not UTF-8 text"):
        load_clip("someone/clip")


def test_open_clip_layout(served) -> None:
    folder, _ = served
    clip = make_tiny_clip(3, "gelu", width=128, heads=2, dim=40)
    save_file(to_openai_names(clip), folder / "open_clip_model.safetensors")
    (folder / "open_clip_config.json").write_text('{"model_cfg": {}}')
    shutil.copy(MINI / "tokenizer.json", folder)
    assert load_clip("hf-hub:laion/some-clip").fingerprint == clip.fingerprint


def test_a_strangers_pickle_is_never_fetched(served) -> None:
    folder, asked = served
    shutil.copy(MINI / "config.json", folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="'stranger/clip' has no safetensors"):
        load_clip("stranger/clip")
    assert "pytorch_model.bin" not in asked


def test_openais_own_repository_may_lack_safetensors(served, mini: CLIP) -> None:
    folder, _ = served
    shutil.copytree(MINI, folder, dirs_exist_ok=True)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert load_clip("openai/clip-x").fingerprint == mini.fingerprint


def test_offline_says_which_files_to_put_where(tmp_path: Path, monkeypatch) -> None:
    """With the real library: in offline mode and with an empty cache nothing is fetched."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"openai/clip-vit-base-patch16.*put config\.json, model\.safetensors") as error:
        load_clip("openai/clip-vit-base-patch16")
    assert "\n" not in str(error.value)


def test_any_failure_of_the_hub_is_one_line(monkeypatch) -> None:
    for failure in (LocalEntryNotFoundError("no\nnetwork"), OSError("disk\nfull"), ValueError(), RuntimeError("x\ny")):

        def fail(*_args, failure=failure, **_kwargs):
            raise failure

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
        with pytest.raises(UserError, match="give its path as the backbone") as error:
            load_clip("owner/name")
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/b", True),
        ("hf-hub:laion/CLIP-ViT", True),
        ("a/b/c", False),
        ("mini", False),
        ("./a", False),
        ("/a/b", False),
    ],
)
def test_what_a_hub_id_looks_like(name: str, expected: bool) -> None:
    assert is_hub_id(name) is expected
