"""Give the command line bad input of every kind, by seed, and see that it answers as promised.

    python tools/fuzz.py --inputs 3000
    python tools/fuzz.py --inputs 1000 --seed 3 --family pictures
    python tools/fuzz.py --only 417            one input again, with all that it printed

Each input (run, bench, learn, predict, forget, rename, show, export, report, describe) must end in success, or in exit
code 2 with exactly one line on stderr: never in a traceback, never in a process that hangs or takes gigabytes, never
with a change to files of the user, never with a control character or a key on the terminal. `predict` may also end with
exit code 1 and one line, where some pictures cannot be read. A run that is resumed with damaged files may also succeed,
but then with the results of the run that was never stopped. A model is usable after a command that succeeded, and as it
was after one that was refused. Every input is a process of its own, forked from one that has loaded everything, so that
a thousand take minutes; its stdout takes UTF-8 alone, its memory is bounded by the kernel, and where this process may
mount one, some write to a file system of a few kilobytes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import fuzz_server
from fuzz_inputs import FAMILIES as RUN_FAMILIES
from fuzz_models import METHODS, MODEL_FAMILIES
from fuzz_pictures import encoded, picture
from PIL import Image

if TYPE_CHECKING:
    from clipcil.clip import CLIP

FAMILIES = {**RUN_FAMILIES, **MODEL_FAMILIES}
PATIENCE = 300.0
"""Seconds after which an input counts as hanging; generous, for a machine that does other things too."""
MEMORY = 3 * 2**30
"""Bytes that a command may take beside those of the process it was forked from."""
SAME = ("results.json", "matrix.csv", "predictions.csv")


@dataclass
class Case:
    number: int
    family: str
    place: Path
    words: list[str]
    before: str
    model: str
    """Fingerprint of `place/model` before the command, and after it where the command was refused."""
    process: int
    since: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=sorted(FAMILIES), help="one family only")
    parser.add_argument("--only", type=int, help="the number of one input")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--lines", action="store_true", help="print what was said about each input")
    given = parser.parse_args()
    numbers = range(given.inputs) if given.only is None else [given.only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="clipcil-fuzz-") as work:
        os.environ["CLIPCIL_CACHE"] = str(Path(work) / "cache")
        stock = Path(work) / "stock"
        make_stock(stock)
        ended, failures = run_all(Path(work), stock, numbers, given)
    codes = ", ".join(f"{count} exit {code}" for code, count in sorted(ended.items(), key=str))
    seconds = time.monotonic() - started
    print(f"{sum(ended.values())} inputs (seed {given.seed}), {seconds:.0f} s: {codes}; {failures} failures")
    return 1 if failures else 0


def run_all(work: Path, stock: Path, numbers: object, given: argparse.Namespace) -> tuple[Counter[object], int]:
    waiting = list(numbers)[::-1]  # type: ignore[call-overload]
    running: list[Case] = []
    ended: Counter[object] = Counter()
    failures = 0
    while waiting or running:
        while waiting and len(running) < given.jobs:
            running.append(begin(waiting.pop(), work, stock, given))
        for case in list(running):
            code = poll(case)
            if code is None:
                continue
            running.remove(case)
            ended[code] += 1
            if problem := judge(case, code, stock):
                failures += 1
                print(f"input {case.number} ({case.family}): {problem}\n  clipcil {case.words}", flush=True)
                print(
                    "  " + (case.place / "stderr").read_text(errors="replace")[-1500:].replace("\n", "\n  "), flush=True
                )
            elif given.lines:
                said = (case.place / "stderr").read_text(errors="replace").strip()
                print(f"{case.number} {case.family} {code}: {' '.join(case.words)[:80]!r} {said[-160:]}", flush=True)
            elif given.only is not None:
                print(
                    f"clipcil {case.words}\n{(case.place / 'stdout').read_text()}{(case.place / 'stderr').read_text()}"
                )
            if (case.place / "full").is_mount():
                subprocess.run(["umount", case.place / "full"], check=True)
            shutil.rmtree(case.place, ignore_errors=True)
        time.sleep(0.002)
    return ended, failures


def begin(number: int, work: Path, stock: Path, given: argparse.Namespace) -> Case:
    chance = Random(f"{given.seed}/{number}")
    family = given.family or chance.choices(list(FAMILIES), [share for _, share in FAMILIES.values()])[0]
    place = work / f"case-{number}"
    place.mkdir()
    if family == "full":
        (place / "full").mkdir()
        mount(place / "full", chance.choice((0, 16, 40, 80, 120, 200, 400)))
    words = FAMILIES[family][0](place, chance, stock)
    if words[0] == "run" and not {"--out", "--resume"} & set(words):
        words += ["--out", str(place / "out")]
    before, model = fingerprint(place / "in"), fingerprint(place / "model")
    process = os.fork()
    if process == 0:
        child(place, words)
    return Case(number, family, place, words, before, model, process, time.monotonic())


def mount(folder: Path, kilobytes: int) -> None:
    """A file system of that size, where this process may mount one; else the kernel bounds every file (see `child`)."""
    words = ["mount", "-t", "tmpfs", "-o", f"size={max(4, kilobytes)}k", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True, check=False).returncode:
        (folder.parent / "small files").write_text(str(1024 * kilobytes))


def child(place: Path, words: list[str]) -> None:
    """Never returns: the command in a process of its own, its output in files."""
    code = 70
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(place / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", errors="strict") for n in (1, 2))
    os.chdir(place)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    if (place / "small files").is_file():
        size = int((place / "small files").read_text())
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        from clipcil.cli import main as command

        command(words)
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 71
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def poll(case: Case) -> object:
    """The exit code once there is one; "hang" after `PATIENCE` seconds."""
    done, status = os.waitpid(case.process, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(status)
    if time.monotonic() - case.since > PATIENCE:
        os.kill(case.process, 9)
        os.waitpid(case.process, 0)
        return "hang"
    return None


def judge(case: Case, code: object, stock: Path) -> str:
    """What is wrong with how the case ended; empty if nothing is."""
    said, errors = ((case.place / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    lines = [line for line in errors.splitlines() if line.strip()]
    if code not in (0, 2) and (code, case.words[0]) != (1, "predict"):
        return f"ended with {code}"
    if len(lines) != (0 if code == 0 else 1):
        return f"exit code {code} with {len(lines)} lines on stderr"
    if odd := {letter for letter in said + errors if ord(letter) < 32 or 127 <= ord(letter) < 160} - {"\n"}:
        return f"printed control characters {odd}"
    told = "--key-from" in case.words or fuzz_server.KEY in " ".join(case.words)  # else it is the server's own word
    if told and fuzz_server.KEY in said + errors:
        return "printed the key"
    if fingerprint(case.place / "in") != case.before:
        return "changed the files it was given"
    if problem := judge_model(case, code):
        return problem
    if case.family == "resumes" and code == 0:
        wrong = [
            name for name in SAME if (case.place / "run" / name).read_bytes() != (stock / "whole" / name).read_bytes()
        ]
        if wrong:
            return f"resumed to other results: {', '.join(wrong)}"
    return ""


def judge_model(case: Case, code: object) -> str:
    """A model is as it was after a command that was refused, and usable after one that changed it."""
    from clipcil.classifier.folder import load_model
    from clipcil.errors import UserError

    model = case.place / "model"
    if not model.exists():
        return ""
    if code == 2 and fingerprint(model) != case.model:
        return "changed a model that it refused to change"
    if code == 0 and case.words[0] in ("learn", "forget", "rename"):
        try:
            load_model(model)
        except UserError as error:
            return f"left a model that cannot be read: {error}"
    return ""


def fingerprint(root: Path) -> str:
    """Names, kinds, times and contents of all that lies below `root`, but for locks."""
    digest = hashlib.sha256()
    root = root.resolve()
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted([*files, *folders]):
            path = Path(folder) / name
            if name == ".lock" and not path.lstat().st_size:
                continue
            status = path.lstat()
            mark = f"{os.fsencode(path)!r} {status.st_mode} {status.st_mtime_ns if stat.S_ISREG(status.st_mode) else 0}"
            digest.update(mark.encode())
            if stat.S_ISREG(status.st_mode):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def make_stock(stock: Path) -> None:
    """What many inputs need, made once: good pictures, a backbone, a run never stopped and the same run stopped."""
    import torch

    from clipcil.classifier import classifier
    from clipcil.cli import main as command
    from clipcil.clip import load_clip
    from clipcil.descriptions import client
    from clipcil.experiment import experiment as engine
    from clipcil.tensor_store import TensorStore
    from clipcil.training.device import make_fabric

    torch.set_num_threads(1)
    chance = Random(0)
    for part, count in (("train", 3), ("test", 1)):
        for name in ("cat", "dog", "tree"):
            for number in range(count):
                path = stock / "pictures" / part / name / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(encoded(picture(chance, size=(16, 16)), "PNG"))
    small = write_backbone(stock / "backbone")
    engine.load_clip = classifier.load_clip = lambda name: small if name == "mini" else load_clip(name)
    # Whatever a command imports late is to be imported here, once, and not in every child.
    import lightning_fabric  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import clipcil.report.page  # noqa: F401

    make_fabric("cpu", "32-true")
    for warm in (["methods"], ["datasets"]):
        with contextlib.redirect_stdout(io.StringIO()):
            command(warm)
    for name, colours in (("red", ("red", "darkred", "maroon")), ("blue", ("blue", "navy", "teal"))):
        (stock / "week" / name).mkdir(parents=True)
        for colour in colours:
            Image.new("RGB", (16, 16), colour).save(stock / "week" / name / f"{colour}.png")
    for name in METHODS:
        with contextlib.redirect_stdout(io.StringIO()):
            command(["learn", str(stock / f"model-{name}"), str(stock / "week"), "--quiet", "--method", name])
    client.LONGEST_WAIT = 0.02
    usual = client.Endpoint.__init__.__defaults__ or ()
    client.Endpoint.__init__.__defaults__ = tuple(1.0 if value == 60.0 else value for value in usual)
    os.environ["FUZZ_KEY"] = fuzz_server.KEY
    (stock / "server").write_text(fuzz_server.start())
    words = ["run", "rapf", "--quiet", "--data", "folder", "--data-root", str(stock / "pictures"), "--increment", "1"]
    words += ["--set", "adapter.epochs=2"]
    save = TensorStore.save
    written = 0

    def stop_late(store: TensorStore, *args: object) -> Path:
        nonlocal written
        path = save(store, *args)  # type: ignore[arg-type]
        written += 1
        if written == 5:  # a stage and a checkpoint of two tasks, and the stage of the third
            os._exit(0)
        return path

    for name, more, stop in (("whole", [], False), ("other", ["--seed", "5"], False), ("stopped", [], True)):
        process = os.fork()
        if process == 0:
            if stop:
                TensorStore.save = stop_late  # type: ignore[method-assign]
            child(stock, [*words, *more, "--out", str(stock / name)])
        if os.waitpid(process, 0)[1]:
            sys.exit(f"the run '{name}' failed: {(stock / 'stderr').read_text()}")
    assert list((stock / "stopped").rglob("stages/*.safetensors")), "the stopped run has no stage under way"


def write_backbone(folder: Path) -> CLIP:
    """A CLIP of a few thousand random weights in Hugging Face's layout; it stands in for "mini"."""
    import torch
    from safetensors.torch import save_file

    from clipcil.clip import load_clip
    from clipcil.clip.config import CLIPConfig
    from clipcil.clip.loading import MINI
    from clipcil.clip.model import CLIP
    from clipcil.clip.preprocess import Preprocess, Steps
    from clipcil.clip.tokenizer import Tokenizer

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    config = {"projection_dim": 16, "text_config": {**sizes, "vocab_size": 8192, "max_position_embeddings": 77}}
    config = {**config, "vision_config": vision}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 16, "crop_size": 16}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MINI / name, folder / name)
    torch.manual_seed(0)
    clip = CLIP(CLIPConfig.from_hf(config), Tokenizer.from_folder(folder, 77), Preprocess(Steps.plain(16)), "small")
    weights = {**clip.vision.state_dict(), **clip.text.state_dict(), "logit_scale": clip.logit_scale.detach()}
    save_file(weights, folder / "model.safetensors")
    return load_clip(str(folder))


if __name__ == "__main__":
    sys.exit(main())
