"""A whole backbone loads, from disk or from the hub; a broken one is refused in one line that names the file."""

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from clipcil.clip import CLIP, load_clip
from clipcil.clip.config import CLIPConfig
from clipcil.clip.loading import HUB_ID, MINI
from support.towers import REFERENCE, Bomb, make_tiny_clip, refused, to_openai_names

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of mini that a test may damage."""
    copied = tmp_path / "copy"
    shutil.copytree(MINI, copied)
    return copied


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def test_mini_gives_the_reference_features(mini: CLIP) -> None:
    reference = load_file(REFERENCE)
    with safe_open(REFERENCE, "pt") as file:
        texts = json.loads(file.metadata()["texts"])
    ids, _ = mini.tokenizer(texts)
    assert torch.equal(ids, reference["token_ids"])
    torch.testing.assert_close(mini.encode_texts(texts), reference["text_features"], atol=1e-5, rtol=0)
    features = mini.vision.encode(reference["trunk_output"]).features
    torch.testing.assert_close(features, reference["image_features"], atol=1e-5, rtol=0)


LOADING = """
import sys, torch, clipcil
before = torch.get_rng_state()
clipcil.load_clip("mini")
assert torch.equal(before, torch.get_rng_state()), "random weights were drawn, only to be replaced"
compiler = {"torch._dynamo", "torch._inductor", "sympy"} & set(sys.modules)
assert not compiler, f"loaded on the way: {compiler}"
"""


def test_loading_wastes_no_time() -> None:
    subprocess.run([sys.executable, "-c", LOADING], check=True)


def test_a_folder_and_a_file_in_it_are_the_same_backbone(mini: CLIP, folder: Path) -> None:
    """In half precision, as mini is, or in single precision with the position ids of old files."""
    assert load_file(MINI / WEIGHTS)["visual_projection.weight"].dtype == torch.float16
    edit_weights(folder, lambda tensors: tensors.update({name: value.float() for name, value in tensors.items()}))
    edit_weights(folder, lambda tensors: tensors.update({"text_model.embeddings.position_ids": torch.arange(48)[None]}))
    for name in (folder, folder / WEIGHTS):
        clip = load_clip(str(name))
        assert (clip.fingerprint, clip.name) == (mini.fingerprint, str(name))
        assert clip.preprocess.fingerprint == mini.preprocess.fingerprint


def test_shards_are_read(mini: CLIP, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:50], "model-00002-of-00002.safetensors": names[50:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / INDEX).write_text(json.dumps(index))
    assert load_clip(str(folder)).fingerprint == mini.fingerprint
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors")


@pytest.mark.parametrize("shards", ["x", ["x"], None, {"a": 1}, {"a": INDEX}, {"a": "pytorch_model.bin"}, b"\xff"])
def test_an_index_that_names_no_safetensors_files_is_refused(shards: object, tmp_path: Path) -> None:
    """One that names itself would be read for ever."""
    shutil.copy(MINI / "config.json", tmp_path)
    (tmp_path / INDEX).write_bytes(shards if isinstance(shards, bytes) else json.dumps({"weight_map": shards}).encode())
    refused(tmp_path, INDEX)


PROJECTION = "visual_projection.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("text_projection.weight"), ("Missing", "text_projection.weight")),
        (lambda t: t.update({"vision_model.x": torch.zeros(1)}), ("Unexpected", "vision_model.x")),
        (lambda t: t.update({PROJECTION: torch.zeros(384, 383)}), (PROJECTION, "[384, 383]", "[384, 384]")),
        (lambda t: t[PROJECTION].fill_(torch.nan), (PROJECTION, "NaN")),
        (lambda t: t[PROJECTION].fill_(-torch.inf), (PROJECTION, "infinite")),
        (lambda t: t.update({PROJECTION: torch.zeros(384, 384, dtype=torch.int8)}), (PROJECTION, "torch.int8")),
        (lambda t: t.update({PROJECTION: t[PROJECTION].to(torch.float8_e4m3fn)}), (PROJECTION, "float8")),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change: Any, words: tuple[str, ...], folder: Path) -> None:
    edit_weights(folder, change)
    refused(folder, *words)


@pytest.mark.parametrize("file", [WEIGHTS, "trunk.safetensors", "config.json", "trunk.json"])
def test_a_damaged_file_is_named_and_nothing_is_unpickled(file: str, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    whole = (folder / file).read_bytes()
    others = (pickle.dumps(Bomb()), b"version https://git-lfs.github.com/spec/v1\n", b"<html>Not found</html>", b"[]")
    for content in (b"", whole[:8], whole[: len(whole) // 2], whole[:-2], *others):
        (folder / file).write_bytes(content)
        refused(folder, file)
    assert not Path("exploded").exists()


def test_names_of_no_backbone(tmp_path: Path) -> None:
    for name in ("no-such-thing", "./no/such/folder/here", "models/x.pt", ""):
        refused(name, "no backbone")
    refused(tmp_path, "config.json", WEIGHTS, "tokenizer.json")
    (tmp_path / "x.bin").write_bytes(b"1")
    refused(tmp_path / "x.bin", ".safetensors or .pt")


STEM, STEPS = {"kernel": 3, "out": 32}, "preprocessor_config.json"


@pytest.mark.parametrize(
    ("file", "wrong", "said"),
    [
        *(("trunk.json", {"stem": {**STEM, "stride": stride}}, "stem.stride") for stride in (0, 9, 2.5, "2", None)),
        ("trunk.json", {"stem": {**STEM, "stride": 1}}, "384×8×8"),
        ("config.json", {"model_type": "siglip"}, "siglip"),
        ("config.json", {"text_config": {"hidden_act": "quick_gel"}}, "text_config.hidden_act"),
        ("config.json", {"vision_config": {"hidden_size": "768"}}, "vision_config.hidden_size"),
        ("config.json", {"vision_config": {"num_attention_heads": 7}}, "7 heads"),
        ("config.json", {"projection_dim": None}, "projection_dim"),
        ("config.json", {"vision_config": {"patch_size": 0}}, "vision_config.patch_size"),
        ("config.json", {"text_config": {"hidden_size": 10**12}}, "text_config.hidden_size"),
        ("config.json", {"text_config": {"num_hidden_layers": 10**5}}, "text_config.num_hidden_layers"),
        ("config.json", {"vision_config": "half"}, ""),
        (STEPS, {"crop_size": 5}, "(5, 5)"),
        *((STEPS, {"size": size}, "") for size in ({"shortest_edge": 10**9}, {"longest_edge": 4}, "large")),
        *((STEPS, {"image_mean": [0.5]}, ""), (STEPS, {"image_std": [0.2, 0.0, 0.2]}, "")),
        *((STEPS, {"resample": 99}, ""), (STEPS, {"rescale_factor": "x"}, "")),
    ],
)
def test_impossible_values_are_refused_with_file_and_key(
    file: str, wrong: dict[str, Any], said: str, folder: Path
) -> None:
    if file == STEPS:
        (folder / "trunk.json").unlink()  # without a trunk the file of the preprocessing is read
        refused(folder, "384 channels", "trunk.json")
        (folder / file).write_text(json.dumps({"crop_size": 4, "size": 4}))
    edit_json(folder / file, lambda raw: raw.update(wrong))
    refused(folder, file, said)


def test_a_config_that_does_not_fit_the_files(folder: Path) -> None:
    edit_json(folder / "config.json", lambda raw: raw["vision_config"].update(num_hidden_layers=2))
    refused(folder, "layers.2")
    edit_json(folder / "config.json", lambda raw: raw["text_config"].update(vocab_size=100))
    refused(folder, "8192 tokens", "100")


def test_config_defaults_and_old_sections() -> None:
    config = CLIPConfig.from_hf({"vision_config": {"patch_size": 32}, "vision_config_dict": {"patch_size": 16}})
    assert config.vision.patches == 14 * 14
    assert (config.vision.width, config.text.width, config.text.context, config.dim) == (768, 512, 77, 512)
    assert config.text.activation == "quick_gelu"


# -- from the hub, replaced by a folder --------------------------------------------------------------------------------


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
    (folder / "pytorch_model.bin").write_bytes(b"of a stranger, and never looked for")
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
