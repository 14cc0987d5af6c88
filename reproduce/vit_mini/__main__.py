"""Make `vit-mini`: `python -m reproduce.vit_mini --help`; README.md in this folder says from what."""

import argparse
import json
import shutil
from pathlib import Path

import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file

from clipcil.clip import load_clip
from clipcil.clip.config import VisionConfig
from clipcil.clip.loading import MINI
from clipcil.storage import write_json
from reproduce.mini import pictures
from reproduce.vit_mini import distil

VISION = Path(__file__).parent / "vision.safetensors"
SEED = 0  # decides the pictures, their views, the order of batches and the start of the tower


def write_folder(folder: Path, vision: Path = VISION) -> None:
    """A backbone of the tower's weights in the file `vision` and `mini`'s texts, for transformers and for clipcil."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in load_file(MINI / "model.safetensors").items() if "vis" not in name}
    save_file(kept | load_file(vision), folder / "model.safetensors", {"format": "pt"})
    table = json.loads((MINI / "config.json").read_text(encoding="utf-8"))
    table["vision_config"] |= TypeAdapter(VisionConfig).dump_python(distil.CONFIG, by_alias=True)
    write_json(folder / "config.json", table)
    side = {"height": distil.CONFIG.image_size, "width": distil.CONFIG.image_size}
    write_json(folder / "preprocessor_config.json", {"size": side, "do_center_crop": False})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(MINI / name, folder / name)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m reproduce.vit_mini", description="Make the plain ViT vit-mini.")
    steps = parser.add_subparsers(dest="step", required=True)
    distilling = steps.add_parser("distil", help="train the vision tower, or go on where a killed run was")
    distilling.add_argument("work", type=Path, help="folder of everything that is made")
    distilling.add_argument("pictures", type=Path, help="folder of the four sets of pictures, see reproduce/mini")
    distilling.add_argument("--steps", type=int, default=1950)
    distilling.add_argument("--views", type=int, default=40_000, help="the first so many of the shuffled pictures")
    steps.add_parser("folder", help="write the backbone's folder").add_argument("out", type=Path)
    given = parser.parse_args()
    if given.step == "folder":
        write_folder(given.out)
        return
    torch.set_num_threads(1)
    found = pictures.listing(given.pictures, SEED)[: given.views]
    lessons = distil.Lessons(found, given.pictures, given.work / "cache", load_clip("mini"), SEED)
    weights = distil.train(lessons, given.steps, given.work, SEED).state_dict()
    save_file({name: weight.half() for name, weight in weights.items()}, given.work / "vision.safetensors")


if __name__ == "__main__":
    main()
