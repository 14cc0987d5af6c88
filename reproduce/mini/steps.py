"""The steps of the recipe: each reads what the steps before it left in the work folder."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import load_file

from clipcil.clip import load_clip
from clipcil.clip.loading import MINI
from clipcil.clip.tokenizer import Tokenizer
from clipcil.errors import UserError
from reproduce.mini import cache, card, export, lessons, lite, measure, pictures, sources, text, texts, vision
from reproduce.mini.wordnet import WordNet

DIM = 384
TEXT_STEPS, PATH_STEPS, WHOLE_STEPS = 1530, 340, 500


def get_sources(given: Namespace) -> None:
    sources.get(given.work / "sources")


def fill_cache(given: Namespace) -> None:
    found = pictures.listing(_pictures(given), given.seed)[: pictures.USED]
    network = lite.read(sources.trunk_weights(given.work / "sources"))
    done = cache.fill(found, given.pictures, network, given.work / "cache", given.seed, given.part, given.parts)
    print(f"cache: {done} pictures computed, {len(found)} in all")


def choose_texts(given: Namespace) -> None:
    kept = given.work / "sources"
    wordnet = WordNet(sources.wordnet(kept))
    words = given.pictures / "tiny-imagenet" / "tiny-imagenet-200" / "words.txt"
    classes = texts.imagenet(sources.imagenet_labels(kept), words, wordnet)
    teacher = texts.Teacher(sources.text_teacher(kept))
    corpus = texts.build(pictures.listing(_pictures(given), given.seed), classes, wordnet, teacher, given.seed)
    tokens = teacher(texts.tokens(MINI / "tokenizer.json"))
    torch.save({"corpus": vars(corpus), "tokens": tokens}, given.work / "texts.pt")
    print(f"texts: {len(corpus.names)} names, {len(corpus.sentences)} sentences")


def train_text(given: Namespace) -> None:
    stored = torch.load(given.work / "texts.pt", weights_only=True)
    corpus = texts.Corpus(**stored["corpus"])
    tower = text.start(text.CONFIG, DIM, stored["tokens"], given.seed)
    tokenizer = Tokenizer.from_folder(MINI, text.CONFIG.context)
    draw = text.Draw(corpus, tokenizer, given.seed)
    text.train(tower, tokenizer, draw, given.steps or TEXT_STEPS, given.work / "text.safetensors")


def train_vision(given: Namespace) -> None:
    shards = sorted((given.work / "cache").glob("[0-9][0-9][0-9][0-9].npy"))
    if not shards:
        raise UserError(f"no trunk outputs in {given.work / 'cache'}; run the step 'cache' first")
    network = lite.read(sources.trunk_weights(given.work / "sources"))
    corpus = texts.Corpus(**torch.load(given.work / "texts.pt", weights_only=True)["corpus"])
    reduce = lessons.reduction(network, shards[:16], vision.CONFIG.channels)
    torch.save(reduce, given.work / "reduce.pt")
    learnt = lessons.read(network, reduce, shards, pictures.listing(_pictures(given), given.seed), corpus)
    tower = vision.start(vision.CONFIG, DIM, given.seed, vision.lift(learnt.patches))
    shuffled = torch.randperm(len(learnt.label), generator=torch.Generator().manual_seed(given.seed))
    count = min(1000, len(shuffled) // 10)
    held, rows = shuffled[:count], shuffled[count:]
    for whole, steps in ((False, PATH_STEPS), (True, WHOLE_STEPS)):
        vision.train(
            tower,
            learnt,
            rows,
            given.steps or steps,
            given.work / "vision.safetensors",
            whole=whole,
            seed=given.seed + whole,
            batch=256 if whole else 512,
            measure=lambda tower: vision.held_out(tower, learnt, held),
        )


def write_backbone(given: Namespace) -> None:
    network = lite.read(sources.trunk_weights(given.work / "sources"))
    export.write(
        given.work / "mini",
        network,
        torch.load(given.work / "reduce.pt", weights_only=True),
        (vision.CONFIG, load_file(given.work / "vision.safetensors")),
        (text.CONFIG, load_file(given.work / "text.safetensors")),
        DIM,
        MINI,
    )
    export.write_reference(load_clip(str(given.work / "mini")), given.work / "reference.safetensors")


def write_card(given: Namespace) -> None:
    if given.cifar100 is None or given.cub200 is None:
        raise UserError("the card needs --cifar100 FOLDER and --cub200 FOLDER: the figures are measured on them")
    begun = time.monotonic()
    folders = [given.work / "mini", *([given.before] if given.before else [])]
    measured = [measure.all_figures(load_clip(str(folder)), given.cifar100, given.cub200) for folder in folders]
    (given.work / "figures.json").write_text(json.dumps([[asdict(row) for row in rows] for rows in measured], indent=1))
    card.write(given.work / "mini" / "MODEL_CARD.md", *measured)
    print(f"card: measured in {time.monotonic() - begun:.0f} s")


def _pictures(given: Namespace) -> Path:
    if given.pictures is None:
        raise UserError(f"the step '{given.step}' needs the folder of the pictures as its last argument")
    return Path(given.pictures)


STEPS: dict[str, Callable[[Namespace], None]] = {
    "sources": get_sources,
    "cache": fill_cache,
    "texts": choose_texts,
    "text": train_text,
    "vision": train_vision,
    "export": write_backbone,
    "card": write_card,
}
