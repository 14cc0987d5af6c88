"""A whole backbone loads; a broken one is refused in one line that says what to do."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REFERENCE
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from clipcil.clip import CLIP, load_clip
from clipcil.clip.config import CLIPConfig
from clipcil.clip.loading import MINI
from clipcil.errors import UserError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of mini that a test may damage."""
    copied = tmp_path / "copy"
    shutil.copytree(MINI, copied)
    return copied


def refused(name: Path | str, *words: str) -> None:
    with pytest.raises(UserError) as error:
        load_clip(str(name))
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_mini_gives_the_reference_features(mini: CLIP) -> None:
    reference = load_file(REFERENCE)
    with safe_open(REFERENCE, "pt") as file:
        texts = json.loads(file.metadata()["texts"])
    ids, _ = mini.tokenizer(texts)
    assert torch.equal(ids, reference["token_ids"])
    torch.testing.assert_close(mini.encode_texts(texts), reference["text_features"], atol=1e-5, rtol=0)
    features = mini.vision(reference["trunk_output"]).features
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
    """`python -m benchmarks --only P8` measures it."""
    subprocess.run([sys.executable, "-c", LOADING], check=True)


def test_a_folder_and_a_file_in_it_are_the_same_backbone(mini: CLIP, folder: Path) -> None:
    for name in (folder, folder / WEIGHTS):
        clip = load_clip(str(name))
        assert clip.fingerprint == mini.fingerprint
        assert clip.preprocess.fingerprint == mini.preprocess.fingerprint
        assert clip.name == str(name)


def test_half_precision_files_become_float32(mini: CLIP, folder: Path) -> None:
    assert load_file(MINI / WEIGHTS)["visual_projection.weight"].dtype == torch.float16
    edit(folder, lambda tensors: tensors.update({name: value.float() for name, value in tensors.items()}))
    assert load_clip(str(folder)).fingerprint == mini.fingerprint


def test_shards_are_read(mini: CLIP, folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:50], "model-00002-of-00002.safetensors": names[50:]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_clip(str(folder)).fingerprint == mini.fingerprint
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, "model-00002-of-00002.safetensors", "missing")


@pytest.mark.parametrize(
    "shards", ["x", ["x"], None, {"a": 1}, {"a": "model.safetensors.index.json"}, {"a": "pytorch_model.bin"}]
)
def test_an_index_that_names_no_shards_is_one_line(shards: object, tmp_path: Path) -> None:
    """One that names itself would be read for ever."""
    shutil.copy(MINI / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(UserError, match=r"index\.json does not say in which safetensors files"):
        load_clip(tmp_path)


def test_missing_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.pop("text_projection.weight"))
    refused(folder, "'text_projection.weight' is missing")


def test_left_over_tensor(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"vision_model.encoder.layers.4.x": torch.zeros(1)}))
    refused(folder, "'vision_model.encoder.layers.4.x' has no place")


def test_position_ids_of_old_files_are_ignored(mini: CLIP, folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"text_model.embeddings.position_ids": torch.arange(48)[None]}))
    assert load_clip(str(folder)).fingerprint == mini.fingerprint


def test_wrong_shape(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"visual_projection.weight": torch.zeros(384, 383)}))
    refused(folder, "'visual_projection.weight' has shape (384, 383)", "(384, 384)")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_not_finite(value: float, folder: Path) -> None:
    edit(folder, lambda tensors: tensors["vision_model.post_layernorm.bias"].fill_(value))
    refused(folder, "'vision_model.post_layernorm.bias'", "NaN or infinite")


def test_quantised(folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({"visual_projection.weight": torch.zeros(384, 384, dtype=torch.int8)}))
    refused(folder, "'visual_projection.weight' is torch.int8")


def test_eight_bit_floats(folder: Path) -> None:
    name = "visual_projection.weight"
    edit(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    refused(folder, name, "quantised")


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 20_000, -1])
@pytest.mark.parametrize("file", [WEIGHTS, "trunk.safetensors"])
def test_cut_file(file: str, keep: int, folder: Path) -> None:
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:keep])
    refused(folder, file, "cut or damaged", "download it again")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("exploded"),))


@pytest.mark.parametrize("kind", ["pickle", "torch", "lfs", "html"])
def test_something_else_renamed_to_safetensors(kind: str, folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    buffer = io.BytesIO()
    torch.save({"weights": Bomb()}, buffer)
    content = {
        "pickle": pickle.dumps(Bomb()),
        "torch": buffer.getvalue(),
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "html": b"<!doctype html><html><body>Not found, not found, not found</body></html>",
    }[kind]
    (folder / WEIGHTS).write_bytes(content)
    refused(folder, WEIGHTS, "not safetensors" if kind != "lfs" else "git-lfs")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("file", ["config.json", "trunk.json"])
def test_damaged_json(file: str, folder: Path) -> None:
    (folder / file).write_text('{"half": ')
    refused(folder, file)
    (folder / file).write_text("[]")
    refused(folder, file)


def test_trunk_json_without_its_keys(folder: Path) -> None:
    (folder / "trunk.json").write_text("{}")
    refused(folder, "trunk.json")


@pytest.mark.parametrize("stride", [0, -1, 9, 2.0, "2", None, True])
def test_trunk_json_with_impossible_strides(stride: object, folder: Path) -> None:
    spec = json.loads((folder / "trunk.json").read_text())
    spec["blocks"][1]["stride"] = stride
    (folder / "trunk.json").write_text(json.dumps(spec))
    refused(folder, "trunk.json is not whole", "copy it again")


def test_trunk_json_that_makes_another_number_of_places(folder: Path) -> None:
    spec = json.loads((folder / "trunk.json").read_text())
    spec["blocks"][1]["stride"] = 1
    (folder / "trunk.json").write_text(json.dumps(spec))
    refused(folder, "trunk.json makes 8 places a side, config.json wants 4")


@pytest.mark.parametrize(
    "wrong",
    [
        {"image_mean": [0.5]},
        {"image_std": [0.2, 0.0, 0.2]},
        {"image_mean": None},
        {"image_mean": ["a", "b", "c"]},
        {"size": {"shortest_edge": 0}},
        {"size": {"shortest_edge": 10**9}},
        {"size": "large"},
        {"crop_size": None},
        {"resample": 99},
        {"rescale_factor": "x"},
    ],
)
def test_preprocessing_with_impossible_values(wrong: dict, folder: Path) -> None:
    (folder / "trunk.json").unlink()  # without a trunk the file of the preprocessing is read
    raw = {"crop_size": 4, "size": 4, **wrong}
    (folder / "preprocessor_config.json").write_text(json.dumps(raw))
    refused(folder, "preprocessor_config.json is not whole", "copy it again")


def test_missing_trunk_is_noticed(folder: Path) -> None:
    (folder / "trunk.json").unlink()
    refused(folder, "384 channels", "trunk.json")


def test_config_that_does_not_fit_the_weights(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"]["num_hidden_layers"] = 2
    (folder / "config.json").write_text(json.dumps(raw))
    refused(folder, "layers.2")


def test_tokenizer_larger_than_the_text_tower(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["vocab_size"] = 100
    (folder / "config.json").write_text(json.dumps(raw))
    refused(folder, "8192 tokens", "100")


@pytest.mark.parametrize("name", ["no-such-thing", "./no/such/folder/here", "/nowhere/ViT-B-16.pt", "models/x.pt", ""])
def test_unknown_names(name: str) -> None:
    refused(name, "no backbone")


def test_an_empty_folder_says_what_to_put_there(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", WEIGHTS, "tokenizer.json")


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1")
    refused(tmp_path / "x.bin", ".safetensors or .pt")


def test_config_errors_name_the_key() -> None:
    for raw, word in (
        ({"model_type": "siglip"}, "siglip"),
        ({"text_config": {"hidden_act": "quick_gel"}}, "did you mean 'quick_gelu'"),
        ({"vision_config": {"hidden_size": "768"}}, "vision_config.hidden_size"),
        ({"vision_config": {"num_attention_heads": 7}}, "7 heads"),
        ({"projection_dim": None}, "projection_dim"),
        ({"vision_config": {"hidden_act": 1}}, "hidden_act '1'"),
        ({"vision_config": "half"}, "vision_config holds no table"),
        ({"vision_config": {"patch_size": 0}}, "patch_size 0 does not fit"),
        ({"vision_config": {"patch_size": 300}}, "patch_size 300 does not fit"),
        ({"text_config": {"hidden_size": 10**12}}, "text_config.hidden_size"),
        ({"text_config": {"num_hidden_layers": 10**5}}, "100000 layers"),
    ):
        with pytest.raises(UserError, match=word):
            CLIPConfig.from_hf(raw)


def test_config_defaults_and_old_sections() -> None:
    config = CLIPConfig.from_hf({"vision_config": {"patch_size": 32}, "vision_config_dict": {"patch_size": 16}})
    assert config.vision.patches == 14 * 14
    assert (config.vision.width, config.text.width, config.text.context, config.dim) == (768, 512, 77, 512)
    assert config.text.activation == "quick_gelu"
