"""The towers against a dense computation in float64, and the shortcuts against the long way."""

import pytest
import torch
import torch.nn.functional as F

from clipcil.clip import CLIP
from clipcil.clip.text import padded, without_padding
from support.errors import one_line
from support.towers import make_tiny_clip
from support.visual_stream import encode_by_hand, project


@pytest.mark.parametrize("rows", [1, 3], ids=["shared", "per-picture"])
@pytest.mark.parametrize("what", ["plain", "extra", "prefixes", "both"])
def test_vision_tower_equals_dense_computation(what: str, rows: int) -> None:
    """In float64, head by head and picture by picture."""
    clip, exact, lower = make_tiny_clip(1), make_tiny_clip(1).double(), make_tiny_clip(1)
    torch.manual_seed(0)
    pixels = torch.randn(3, 3, 16, 16)
    extra = torch.randn(rows, 5, 32) if what in ("extra", "both") else None
    prefixes = {1: (torch.randn(rows, 4, 32), torch.randn(rows, 4, 32))} if what in ("prefixes", "both") else None
    out = clip.vision(pixels, extra, prefixes)
    tokens = []
    for index, picture in enumerate(pixels.double()):
        row = index % rows
        own = None if extra is None else extra[row].double()
        pairs = {layer: (k[row].double(), v[row].double()) for layer, (k, v) in (prefixes or {}).items()}
        tokens.append(encode_by_hand(exact, picture, own, pairs))
    assert out.tokens.shape == (3, 1 + 4 + (5 if extra is not None else 0), 32)
    pooled = exact.vision.vision_model.post_layernorm(torch.stack(tokens)[:, 0])
    levels, layers = [pooled], lower.vision.vision_model.encoder.layers
    while layers:  # what each block reads
        last = layers.pop(len(layers) - 1)
        normed = last.layer_norm1(lower.vision(pixels, extra).tokens).double()
        levels = [normed[:, 0], normed[:, -4:].mean(1), *levels]
    assert [level.shape[1] for level in levels] == list(clip.vision.level_sizes)
    features = torch.stack([project(exact, each) for each in tokens])
    expected = (torch.stack(tokens), pooled, features, torch.cat(levels, 1))
    for ours, dense in zip(out, expected, strict=True):
        torch.testing.assert_close(ours.double(), dense, atol=2e-5, rtol=1e-5)


def test_class_only_gives_the_same_features_and_gradients(tiny_clip: CLIP) -> None:
    pixels = torch.randn(3, 3, 16, 16)
    keys = torch.randn(3, 2, 32, requires_grad=True)
    extra = torch.randn(1, 2, 32, requires_grad=True)
    gradients = []
    for class_only in (False, True):
        out = tiny_clip.vision(pixels, extra, {1: (keys, keys)}, class_only=class_only)
        gradients.append((out.features, *torch.autograd.grad(out.features.square().sum(), (keys, extra))))
    assert out.tokens.shape == (3, 1, 32)
    for long, short in zip(*gradients, strict=True):
        torch.testing.assert_close(short, long, atol=1e-5, rtol=1e-5)


def test_a_backbone_is_handed_out_frozen_and_takes_each_picture_alone(mini: CLIP) -> None:
    assert not mini.training and mini.scale.ndim == 0
    assert not any(parameter.requires_grad or parameter.dtype != torch.float32 for parameter in mini.parameters())
    pixels = torch.randn(4, *mini.preprocess.shape)
    alone = torch.cat([mini.vision(row[None]).features for row in pixels])
    torch.testing.assert_close(mini.vision(pixels).features, alone, atol=1e-4, rtol=1e-5)


def full_context(clip: CLIP, embeddings, ends):
    """The text tower without a shortcut: every position to the end of the context, every token in every layer."""
    tower, model, context = clip.text, clip.text.text_model, clip.config.text.context
    padded = F.pad(embeddings, (0, 0, 0, context - embeddings.shape[1]), value=0.7)
    hidden = padded + model.embeddings.position_embedding.weight
    for block in model.encoder.blocks():
        hidden = block(hidden, causal=True)
    return tower.text_projection(model.final_layer_norm(hidden)[torch.arange(len(ends)), ends])


@pytest.mark.parametrize("name", ["mini", "tiny"])
def test_cut_text_tower_equals_full_context(name: str, mini: CLIP, tiny_clip: CLIP) -> None:
    clip = mini if name == "mini" else tiny_clip
    ids, ends = clip.tokenizer(["a photo of an octopus", "tree", "a drawing of a very old red pickup truck", ""])
    embeddings = clip.text.embed(ids).detach().requires_grad_()
    direction = torch.randn(4, clip.config.dim, generator=torch.Generator().manual_seed(0))
    results = []
    for tower in (clip.text, lambda *args: full_context(clip, *args)):
        features = tower(embeddings, ends)
        results.append((features, *torch.autograd.grad((features * direction).sum(), embeddings)))
    for off, ours, expected in zip((1e-6, 3e-6), *results, strict=True):
        torch.testing.assert_close(ours, expected, atol=off * max(expected.abs().max().item(), 1), rtol=0)
    assert results[0][1][1, int(ends[1]) + 1 :].abs().max() == 0  # nothing after the end reaches it


@pytest.mark.parametrize("layers", [1, 4])
def test_text_tower_of_a_gpu_pads_and_gives_the_same(mini: CLIP, layers: int) -> None:
    """On a CPU texts of one length are taken together; elsewhere all of them in one piece, which is tried here, too."""
    blocks = mini.text.text_model.encoder.blocks()[:layers]
    ends = torch.tensor([5, 2, 9, 5, 0, 9])  # lengths out of order, two of them twice, one text of a single token
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 12, mini.config.text.width, generator=generator).requires_grad_()
    direction = torch.randn(6, mini.config.text.width, generator=generator)
    results = []
    for tower in (without_padding, padded):
        states = tower(blocks, hidden, ends)
        results.append((states, *torch.autograd.grad((states * direction).sum(), hidden)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert results[1][1].abs().max() > 0.1


def test_text_tower_refuses_what_does_not_fit(tiny_clip: CLIP) -> None:
    with one_line("49", "48"):
        tiny_clip.text(torch.zeros(1, 60, 32), torch.tensor([48]))


def test_encode_texts_is_each_text_on_its_own(mini: CLIP) -> None:
    texts = [f"a photo of {'a very ' * (n % 5)}big {word}" for n, word in enumerate(["cat", "tree", "mud"] * 100)]
    texts[7] = ""
    together = mini.encode_texts(texts)
    assert together.shape == (300, 384) and not together.requires_grad
    for row in (0, 7, 11, 150, 299):
        torch.testing.assert_close(together[row : row + 1], mini.encode_texts([texts[row]]), atol=2e-5, rtol=0)
    assert mini.encode_texts([]).shape == (0, 384)


def test_versions_differ_after_each_touch_and_with_weights_and_config() -> None:
    clip, seen = make_tiny_clip(), []
    for _ in range(3):
        seen.append(clip.version)
        clip.touch()
    assert seen[0] == clip.fingerprint == make_tiny_clip().fingerprint
    others = [*seen, clip.version, make_tiny_clip(1).version, make_tiny_clip(0, "gelu").version]
    assert len(set(others)) == len(others)


def test_a_tower_tuned_while_the_trunk_was_frozen_is_read(mini: CLIP) -> None:
    """Its tensors have none of `start`, which stays as it is; no other tensor may be missing."""
    tower = mini.with_own_vision_tower().vision
    tensors = {name: value + 1 for name, value in tower.state_dict().items() if not name.startswith("start.")}
    assert tower.load_state_dict(dict(tensors)).missing_keys == []
    for name, value in tower.state_dict().items():
        wanted = mini.vision.state_dict()[name] if name.startswith("start.") else tensors[name]
        assert torch.equal(value, wanted), name
    del tensors["visual_projection.weight"]
    with pytest.raises(RuntimeError, match="visual_projection"):
        tower.load_state_dict(tensors)
