"""The same weights under OpenAI's and open_clip's names give the same features."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from clipcil.clip import CLIP, load_clip, openai
from clipcil.clip.loading import MINI
from clipcil.storage import sha256
from support.towers import Bomb, make_tiny_clip, refused, to_openai_names, write_openai_vocabulary


def wide(activation: str, heads: int = 2) -> CLIP:
    """Width 128 makes two heads by OpenAI's rule of 64 per head."""
    return make_tiny_clip(3, activation, width=128, heads=heads, dim=40)


def same_features(clip: CLIP, other: CLIP, off: float = 1e-6) -> None:
    assert clip.config.vision == other.config.vision
    torch.testing.assert_close(clip.scale, other.scale, atol=off, rtol=off)
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(clip.vision(pixels).features, other.vision(pixels).features, atol=off, rtol=off)
    texts = ["a photo of a cat", "octopus"]
    torch.testing.assert_close(clip.encode_texts(texts), other.encode_texts(texts), atol=off, rtol=off)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(MINI / "tokenizer.json", tmp_path)
    return tmp_path


def test_openai_state_dict(folder: Path) -> None:
    clip = wide("quick_gelu")
    tensors = to_openai_names(clip)
    extra = {"input_resolution": torch.tensor(16), "context_length": torch.tensor(48), "vocab_size": torch.tensor(8192)}
    torch.save(tensors | extra, folder / "ViT-B-16.pt")
    for path in (folder / "ViT-B-16.pt", folder):
        loaded = load_clip(str(path))
        same_features(clip, loaded)
        assert loaded.fingerprint == clip.fingerprint
    torch.save({"state_dict": {name: tensor.half() for name, tensor in tensors.items()}}, folder / "x.pt")
    same_features(clip, load_clip(str(folder / "x.pt")), 0.01)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchscript_is_opened_only_when_openai_published_it(folder: Path, monkeypatch: Any) -> None:
    clip, path, opened = wide("quick_gelu"), folder / "ViT-B-16.pt", []
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.zeros(1)), str(path))
    archive = SimpleNamespace(state_dict=lambda: to_openai_names(clip))
    monkeypatch.setattr(torch.jit, "load", lambda *args, **_: opened.append(args) or archive)
    refused(path, path.name)
    assert not opened
    monkeypatch.setitem(openai.PUBLISHED, sha256(path), path.name)
    same_features(clip, load_clip(str(path)))
    assert opened


def test_a_pt_file_with_code_or_cut_or_of_other_tensors_is_refused(folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    path = folder / "x.pt"
    torch.save({"a": Bomb()}, path)
    refused(path, "x.pt")
    assert not Path("exploded").exists()
    torch.save(to_openai_names(wide("quick_gelu")), path)
    whole = path.read_bytes()
    for content in (b"", b"PK\x03\x04 cut", b"\x80\x02}q\x00.", whole[: len(whole) // 2]):
        path.write_bytes(content)
        refused(path, "x.pt" if content[:2] != b"\x80\x02" else str(folder))
    torch.save({"visual.layer1.0.conv1.weight": torch.zeros(1)}, path)
    refused(path, "ViT")
    for name in ("visual.transformer.resblocks.0.attn.in_proj_weight", "visual.proj", "logit_scale"):
        torch.save(to_openai_names(wide("quick_gelu")) | {name: torch.zeros(2, 2, 2)}, path)
        refused(path, "x.pt")


@pytest.mark.filterwarnings("ignore")  # about nested and sparse tensors
def test_a_pt_file_that_could_take_any_memory_is_refused(folder: Path) -> None:
    path, small = folder / "x.pt", torch.zeros(1)
    nested = torch.nested.nested_tensor([small, small])
    for tensor in (small.expand(10**6, 10**6), small.to_sparse(), small.to("meta"), nested):
        torch.save({"visual.proj": tensor}, path)
        refused(path, "x.pt")
    torch.save(to_openai_names(wide("quick_gelu")), path)
    load_clip(str(path))
    with ZipFile(path) as whole, ZipFile(folder / "packed.pt", "w", ZIP_DEFLATED) as packed:
        for name in whole.namelist():
            packed.writestr(name, whole.read(name))
    refused(folder / "packed.pt", "packed.pt", "compressed")


def open_clip_folder(folder: Path, clip: CLIP, prefix: str = "", **model: Any) -> Path:
    tensors = {prefix + name: value for name, value in to_openai_names(clip).items()}
    save_file(tensors, folder / "open_clip_model.safetensors")
    parts = {"vision_cfg": {"head_width": 64, "width": 128}, "text_cfg": {"heads": 2, "width": 128}}
    config = {
        "model_cfg": {"embed_dim": 40, **parts, **model},
        "preprocess_cfg": {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]},
    }
    (folder / "open_clip_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("activation", "heads", "prefix", "model"),
    [
        ("gelu", 2, "", {}),
        ("quick_gelu", 2, "module.", {"quick_gelu": True}),
        ("gelu", 4, "", {"vision_cfg": {"head_width": 32}, "text_cfg": {"heads": 4}}),
    ],
)
def test_an_open_clip_folder(activation: str, heads: int, prefix: str, model: Any, folder: Path) -> None:
    clip = wide(activation, heads)
    open_clip_folder(folder, clip, prefix, **model)
    for path in (folder, folder / "open_clip_model.safetensors"):
        loaded = load_clip(str(path))
        same_features(clip, loaded)
        assert loaded.preprocess.steps.mean == (0.5, 0.4, 0.3)
        assert loaded.preprocess.steps.std == (0.2, 0.3, 0.4)


def test_without_a_config_the_file_name_tells_the_activation(folder: Path) -> None:
    for file, activation in (("ViT-B-16-laion.safetensors", "gelu"), ("ViT-B-16-quickgelu.safetensors", "quick_gelu")):
        save_file(to_openai_names(wide(activation)), folder / file)
        assert load_clip(str(folder / file)).config.text.activation == activation


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"text_cfg": {"hf_model_name": "roberta-base"}}, "text_cfg.hf_model_name"),
        ({"vision_cfg": {"pool_type": "avg"}}, "vision_cfg.pool_type"),
        ({"vision_cfg": {"head_width": 0}}, "open_clip_config.json"),
        ({"vision_cfg": "ViT"}, "open_clip_config.json"),
        ({"text_cfg": {"heads": None}}, "open_clip_config.json"),
    ],
)
def test_an_open_clip_config_of_another_model_or_with_impossible_values(model: Any, said: str, folder: Path) -> None:
    refused(open_clip_folder(folder, wide("gelu"), **model), said)


def test_without_a_tokenizer_one_line_says_which_file_goes_where(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    save_file(to_openai_names(wide("gelu")), tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", "tokenizer.json", "vocab.json", str(tmp_path))
    write_openai_vocabulary(tmp_path)
    assert load_clip(str(tmp_path / "x.safetensors")).tokenizer.eos == 8191
