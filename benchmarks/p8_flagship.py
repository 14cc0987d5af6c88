"""P8: whole runs of DMC-OT with a ViT-B/32, a plain script against `clipcil run`: CPU seconds and peak memory.

Both learn the same pictures in the same tasks with the same epochs and batches, each in a process of its own with one
thread; importing the libraries counts. The weights are random: speed does not depend on them. clipcil learns in single
precision, as the script does; what `--precision auto` makes of it on this processor is measured as well.

It takes half an hour; `python -m benchmarks.p8_flagship 2 10 20 1 2` measures another size: tasks,
classes, pictures of a class, epochs of both stages.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.harness import Row, table
from benchmarks.shapes import names
from clipcil.clip.loading import MINI
from clipcil.errors import UserError
from clipcil.storage import read_json

GOALS = {"padded": 2.0, "cut": 1.5}
"""How many times fewer CPU seconds clipcil is to need, by the length of the script's texts."""
MEMORY = 0.9
"""The share of the script's peak memory that clipcil may take."""
TOLERANCE = (0.03, 0.2)
"""How far the mean losses of each stage may differ, as a share: each side draws its own batches and prompts."""


def run(quick: bool, size: Sequence[int] = (5, 50, 20, 1, 2)) -> list[Row]:
    tasks, classes, count, *rest = (2, 4, 12, 1, 1) if quick else size
    epochs = (rest[0], rest[1])
    with tempfile.TemporaryDirectory() as folder:
        backbone, pictures = Path(folder) / "backbone", Path(folder) / "pictures"
        write_backbone(backbone, small=quick)
        write_pictures(pictures, classes, count)
        ours, used = clipcil_run(Path(folder), backbone, pictures, tasks, epochs)
        _, half = clipcil_run(Path(folder), backbone, pictures, tasks, epochs, "auto")
        rows = []
        for texts, goal in GOALS.items():
            words = ["-m", "benchmarks.peers.plain_dmc_ot", str(backbone), str(pictures), str(tasks)]
            printed, theirs = measured([*words, *map(str, epochs), texts])
            losses = torch.tensor(json.loads(printed)["losses"])
            apart = float(((losses - ours).abs() / losses / torch.tensor(TOLERANCE)).max())
            for what, unit, met in (
                ("CPU seconds", "s", theirs["CPU seconds"] / used["CPU seconds"] >= goal),
                ("peak memory", "MB", used["peak memory"] / theirs["peak memory"] <= MEMORY),
            ):
                ratio = theirs[what] / used[what]
                wanted = f"≥{goal if unit == 's' else 1 / MEMORY:.2g}×"
                step = f"DMC-OT, B/32, {classes} classes, {tasks} tasks, texts {texts}: {what}"
                cells = f"{theirs[what]:.0f} {unit}", f"{used[what]:.0f} {unit}", f"{ratio:.2f}×", wanted
                details = {
                    "theirs": theirs,
                    "ours": used,
                    "auto": half,
                    "losses": {"theirs": losses.tolist(), "ours": ours.tolist()},
                }
                rows.append(Row("P8", step, *cells, met, apart, 1.0, details=details))
                cells = f"{theirs[what]:.0f} {unit}", f"{half[what]:.0f} {unit}", f"{theirs[what] / half[what]:.2f}×"
                rows.append(Row("P8", f"{step}, --precision auto", *cells, details=details))
    return rows


def clipcil_run(
    folder: Path, backbone: Path, pictures: Path, tasks: int, epochs: tuple[int, int], precision: str = "32-true"
) -> tuple[torch.Tensor, dict[str, float]]:
    """The mean loss of the last epoch of both stages of every task, (tasks, 2), and what the run used."""
    words = ["-m", "clipcil", "run", "dmc-ot", "--data", str(pictures), "--order", "natural", "--quiet"]
    out = folder / f"run-{precision}"
    words += ["--tasks", str(tasks), "--backbone", str(backbone), "--out", str(out), "--precision", precision]
    words += ["--no-preset", "--set"]
    words += [f"stage1.epochs={epochs[0]}", f"stage2.epochs={epochs[1]}", "stage2.steps=0", "stage1.lr=1e-5"]
    _, used = measured(words, CLIPCIL_CACHE=str(folder / f"cache-{precision}"))
    means = torch.zeros(tasks, 2)
    steps = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    for task in range(tasks):
        for place, stage in enumerate(("stage1", "stage2")):
            last = (task, stage, epochs[place] - 1)
            losses = [each["loss"] for each in steps if (each["task"], each["stage"], each["epoch"]) == last]
            means[task, place] = sum(losses) / len(losses)
    return means, used


def measured(words: list[str], **variables: str) -> tuple[str, dict[str, float]]:
    """What `python` with these words prints, and the CPU seconds and the peak memory in MB that it used."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | variables
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen([sys.executable, *words], stdout=printed, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise UserError(f"`python {' '.join(words)}` ended with exit code {process.returncode}")
        printed.seek(0)
        return printed.read(), {"CPU seconds": used.ru_utime + used.ru_stime, "peak memory": used.ru_maxrss / 1e3}


def write_backbone(folder: Path, small: bool) -> None:
    """A CLIPModel of the shape of ViT-B/32 with random weights and the embedded tokenizer."""
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel

    special = {name: read_json(MINI / "config.json")["text_config"][name] for name in ("bos_token_id", "eos_token_id")}
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    torch.manual_seed(0)
    shape = size if small else {}
    text: dict[str, Any] = {"vocab_size": 8192, "pad_token_id": special["eos_token_id"], **special, **shape}
    CLIPModel(CLIPConfig(text_config=text, vision_config=shape)).save_pretrained(folder)
    CLIPImageProcessor().save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINI / name, folder / name)


def write_pictures(folder: Path, classes: int, count: int) -> None:
    """`count` training pictures of each class, and 5 for the test: noise around a colour of the class, 64 × 64."""
    draw = torch.Generator().manual_seed(0)
    for part, pictures in (("train", count), ("test", 5)):
        for name in names(classes):
            colour = torch.rand(3, generator=torch.Generator().manual_seed(len(name) * 1000 + hash_of(name)))
            (folder / part / name).mkdir(parents=True)
            for index in range(pictures):
                pixels = (0.7 * colour + 0.3 * torch.rand(64, 64, 3, generator=draw)) * 255
                Image.fromarray(pixels.byte().numpy()).save(folder / part / name / f"{index:03}.png")


def hash_of(name: str) -> int:
    """A number that differs between names and is the same in every process."""
    return sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 10**6


if __name__ == "__main__":
    print(table(run(False, [int(word) for word in sys.argv[1:]])))
