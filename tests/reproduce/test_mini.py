"""The recipe of the embedded backbone, run for seconds on made pictures with a made trunk and a made text teacher."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import CLIPModel

from clipcil.clip import load_clip
from clipcil.clip.config import TextConfig, VisionConfig
from clipcil.clip.loading import MINI
from clipcil.clip.tokenizer import Tokenizer
from clipcil.errors import UserError
from reproduce.mini import cache, card, export, lessons, lite, measure, pictures, sources, steps, text, texts, vision
from reproduce.mini.__main__ import main
from reproduce.mini.wordnet import WordNet

DIM = 24
VISION = VisionConfig(DIM, 2, 2, 32, "gelu", channels=DIM, image_size=4, patch_size=1)
TEXT = TextConfig(16, 2, 2, 32, "gelu", vocab=8192, context=48, bos=0, eos=1, pad=1)
STAGES = [(3, 16, 1), (3, 24, 1), (5, 28, 1), (3, 32, 1), (5, 36, 1), (5, 40, 2), (3, 44, 1)]


def published(seed: int = 0) -> dict[str, Tensor]:
    """A state dict with the names of the published EfficientNet-Lite weights: 7 stages, the sixth with two blocks."""
    generator = torch.Generator().manual_seed(seed)

    def norm(name: str, width: int) -> dict[str, Tensor]:
        values = {key: torch.rand(width, generator=generator) + 0.5 for key in ("weight", "running_var")}
        values |= {key: 0.3 * torch.randn(width, generator=generator) for key in ("bias", "running_mean")}
        return {f"{name}.{key}": value for key, value in values.items()}

    def kernel(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * (2 / (shape[1] * shape[2] * shape[3])) ** 0.5

    state = {"_conv_stem.weight": kernel(16, 3, 3, 3)} | norm("_bn0", 16)
    width, index = 16, 0
    for stage, (size, out, blocks) in enumerate(STAGES):
        for _ in range(blocks):
            name, inner = f"_blocks.{index}.", width * (6 if stage else 1)
            if stage:
                state |= {f"{name}_expand_conv.weight": kernel(inner, width, 1, 1)} | norm(f"{name}_bn0", inner)
            state |= {f"{name}_depthwise_conv.weight": kernel(inner, 1, size, size)} | norm(f"{name}_bn1", inner)
            state |= {f"{name}_project_conv.weight": kernel(out, inner, 1, 1)} | norm(f"{name}_bn2", out)
            width, index = out, index + 1
    state |= {"_conv_head.weight": kernel(64, width, 1, 1)} | norm("_bn1", 64)
    return state | {"_fc.weight": torch.randn(5, 64, generator=generator), "_fc.bias": torch.zeros(5)}


def unfolded(state: dict[str, Tensor], pixels: Tensor) -> Tensor:
    """EfficientNet-Lite as its authors wrote it: convolutions and batch norms apart, up to the head."""

    def convolve(x: Tensor, name: str, norm: str, stride: int = 1, groups: int = 1, relu: bool = True) -> Tensor:
        weight = state[f"{name}.weight"]
        total = max((-(-x.shape[-1] // stride) - 1) * stride + weight.shape[-1] - x.shape[-1], 0)
        x = F.conv2d(F.pad(x, (total // 2, total - total // 2) * 2), weight, None, stride, groups=groups)
        layer = nn.BatchNorm2d(x.shape[1], eps=1e-3).eval()
        layer.load_state_dict(
            {key.removeprefix(f"{norm}."): value for key, value in state.items() if key.startswith(f"{norm}.")},
            strict=False,
        )
        return F.relu6(layer(x)) if relu else layer(x)

    x = convolve(pixels, "_conv_stem", "_bn0", 2)
    index = 0
    for stage, (_, _, blocks) in enumerate(STAGES):
        for block in range(blocks):
            name, before = f"_blocks.{index}.", x
            if stage:
                x = convolve(x, f"{name}_expand_conv", f"{name}_bn0")
            stride = 2 if stage in (1, 2, 3, 5) and block == 0 else 1
            x = convolve(x, f"{name}_depthwise_conv", f"{name}_bn1", stride, x.shape[1])
            x = convolve(x, f"{name}_project_conv", f"{name}_bn2", relu=False)
            x = x + before if x.shape == before.shape and stride == 1 else x
            index += 1
    return x


def test_the_folded_trunk_is_the_published_network() -> None:
    state = published()
    pixels = torch.randn(2, 3, 128, 128, generator=torch.Generator().manual_seed(1))
    network = lite.convert(state)
    with torch.no_grad():
        expected = unfolded(state, pixels)
        got = network.trunk().maps(pixels)[0]
    assert got.shape == (2, 44, 4, 4)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_the_class_path_is_the_tower_as_it_starts_and_after_its_training(tmp_path: Path) -> None:
    tower = vision.start(VISION, DIM, 0, lift=2.0)
    patches = torch.randn(6, 2, DIM, 4, 4)
    known = made_lessons(patches)
    vision.train(tower, known, torch.arange(6), 8, tmp_path / "v", whole=False, seed=0, batch=4)
    with torch.no_grad():
        whole = tower(patches[:, 0]).features
        path = vision.class_path(tower, vision.pooled_patches(tower, patches[:, 0]))
    torch.testing.assert_close(path, whole, atol=1e-5, rtol=1e-4)


def test_aligning_is_a_rotation_that_brings_pictures_nearer_to_their_places() -> None:
    tower = vision.start(VISION, DIM, 0)
    mixed = torch.randn(200, DIM)
    turn = torch.linalg.qr(torch.randn(DIM, DIM)).Q
    with torch.no_grad():
        places = F.normalize((vision.class_path(tower, mixed) @ tower.visual_projection.weight) @ turn, dim=-1)
        vision.align(tower, mixed, places)
        found = F.normalize(vision.class_path(tower, mixed), dim=-1)
    weight = tower.visual_projection.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(DIM), atol=1e-4, rtol=0)
    assert (found * places).sum(-1).mean() > 0.9


def made_lessons(patches: Tensor) -> vision.Lessons:
    count = len(patches)
    names = F.normalize(torch.randn(6, DIM), dim=-1)
    pooled = F.normalize(patches[:, 0].mean((2, 3)), dim=-1)
    label, caption = torch.arange(count) % 6, torch.zeros(count, DIM)
    return vision.Lessons(patches, pooled, torch.randn(count, 5), label, caption, names)


class MadeTeacher(texts.Teacher):
    """Words in a fixed random order of axes: texts that share words are near each other."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, asked: list[str]) -> Tensor:  # type: ignore[override]
        self.asked += asked
        rows = []
        for sentence in asked:
            seeds = [torch.Generator().manual_seed(sum(map(ord, word))) for word in sentence.split()]
            words = [torch.randn(DIM, generator=generator) for generator in seeds]
            rows.append(torch.stack(words or [torch.ones(DIM)]).sum(0))
        return F.normalize(torch.stack(rows), dim=-1)


@pytest.fixture
def sets(tmp_path: Path) -> Path:
    """Four sets of a few pictures each, laid out as the public ones are."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "pictures"
    groups = {f"tiny-imagenet/tiny-imagenet-200/train/n0000000{i}/images": 4 for i in range(3)}
    groups |= {"cifar-10/train/cat": 3, "cifar-10/train/truck": 3, "caltech-101/101_ObjectCategories/ant": 3}
    groups |= {"caltech-101/101_ObjectCategories/BACKGROUND_Google": 2, "flickr8k/Flicker8k_Dataset": 3}
    for group, count in groups.items():
        (folder / group).mkdir(parents=True)
        for index in range(count):
            pixels = rng.integers(0, 256, (20 + index, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / group / f"{index}.png")
    captions = "".join(f"{index}.png#{n}\tA cat on truck {index} .\n" for index in range(4) for n in range(2))
    (folder / "flickr8k" / "Flicker8k_text").mkdir()
    (folder / "flickr8k" / "Flicker8k_text" / "Flickr8k.token.txt").write_text(captions)
    return folder


@pytest.fixture
def wordnet(tmp_path: Path) -> WordNet:
    """Eight meanings in WordNet's own format."""
    folder = tmp_path / "dict"
    folder.mkdir()
    rows = [
        (1, 3, "entity", None, "that which is"),
        (2, 5, "animal", 1, "a living thing that moves"),
        (3, 5, "cat", 2, 'feline mammal; "the cat sat"'),
        (4, 18, "tiger", 2, "a fierce person"),
        (5, 5, "tiger", 3, "large striped cat"),
        (6, 6, "truck", 1, "a vehicle for loads"),
        (7, 5, "ant", 2, "social insect"),
        (8, 5, "tench", 2, "freshwater fish"),
    ]
    data = ["  1 licence"]
    for number, kind, name, above, gloss in rows:
        pointers = f"001 @ {above:08d} n 0000" if above else "000"
        data.append(f"{number:08d} {kind:02d} n 01 {name} 0 {pointers} | {gloss}  ")
    (folder / "data.noun").write_text("\n".join(data) + "\n")
    senses: dict[str, list[int]] = {}
    for number, _, name, _, _ in rows:
        senses.setdefault(name, []).append(number)
    index = [f"{name} n {len(at)} 1 @ {len(at)} 0 {' '.join(f'{n:08d}' for n in at)}  " for name, at in senses.items()]
    (folder / "index.noun").write_text("  1 licence\n" + "\n".join(index) + "\n")
    usage = "cat%1:05:00:: 00000003 1 18\nant%1:05:00:: 00000007 1 2\nrun%2:38:00:: 1 1 9\n"
    (folder / "index.sense").write_text(usage)
    return WordNet(folder)


def test_wordnet_reads_meanings_paths_and_usage(wordnet: WordNet) -> None:
    assert wordnet.synsets[3].gloss == "feline mammal"
    assert [synset.names[0] for synset in wordnet.path(5)] == ["cat", "animal", "entity"]
    assert texts.senses(wordnet, "Tiger") == [5], "the animal, not the person"
    assert wordnet.match(["tench", "Tinca tinca"]) == 8
    assert wordnet.usage == {"cat": 18, "ant": 2}


def test_the_whole_recipe_in_seconds(tmp_path: Path, sets: Path, wordnet: WordNet) -> None:
    found = pictures.listing(sets, 0)
    assert len(found) == 12 + 6 + 3 + 3, "the background pictures of Caltech-101 have no subject"
    assert found != sorted(found, key=lambda picture: picture.file)
    network = lite.convert(published())
    assert cache.fill(found, sets, network, tmp_path / "cache", 0) == len(found)
    first = np.load(tmp_path / "cache" / "0000.npy")
    assert first.shape == (len(found), 2, 44, 4, 4)
    assert cache.fill(found, sets, network, tmp_path / "cache", 0) == 0, "what is there is not made again"
    (tmp_path / "cache" / "0000.npy").unlink()
    cache.fill(found, sets, network, tmp_path / "cache", 0)
    assert np.array_equal(np.load(tmp_path / "cache" / "0000.npy"), first), "the views follow from the seed"

    taught = [("cat", 3), ("tench", 8), ("tiger", 5), ("ant", 7), ("truck", 6)]
    classes = {f"n0000000{index}": meaning for index, meaning in enumerate(taught)}
    teacher = MadeTeacher()
    corpus = texts.build(found, classes, wordnet, teacher, 0)
    assert set(corpus.names) >= {"cat", "truck", "ant", "animal", "tench"}
    assert "tiger, cat, animal, entity: large striped cat" in teacher.asked
    shards = [tmp_path / "cache" / "0000.npy"]
    reduce = lessons.reduction(network, shards, DIM)
    learnt = lessons.read(network, reduce, shards, found, corpus)
    order = list(corpus.classes)
    expected = [order.index(picture.label) if picture.label in order else -1 for picture in found]
    assert learnt.label.tolist() == expected
    assert int((learnt.caption.abs().sum(1) > 0).sum()) == 3

    tokenizer = Tokenizer.from_folder(MINI, TEXT.context)
    words = teacher(texts.tokens(MINI / "tokenizer.json"))
    text_tower = text.start(TEXT, DIM, words, 0)
    draw = text.Draw(corpus, tokenizer, 0)
    before = text_loss(text_tower, tokenizer, draw)
    text.train(text_tower, tokenizer, draw, 25, tmp_path / "text.safetensors")
    assert text_loss(text_tower, tokenizer, draw) < 0.8 * before

    tower = vision.start(VISION, DIM, 0, vision.lift(learnt.patches))
    rows = torch.arange(len(found))
    losses = []
    for whole, count in ((False, 0), (False, 60), (True, 60)):  # no steps: turned towards the texts, nothing else
        vision.train(tower, learnt, rows, count, tmp_path / "vision.safetensors", whole=whole, seed=0, batch=16)
        with torch.no_grad():
            features = tower(learnt.patches.flatten(0, 1).float()).features
            found_losses = vision.losses(features, rows.repeat_interleave(2), learnt)
            losses.append(float(vision.total(found_losses, vision.WHOLE_WEIGHTS)))
    assert losses[0] > losses[1] > losses[2]

    folder = tmp_path / "mini"
    parts = (VISION, load_file(tmp_path / "vision.safetensors")), (TEXT, load_file(tmp_path / "text.safetensors"))
    export.write(folder, network, reduce, *parts, DIM, MINI)
    clip = load_clip(str(folder))
    export.write_reference(clip, tmp_path / "reference.safetensors")
    reference = load_file(tmp_path / "reference.safetensors")
    theirs = CLIPModel.from_pretrained(folder).float().eval()
    channels = theirs.config.vision_config.num_channels  # behind them the trunk packs averages of its inner blocks
    with torch.no_grad():
        image = theirs.visual_projection(theirs.vision_model(reference["trunk_output"][:, :channels]).pooler_output)
    torch.testing.assert_close(reference["image_features"], image, atol=1e-4, rtol=1e-4)
    one = pictures.views(Image.open(sets / found[0].file).convert("RGB"), found[0].source, random.Random("0 0 0"))
    with torch.no_grad():
        maps = clip.preprocess(one)[:, :channels]
        torch.testing.assert_close(maps, learnt.patches[0].float(), atol=0.2, rtol=0.05)


def test_the_commands_one_after_the_other(
    tmp_path: Path, sets: Path, wordnet: WordNet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step but `sources`, which downloads, and `card`, which measures on real datasets. The cache holds fewer
    pictures than the list, and its last shard is not full."""
    work = tmp_path / "work"
    taught = {f"n0000000{index}": meaning for index, meaning in enumerate([("cat", 3), ("tench", 8), ("tiger", 5)])}
    for module, name, value in (
        (sources, "trunk_weights", lambda folder: folder),
        (sources, "text_teacher", lambda folder: folder),
        (sources, "imagenet_labels", lambda folder: folder),
        (sources, "wordnet", lambda folder: folder),
        (lite, "read", lambda file: lite.convert(published())),
        (steps, "WordNet", lambda folder: wordnet),
        (texts, "imagenet", lambda *words: taught),
        (texts, "Teacher", lambda folder: MadeTeacher()),
        (text, "CONFIG", TEXT),
        (vision, "CONFIG", VISION),
        (steps, "DIM", DIM),
        (pictures, "USED", 20),
        (cache, "SHARD", 8),
        (lessons, "SHARD", 8),
    ):
        monkeypatch.setattr(module, name, value)
    for words in (
        ["cache", str(work), str(sets), "--part", "0", "--parts", "2"],
        ["cache", str(work), str(sets), "--part", "1", "--parts", "2"],
        ["texts", str(work), str(sets)],
        ["vision", str(work), str(sets), "--steps", "3"],
        ["text", str(work), "--steps", "3"],
        ["export", str(work)],
    ):
        assert main(words) == 0, words[0]
    shards = sorted((work / "cache").glob("*.npy"))
    assert [len(np.load(shard)) for shard in shards] == [8, 8, 4]
    assert load_clip(str(work / "mini")).config.dim == DIM
    assert CLIPModel.from_pretrained(work / "mini").config.projection_dim == DIM
    assert main(["vision", str(work)]) == 2, "without the folder of pictures"


def text_loss(tower: nn.Module, tokenizer: Tokenizer, draw: text.Draw) -> float:
    sentences, targets = draw(64)
    ids, ends = tokenizer(sentences)
    with torch.no_grad():
        return float(text.loss(tower(tower.embed(ids), ends), targets))


def test_the_card_holds_the_figures(tmp_path: Path) -> None:
    now = [measure.Figures("cifar100", 10000, 61.25, 31.5, 60.0)]
    card.write(tmp_path / "MODEL_CARD.md", now, [measure.Figures("cifar100", 10000, 41.8, 17.9, 42.0)])
    written = (tmp_path / "MODEL_CARD.md").read_text()
    assert "| cifar100 | 10,000 | 61.25 | 31.5 | 60.0 |" in written
    assert "| cifar100 | 10,000 | 41.8 | 17.9 | 42.0 |" in written
    assert "{" not in written.replace("{}", "")


def test_ranks_count_the_classes_that_score_higher() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.5], [0.3, 0.2, 0.1]])
    assert measure.rank(scores, torch.tensor([2, 0])).tolist() == [1, 0]
    assert measure.percent(torch.tensor([True, False, False])) == 33.3


def test_missing_pictures_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tiny-imagenet"):
        pictures.listing(tmp_path, 0)
