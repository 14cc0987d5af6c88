"""Make the embedded backbone again, one command per step; README.md in this folder says what each needs.

python -m reproduce.mini sources WORK
python -m reproduce.mini cache WORK PICTURES [--part 0 --parts 2]
python -m reproduce.mini texts WORK PICTURES
python -m reproduce.mini text WORK
python -m reproduce.mini vision WORK PICTURES
python -m reproduce.mini export WORK
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from clipcil.clip import load_clip
from clipcil.clip.loading import MINI
from clipcil.clip.tokenizer import Tokenizer
from clipcil.errors import UserError
from reproduce.mini import cache, export, lessons, lite, pictures, sources, text, texts, vision
from reproduce.mini.wordnet import WordNet

DIM = 384
TEXT_STEPS, PATH_STEPS, WHOLE_STEPS = 1530, 340, 500


class Recipe:
    """The steps: each reads the files that the steps before it left in the work folder.

    Args:
        work: Folder for everything the recipe makes.
        folder: Folder of the four sets of pictures.
        seed: Decides the pictures, their views, the order of batches and the start of both towers.
        steps: Training steps instead of the recipe's.
        part, parts: Which share of the cache this process makes.
    """

    def __init__(self, work: Path, folder: Path | None, seed: int, steps: int | None, part: int, parts: int) -> None:
        self.work, self.seed, self.steps, self.part, self.parts = work, seed, steps, part, parts
        self._folder = folder

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise UserError("this step needs the folder of the pictures as its last argument")
        return self._folder

    def network(self) -> lite.Lite:
        return lite.read(sources.find(self.work / "sources", sources.TRUNK))

    def listing(self) -> list[pictures.Picture]:
        return pictures.listing(self.folder, self.seed)

    def corpus(self) -> texts.Corpus:
        return texts.Corpus(**torch.load(self.work / "texts.pt", weights_only=True)["corpus"])

    def get_sources(self) -> None:
        sources.get(self.work / "sources")

    def fill_cache(self) -> None:
        found = self.listing()[: pictures.USED]
        done = cache.fill(found, self.folder, self.network(), self.work / "cache", self.seed, self.part, self.parts)
        print(f"cache: {done} pictures computed, {len(found)} in all")

    def choose_texts(self) -> None:
        kept = self.work / "sources"
        wordnet = WordNet(sources.find(kept, sources.WORDNET).parent)
        words = self.folder / "tiny-imagenet" / "tiny-imagenet-200" / "words.txt"
        classes = texts.imagenet(sources.find(kept, sources.LABELS), words, wordnet)
        teacher = texts.Teacher(sources.find(kept, sources.TEACHER).parent)
        corpus = texts.build(self.listing(), classes, wordnet, teacher, self.seed)
        tokens = teacher(texts.tokens(MINI / "tokenizer.json"))
        torch.save({"corpus": vars(corpus), "tokens": tokens}, self.work / "texts.pt")
        print(f"texts: {len(corpus.names)} names, {len(corpus.sentences)} sentences")

    def train_text(self) -> None:
        tokens = torch.load(self.work / "texts.pt", weights_only=True)["tokens"]
        tower = text.start(text.CONFIG, DIM, tokens, self.seed)
        tokenizer = Tokenizer.from_folder(MINI, text.CONFIG.context)
        draw = text.Draw(self.corpus(), tokenizer, self.seed)
        text.train(tower, tokenizer, draw, self.steps or TEXT_STEPS, self.work / "text.safetensors")

    def train_vision(self) -> None:
        shards = sorted((self.work / "cache").glob("[0-9][0-9][0-9][0-9].npy"))
        if not shards:
            raise UserError(f"no trunk outputs in {self.work / 'cache'}; run the step 'cache' first")
        network = self.network()
        reduce = lessons.reduction(network, shards[:16], vision.CONFIG.channels)
        torch.save(reduce, self.work / "reduce.pt")
        learnt = lessons.read(network, reduce, shards, self.listing(), self.corpus())
        tower = vision.start(vision.CONFIG, DIM, self.seed, vision.lift(learnt.patches))
        shuffled = torch.randperm(len(learnt.label), generator=torch.Generator().manual_seed(self.seed))
        count = min(1000, len(shuffled) // 10)
        for whole, steps in ((False, PATH_STEPS), (True, WHOLE_STEPS)):
            vision.train(
                tower,
                learnt,
                shuffled[count:],
                self.steps or steps,
                self.work / "vision.safetensors",
                whole=whole,
                seed=self.seed + whole,
                batch=256 if whole else 512,
                measure=lambda tower: vision.held_out(tower, learnt, shuffled[:count]),
            )

    def write_backbone(self) -> None:
        export.write(
            self.work / "mini",
            self.network(),
            torch.load(self.work / "reduce.pt", weights_only=True),
            (vision.CONFIG, load_file(self.work / "vision.safetensors")),
            (text.CONFIG, load_file(self.work / "text.safetensors")),
            DIM,
            MINI,
        )
        export.write_reference(load_clip(str(self.work / "mini")), self.work / "reference.safetensors")


STEPS = {
    "sources": Recipe.get_sources,
    "cache": Recipe.fill_cache,
    "texts": Recipe.choose_texts,
    "text": Recipe.train_text,
    "vision": Recipe.train_vision,
    "export": Recipe.write_backbone,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reproduce.mini", description="Make the embedded backbone.")
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("work", type=Path, help="folder for everything the recipe makes")
    parser.add_argument("folder", type=Path, nargs="?", help="folder of the four sets of pictures")
    parser.add_argument("--part", type=int, default=0, help="which share of the cache this process makes")
    parser.add_argument("--parts", type=int, default=1, help="how many processes share the cache")
    parser.add_argument("--steps", type=int, help="train for fewer or more steps than the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    given = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)
    try:
        STEPS[given.pop("step")](Recipe(**given))
    except UserError as error:
        print(f"mini: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
