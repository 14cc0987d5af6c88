"""Our towers against transformers' CLIPModel: the same weights, the same numbers."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize
from transformers import CLIPConfig, CLIPModel

from clipcil.clip import CLIP, load_clip
from clipcil.clip.loading import MINI
from support.towers import write_openai_vocabulary

TEXTS = ["a photo of an octopus", "tree", "", "a drawing of a very old red pickup truck, 2 dogs & a café!"]

# B/16's shape shrunk (width 64 per head, MLP 4 × width), both activations; odd sizes leave a rest that no patch covers.
CASES = {  # width, heads, picture, patch, layers, activation
    "b16-shrunk": (128, 2, 64, 16, 3, "quick_gelu"),
    "b16-gelu": (128, 2, 64, 16, 3, "gelu"),
    "odd-image": (48, 3, 45, 14, 3, "quick_gelu"),
    "odd-patch": (40, 5, 31, 7, 3, "gelu"),
    "channels": (32, 1, 4, 1, 3, "gelu"),
    "one-layer": (32, 4, 24, 8, 1, "gelu"),
}


def oracle(case: str, **text: int) -> CLIPModel:
    """A CLIPModel whose every weight is random and large enough to matter."""
    width, heads, side, patch, layers, activation = CASES[case]
    common = {"hidden_size": width, "num_attention_heads": heads, "hidden_act": activation}
    common |= {"num_hidden_layers": layers, "intermediate_size": 4 * width}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "vocab_size": 8192}
    config = CLIPConfig(
        vision_config={**common, "image_size": side, "patch_size": patch},
        text_config={**common, **tokens, "max_position_embeddings": 48, **text},
        projection_dim=36,
    )
    torch.manual_seed(5)
    model = CLIPModel(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif parameter.ndim >= 1:
            fan = parameter[0].numel() if parameter.ndim > 1 and "embedding.weight" not in name else 9
            torch.nn.init.normal_(parameter, 0.0, fan**-0.5)
    return model


@torch.no_grad()
def compare(model: CLIPModel, clip: CLIP, pixels: torch.Tensor) -> None:
    ids, ends = clip.tokenizer(TEXTS)
    own = clip.vision.start(pixels)[:, : clip.config.vision.channels]  # what comes after them is no part of CLIP
    out = model(input_ids=ids, pixel_values=own)
    vision = model.vision_model(pixel_values=own)
    features = model.visual_projection(vision.pooler_output)
    ours, texts = clip.vision(pixels), clip.text(clip.text.embed(ids), ends)
    for found, expected in (
        (ours.tokens, vision.last_hidden_state),
        (ours.pooled, vision.pooler_output),
        (ours.features, features),
        (clip.vision(pixels, class_only=True).features, features),
        (texts, model.text_projection(model.text_model(input_ids=ids).pooler_output)),
        (clip.encode_texts(TEXTS), texts),
        (clip.scale * normalize(ours.features, dim=-1) @ normalize(texts, dim=-1).t(), out.logits_per_image),
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_random_weights(case: str, tmp_path: Path) -> None:
    model, side = oracle(case), CASES[case][2]
    model.save_pretrained(tmp_path)
    shutil.copy(MINI / "tokenizer.json", tmp_path)
    compare(model, load_clip(str(tmp_path)), torch.randn(3, 3, side, side))


def test_old_config_with_wrong_token_ids(tmp_path: Path) -> None:
    """OpenAI's hub configs say eos_token_id 2; transformers then takes the largest id as the end. So must we."""
    model = oracle("b16-shrunk", bos_token_id=0, eos_token_id=2, pad_token_id=1)
    model.save_pretrained(tmp_path)
    write_openai_vocabulary(tmp_path)
    clip = load_clip(str(tmp_path))
    assert (clip.config.text.bos, clip.config.text.eos) == (8190, 8191)
    compare(model, clip, torch.randn(2, 3, 64, 64))


def test_mini(mini: CLIP) -> None:
    model = CLIPModel.from_pretrained(MINI, dtype=torch.float32).eval()
    compare(model, mini, torch.randn(5, *mini.preprocess.shape))


def test_gradients_of_the_vision_tower(mini: CLIP) -> None:
    model = CLIPModel.from_pretrained(MINI, dtype=torch.float32).eval()
    pixels = torch.randn(3, *mini.preprocess.shape)
    direction = torch.randn(3, mini.config.dim)
    own = mini.vision.start(pixels)[:, : mini.config.vision.channels]
    (model.visual_projection(model.vision_model(pixel_values=own).pooler_output) * direction).sum().backward()
    theirs, tower = dict(model.named_parameters()), mini.with_own_vision_tower().vision.requires_grad_(True)
    (tower(pixels).features * direction).sum().backward()
    own_names = {name for name, _ in tower.named_parameters() if not name.startswith("start.")}
    assert len(own_names) == mini.config.vision.layers * 16 + 8
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.any()), name
        if name not in own_names:
            continue
        expected = theirs[name].grad
        scale = max(expected.abs().max().item(), 1.0)
        torch.testing.assert_close(parameter.grad, expected, atol=1e-5 * scale, rtol=1e-4, msg=f"{name}: {{}}".format)
