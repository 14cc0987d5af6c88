"""The training texts, and their embeddings by the teacher (all-MiniLM-L6-v2).

The target of a name is the teacher's embedding of the bare name plus that of its description in WordNet ("tabby,
domestic cat, cat, feline: a cat with a grey or tawny coat …"), so that names of things that look alike come near each
other. The target of a template filled with a name is that of the name.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reproduce.mini.pictures import Picture
from reproduce.mini.wordnet import PERSON, VISIBLE, Synset, WordNet

WORDNET_NAMES = 16_000
CAPTIONS = 8_000
PHRASES = 4_000
_TEMPLATES = """
a photo of a {} / a photo of a {}. / a photo of the {}. / a bad photo of a {}. / a blurry photo of a {}. /
a picture of a {} / an image of a {} / a close-up photo of a {}. / a small photo of the {}. / a drawing of a {}. /
a painting of a {}. / a sketch of a {}. / a cartoon {}. / a rendition of a {}. / an icon of a {}. /
a photo of many {}. / a {} / the {} / {}. / this is a {}.
"""
TEMPLATES = tuple(text.strip() for text in _TEMPLATES.split("/"))
_ADJECTIVES = "red green blue yellow black white big small old young wooden round happy sad open running wild striped"


class Teacher:
    """A sentence encoder of transformers with mean pooling; every text is encoded once."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokens: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder).eval()
        self._known: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """N texts → (N, 384), unit length."""
        new = sorted({text for text in texts if text not in self._known}, key=len)
        for start in range(0, len(new), 64):
            part = new[start : start + 64]
            ids = self._tokens(part, padding=True, truncation=True, max_length=40, return_tensors="pt")
            mask = ids["attention_mask"].unsqueeze(-1)
            pooled = (self._model(**ids).last_hidden_state * mask).sum(1)  # the mean, up to its length
            self._known.update(zip(part, F.normalize(pooled, dim=-1), strict=True))
        return torch.stack([self._known[text] for text in texts])


@dataclass(frozen=True)
class Corpus:
    """Names (to be put into templates) and sentences (as they are), each with its target."""

    names: list[str]
    name_targets: Tensor
    sentences: list[str]
    sentence_targets: Tensor
    classes: dict[str, Tensor]
    """ImageNet's WordNet ids, Caltech-101's and CIFAR-10's class names → the target of that very meaning."""
    captions: dict[str, Tensor]
    often: list[str]
    """The names of those classes, which the text tower meets more often than the other names."""


def described(name: str, synset: Synset, path: Sequence[Synset]) -> str:
    return f"{', '.join([name, *(above.names[0] for above in path[:3])])}: {synset.gloss}"


def senses(wordnet: WordNet, name: str) -> list[int]:
    """The visible meanings among the six most usual; a person ("tiger", "whale") only if nothing else is meant."""
    usual = wordnet.senses.get(name.lower(), [])[:6]
    seen = [sense for sense in usual if wordnet.synsets[sense].kind in VISIBLE]
    things = [sense for sense in seen if wordnet.synsets[sense].kind != PERSON]
    if things and wordnet.synsets[seen[0]].kind == PERSON:
        seen = things
    return (seen or usual)[:3]


def name_targets(names: Sequence[str], wordnet: WordNet, teacher: Teacher) -> Tensor:
    """The bare name plus its meanings, the more usual ones counting more; "willow tree" falls back on "tree"."""
    texts: list[str] = []
    owners: list[int] = []
    weights: list[float] = []
    for index, name in enumerate(names):
        known = senses(wordnet, name) or senses(wordnet, name.split()[-1])[:1]
        total = sum(1 / rank for rank in range(1, len(known) + 1))
        for rank, sense in enumerate(known, 1):
            texts.append(described(name, wordnet.synsets[sense], wordnet.path(sense)))
            owners.append(index)
            weights.append(1 / rank / total)
    bare = teacher(names)
    if texts:
        rich = torch.zeros_like(bare)
        rich.index_add_(0, torch.tensor(owners), teacher(texts) * torch.tensor(weights)[:, None])
        bare = bare + rich
    return F.normalize(bare, dim=-1)


def imagenet(labels: Path, words: Path, wordnet: WordNet) -> dict[str, tuple[str, int]]:
    """WordNet id → (name, meaning) of the 1,000 classes, in the order of the classifier's outputs.

    `labels` is `imagenet_labels.txt` of the package imagenet-x; `words` is Tiny-ImageNet's `words.txt`, all names of
    each id. Ids are of WordNet 3.0, the database here is 3.1: the meaning is found by its names.
    """
    lines = (line.split("\t") for line in words.read_text(encoding="utf-8").splitlines())
    synonyms = {number: names.split(",") for number, names in lines}
    found = {}
    for line in labels.read_text(encoding="utf-8").splitlines():
        number, name = line.split(",", 1)
        meaning = wordnet.match([name, *synonyms[number]])
        if meaning is not None:
            found[number] = (name, meaning)
    return found


def build(
    pictures: Sequence[Picture], classes: dict[str, tuple[str, int]], wordnet: WordNet, teacher: Teacher, seed: int
) -> Corpus:
    """Choose the texts and compute their targets."""
    rng = random.Random(seed)
    labels = sorted({picture.label for picture in pictures if picture.source in ("cifar-10", "caltech-101")})
    spoken = [label.replace("_", " ").lower() for label in labels]
    usual = [wordnet.synsets[meaning].names[0] for _, meaning in classes.values()]
    general = {above.names[0] for _, meaning in classes.values() for above in wordnet.path(meaning)}
    often = sorted({*spoken, *(name for name, _ in classes.values())})
    names = sorted({*often, *general, *usual, *_wordnet_names(wordnet, rng)})
    targets = name_targets(names, wordnet, teacher)
    by_name = dict(zip(names, targets, strict=True))
    own = teacher([described(name, wordnet.synsets[at], wordnet.path(at)) for name, at in classes.values()])
    bare = teacher([name for name, _ in classes.values()])
    meant = dict(zip(classes, F.normalize(own + bare, dim=-1), strict=True))
    meant |= {label: by_name[text] for label, text in zip(labels, spoken, strict=True)}
    lines = [line for picture in pictures if picture.source == "flickr8k" for line in picture.label.splitlines()[:1]]
    captions = rng.sample(lines, min(CAPTIONS, len(lines)))
    adjectives = _ADJECTIVES.split()
    phrases = [f"{rng.choice(adjectives)} {rng.choice(names)}" for _ in range(min(PHRASES, len(names)))]
    glosses = [wordnet.synsets[at].gloss for _, at in classes.values()]
    sentences = [*captions, *phrases, *glosses]
    embedded = teacher(sentences)
    return Corpus(names, targets, sentences, embedded, meant, dict(zip(captions, embedded, strict=False)), often)


def tokens(tokenizer: Path) -> list[str]:
    """The text of each token id."""
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    return [token.removesuffix("</w>") or " " for token in sorted(vocabulary, key=vocabulary.__getitem__)]


def _wordnet_names(wordnet: WordNet, rng: random.Random) -> list[str]:
    """Usual names of visible things: no Latin, no names of single persons or places, the plainer words first."""
    plain = set()
    for synset in wordnet.synsets.values():
        for name in synset.names[:3] if synset.kind in VISIBLE else ():
            if name.islower() and len(name.split()) <= 3 and name in wordnet.senses:
                plain.add(name)
    ranked = sorted(plain, key=lambda name: (-wordnet.usage.get(name, 0), len(name.split()), rng.random()))
    return ranked[:WORDNET_NAMES]
