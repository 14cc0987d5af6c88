"""The recipe of the embedded backbone, run for seconds on made pictures with a made trunk and a made text teacher."""

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
from reproduce.mini import export, fitting, lite, pictures, text, texts, vision
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


def test_the_whole_recipe_in_seconds(tmp_path: Path, sets: Path, wordnet: WordNet) -> None:
    found = pictures.listing(sets, 0)
    assert len(found) == 12 + 6 + 3 + 3, "the background pictures of Caltech-101 have no subject"
    network = lite.convert(published())
    assert pictures.fill(found, sets, network, tmp_path / "cache", 0) == len(found)
    assert pictures.fill(found, sets, network, tmp_path / "cache", 0) == 0, "what is there is not made again"

    assert [synset.names[0] for synset in wordnet.path(5)] == ["cat", "animal", "entity"]
    assert texts.senses(wordnet, "Tiger") == [5], "the animal, not the person"
    taught = [("cat", 3), ("tench", 8), ("tiger", 5), ("ant", 7), ("truck", 6)]
    classes = {f"n0000000{index}": meaning for index, meaning in enumerate(taught)}
    teacher = MadeTeacher()
    corpus = texts.build(found, classes, wordnet, teacher, 0)
    assert set(corpus.names) >= {"cat", "truck", "ant", "animal", "tench"}
    assert "tiger, cat, animal, entity: large striped cat" in teacher.asked
    shards = [tmp_path / "cache" / "0000.npy"]
    reduce = lite.reduction(network, shards, DIM)
    learnt = vision.read(network, reduce, shards, found, corpus)
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
            losses.append(float(fitting.total(found_losses, vision.WHOLE_WEIGHTS)))
    assert losses[0] > losses[1] > losses[2]

    folder = tmp_path / "mini"
    parts = (VISION, load_file(tmp_path / "vision.safetensors")), (TEXT, load_file(tmp_path / "text.safetensors"))
    export.write(folder, network, reduce, *parts, DIM)
    clip = load_clip(str(folder))
    export.write_reference(clip, tmp_path / "reference.safetensors")
    reference = load_file(tmp_path / "reference.safetensors")
    theirs = CLIPModel.from_pretrained(folder).float().eval()
    channels = theirs.config.vision_config.num_channels  # behind them the trunk packs averages of its inner blocks
    with torch.no_grad():
        image = theirs.visual_projection(theirs.vision_model(reference["trunk_output"][:, :channels]).pooler_output)
    torch.testing.assert_close(reference["image_features"], image, atol=1e-4, rtol=1e-4)


def text_loss(tower: nn.Module, tokenizer: Tokenizer, draw: text.Draw) -> float:
    sentences, targets = draw(64)
    ids, ends = tokenizer(sentences)
    with torch.no_grad():
        return float(text.loss(tower(tower.embed(ids), ends), targets))
