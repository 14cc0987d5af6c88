"""A tiny CLIP with random weights for tests that need towers but no knowledge."""

import json
from itertools import product
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import nn

from clipcil.clip import CLIP, load_clip
from clipcil.clip.config import CLIPConfig, TextConfig, VisionConfig
from clipcil.clip.loading import MINI
from clipcil.clip.preprocess import Preprocess, Steps
from clipcil.clip.tokenizer import Tokenizer
from clipcil.clip.vision import PatchEmbedding
from support.errors import one_line

REFERENCE = Path(__file__).parents[1] / "clip" / "data" / "reference.safetensors"


def make_tiny_clip(
    seed: int = 0,
    activation: str = "quick_gelu",
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    dim: int = 24,
) -> CLIP:
    """Our CLIP over 3 × 16 × 16 pixels with the mini tokenizer; random weights, none of them zero."""
    tokenizer = Tokenizer.from_folder(MINI, 48)
    both = {"width": width, "layers": layers, "heads": heads, "mlp": 2 * width, "activation": activation}
    special = {"bos": tokenizer.bos, "eos": tokenizer.eos, "pad": tokenizer.eos}
    text = TextConfig(**both, vocab=8192, context=48, **special)
    config = CLIPConfig(VisionConfig(**both, image_size=16, patch_size=8), text, dim)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        clip = CLIP(config, tokenizer, Preprocess(Steps.plain(16)), f"tiny-{seed}")
        for module in clip.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias, 0.0, 0.2)
            elif isinstance(module, nn.Embedding | PatchEmbedding):
                nn.init.normal_(module.weight, 0.0, 0.3)
        nn.init.normal_(clip.vision.vision_model.embeddings.class_embedding, 0.0, 0.3)
    return clip.freeze()


def with_other_tokenizer(clip: CLIP, folder: Path) -> CLIP:
    """The same weights with a tokenizer that has exchanged the ids of two words; `folder` is for its file."""
    raw = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))
    words = raw["model"]["vocab"]
    words["a</w>"], words["of</w>"] = words["of</w>"], words["a</w>"]
    (folder / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    other = clip.with_own_vision_tower()
    other.tokenizer = Tokenizer.from_folder(folder, clip.tokenizer.context)
    return other


def write_openai_vocabulary(folder: Path) -> None:
    """The mini vocabulary in the form of OpenAI's hub repositories: vocab.json and merges.txt, special tokens last.

    OpenAI's has every byte, alone and at the end of a word, so nothing is ever unknown; mini's lacks the bytes it never
    saw. They are added here, and the last merges make room for them, so that the size stays 8,192.
    """
    model = json.loads((MINI / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    special = ["<|startoftext|>", "<|endoftext|>"]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys([*letters, *(letter + "</w>" for letter in letters)])
    for left, right in merges:
        if len(words) == len(model["vocab"]) - len(special):
            break
        words[left + right] = None
    used = [pair for pair in merges if "".join(pair) in words]
    vocab = json.dumps({word: index for index, word in enumerate([*words, *special])}, ensure_ascii=False)
    (folder / "vocab.json").write_text(vocab, encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in used), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")


class Bomb:
    """Unpickling it makes the file `exploded` in the working directory."""

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (Path("exploded"),)


def refused(name: Path | str, *words: str) -> None:
    """Loading the backbone ends in an error of one line that has `words` in it."""
    with one_line(*words):
        load_clip(str(name))


def to_openai_names(clip: CLIP) -> dict[str, torch.Tensor]:
    """The weights of `clip` under OpenAI's names and in OpenAI's layout."""
    ours = {**clip.vision.state_dict(), **clip.text.state_dict()}
    vision, text = "vision_model.embeddings.", "text_model.embeddings."
    renamed = {
        "visual.class_embedding": ours[vision + "class_embedding"],
        "visual.conv1.weight": ours[vision + "patch_embedding.weight"],
        "visual.positional_embedding": ours[vision + "position_embedding.weight"],
        "visual.proj": ours["visual_projection.weight"].t(),
        "token_embedding.weight": ours[text + "token_embedding.weight"],
        "positional_embedding": ours[text + "position_embedding.weight"],
        "text_projection": ours["text_projection.weight"].t(),
        "logit_scale": clip.logit_scale.detach(),
    }
    norms = (("visual.ln_pre", "vision_model.pre_layrnorm"), ("visual.ln_post", "vision_model.post_layernorm"))
    for theirs, mine in (*norms, ("ln_final", "text_model.final_layer_norm")):
        for kind in ("weight", "bias"):
            renamed[f"{theirs}.{kind}"] = ours[f"{mine}.{kind}"]
    parts = {"attn.out_proj": "self_attn.out_proj", "ln_1": "layer_norm1", "ln_2": "layer_norm2"}
    parts |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
    for tower, prefix in (("vision_model", "visual.transformer"), ("text_model", "transformer")):
        for layer, kind in product(range(clip.config.vision.layers), ("weight", "bias")):
            mine, theirs = f"{tower}.encoder.layers.{layer}", f"{prefix}.resblocks.{layer}"
            fused = [ours[f"{mine}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            renamed[f"{theirs}.attn.in_proj_{kind}"] = torch.cat(fused)
            renamed |= {f"{theirs}.{part}.{kind}": ours[f"{mine}.{own}.{kind}"] for part, own in parts.items()}
    return {name: tensor.contiguous().clone() for name, tensor in renamed.items()}
