"""Give the command line bad input by seed, and check that it answers as promised.

    python tools/fuzz.py --inputs 3000
    python tools/fuzz.py --inputs 1000 --seed 3 --family pictures
    python tools/fuzz.py --only 417            one input again, with all that it printed

Every command must end in success, or in exit code 2 with one line on stderr: never in a traceback, a hang or gigabytes
of memory, never with a change to files of the user, never with a control character on the terminal. `predict` may also
end with exit code 1 and one line. A run that is resumed with damaged files may succeed, with the results of the run
that was never stopped. A model can be read after a command that succeeded, and is unchanged after one that was refused.
"""

import argparse
import contextlib
import hashlib
import json
import os
import resource
import shutil
import stat
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import fork
import tomli_w
from fuzz_pictures import KINDS, add_oddity, damaged, encoded, picture

MEMORY = 3 * 2**30
"""Bytes that a command may take beside those of the process it was forked from."""
SAME = ("results.json", "matrix.csv", "predictions.csv")
REPORTED = ("results.json", "results.json", "timing.json", "environment.json", "predictions.csv")
METHODS = ("discriminant", "simplecil", "strata", "zero-shot")
"""Methods of the models that are made once, in `stock/model-METHOD`."""
NAMES = ("cat", "größe", "🦊", "CAT", "dog_house", "a" * 250, " ", "-x", "m[red]x", "\x1b[2Jx", "\udce9\udcff", "=1+1")
VALUES = (
    *("", " ", "-1", "0", "1", "2", "7", "1e6", "1e-400", "nan", "inf", "-inf", "true", "none", "[]", "1,2", "{}", "é"),
    *("9" * 20, "0x10", "1_000", "a=b", "../..", "/", "\x00", "\n", "--", "-", "'", '"', "🦊", "seed:", "natural"),
)
JSON: tuple[Any, ...] = (None, True, -1, 0, 10**12, 2**70, 1.5, "", "x", "a" * 5000, "\x1b[2J", [], {}, [[1]], [None])
FLAGS = "data data-root data-options tasks increment base order backbone seed shots set preset no-preset skip-broken"
FLAGS += " device precision out resume quiet sed"
SETTINGS = "adapter.epochs adapter.lr adapter.batch_size adapter ratio adapter.schedule x . a.b"


# -- inputs: each maker fills a folder and returns words; the command must not change the files in `place/in` ----------


def pictures(place: Path, chance: Random, stock: Path) -> list[str]:
    """A folder dataset with bad pictures in it, or with bad class folders."""
    root = dataset(place, stock)
    for _ in range(chance.choice((1, 1, 2, 4))):
        folder = chance.choice(sorted(path.parent for path in root.rglob("0.png")))
        kind = chance.randrange(8)
        if kind < 4:
            (folder / f"{chance.choice('012')}.png").write_bytes(chance.choice(KINDS)(chance))
        elif kind < 6:
            add_oddity(folder, chance)
        else:
            (folder.parent / chance.choice(NAMES)).mkdir(exist_ok=True)
    return run(root, chance.choice(([], ["--skip-broken"], ["--shots", "1"])), increment=chance.choice("123"))


def words(place: Path, chance: Random, stock: Path) -> list[str]:
    """Options and settings that do not exist, are misspelt, or have values of the wrong kind."""
    root = dataset(place, stock)
    if chance.random() < 0.5:
        bad = [f"{chance.choice(SETTINGS.split())}={chance.choice(VALUES)}" for _ in range(chance.choice((1, 1, 2)))]
        return run(root, ["--set", "adapter.epochs=1", *bad], "rapf")
    odd = []
    for _ in range(chance.randint(1, 3)):
        odd += [f"--{chance.choice(FLAGS.split())}", *([chance.choice(VALUES)] if chance.random() < 0.85 else [])]
    command = chance.choice(("run", "run", "run", "run", "methods", "bench", "rnu", "datasets"))
    if command == "bench":
        return ["bench", chance.choice(("table9", "table1")), "--data", "nothing", *odd[-2:]]
    return run(root, odd) if command == "run" else [command, *odd[-2:]]


def runs(place: Path, chance: Random, stock: Path) -> list[str]:
    """A run of a stranger, to be resumed or reported: a file of it is damaged, foreign, gone or a link."""
    folder, resumed = place / "run", chance.random() < 0.5
    shutil.copytree(stock / ("stopped" if resumed else "whole"), folder)
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    path = chance.choice(found if resumed else [folder / name for name in REPORTED])
    kind = chance.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(chance.choice(sorted((stock / "other").rglob(f"*{path.suffix}"))).read_bytes())
    elif kind == 2:
        link(path, place)
    elif kind == 3:
        path.write_text(chance.choice(("[" * 50_000, '{"last": NaN}', "", "{}", '{"a": "\\ud800"}')))
    elif kind < 6 and path.suffix == ".json":
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), chance)))
    else:
        path.write_bytes(damaged(path.read_bytes(), chance))
    if resumed:
        return ["run", "--resume", str(folder), *chance.choice(([], [], ["--seed", "3"], ["--set", "adapter.lr=0.5"]))]
    outs = ([], ["page.html"], [link(place / "page", place).name], ["none/a.html"])
    return ["report", str(folder), *(word for out in chance.choice(outs) for word in ("--out", str(place / out)))]


def backbones(place: Path, chance: Random, stock: Path) -> list[str]:
    """A backbone folder with a damaged, missing or foreign file."""
    from clipcil.clip.loading import MINI

    root = dataset(place, stock)
    backbone = root / "backbone"
    shutil.copytree(MINI, backbone)
    path = chance.choice(sorted(path for path in backbone.iterdir() if path.is_file()))
    if chance.random() < 0.1:
        path.unlink()
    elif path.suffix == ".json" and chance.random() < 0.5:
        path.write_text(json.dumps(mutated(json.loads(path.read_text()), chance)))
    else:
        path.write_bytes(damaged(path.read_bytes(), chance))
    return run(root, ["--backbone", str(chance.choice((backbone, backbone, backbone, path)))])


def places(place: Path, chance: Random, stock: Path) -> list[str]:
    """Folders for results that cannot or must not be written."""
    root = dataset(place, stock)
    for name in ("file.txt", "mine/results.json"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text("mine")
    link(root / "link", place)
    (root / "locked").mkdir()
    link(root / "locked" / ".lock", place)
    out = chance.choice(("file.txt", "mine", "link", "file.txt/below", "locked", "train", "x" * 300, "\0"))
    return run(root, [chance.choice(("--out", "--out", "--out", "--resume")), f"{root}/{out}"])


def models(place: Path, chance: Random, stock: Path) -> list[str]:
    """A model of a stranger, or one's own with odd words."""
    model = place / "model"
    shutil.copytree(stock / f"model-{chance.choice(METHODS)}", model)
    if chance.random() < 0.75:
        spoil(model, place, chance)
    name, other = (chance.choice(("red", "blue", "RED", "", *NAMES)) for _ in range(2))
    week = place / "in" / "week"
    for each in chance.sample([name for name in NAMES if name.strip()], chance.randint(1, 3)):
        (week / each).mkdir(parents=True)
        (week / each / "0.png").write_bytes(encoded(picture(chance), "PNG"))
        if chance.random() < 0.3:
            add_oddity(week / each, chance)
    out = chance.choice((place / "out", week, link(place / "in" / "link", place)))
    return {
        "learn": ["learn", str(model), str(week), *chance.choice(([], ["--quiet"], ["--skip-broken"]))],
        "predict": ["predict", str(model), str(week), *chance.choice(([], ["--json"], ["--csv", "--top", "9" * 8]))],
        "forget": ["forget", str(model), name],
        "rename": ["rename", str(model), name, other],
        "show": ["show", str(model), *chance.choice(([], ["--json"]))],
        "export": ["export", str(model), "--out", str(out)],
    }[chance.choice(("learn", "learn", "predict", "predict", "forget", "rename", "show", "export"))]


FAMILIES: dict[str, tuple[Callable[[Path, Random, Path], list[str]], int]] = {
    "pictures": (pictures, 300),
    "words": (words, 300),
    "runs": (runs, 310),
    "models": (models, 500),
    "backbones": (backbones, 60),
    "places": (places, 40),
}
"""Makers of inputs and how often each is chosen."""


def run(root: Path, more: list[str], method: str = "simplecil", increment: str = "2") -> list[str]:
    """The words of a run on a folder of pictures; what `more` repeats takes precedence."""
    return ["run", method, "--data", "folder", "--data-root", str(root), "--increment", increment, *more]


def dataset(place: Path, stock: Path) -> Path:
    """A copy of the good pictures that the command must not change."""
    shutil.copytree(stock / "pictures", place / "in")
    return place / "in"


def link(path: Path, place: Path) -> Path:
    """Put a link to a file of the user in place of `path`."""
    target = place / "in" / "thesis.pdf"
    target.parent.mkdir(exist_ok=True)
    target.write_text("mine")
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    return path


def mutated(value: Any, chance: Random) -> Any:
    """A JSON value with one entry replaced or taken out."""
    spots: list[tuple[Any, Any]] = []

    def collect(item: Any) -> None:
        for key in item if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else ():
            spots.append((item, key))
            collect(item[key])

    collect(value)
    item, key = chance.choice(spots)
    if chance.random() < 0.2:
        del item[key]
    else:
        item[key] = chance.choice(JSON)
    return value


def spoil(model: Path, place: Path, chance: Random) -> None:
    """Something is wrong with a model: its table, its weights, a link, a pipe, a user's file beside it."""
    table, file = model / "model.toml", next(model.glob("weights-*"))
    kind = chance.randrange(8)
    if kind < 3:
        changed = mutated(tomllib.loads(table.read_text()), chance)
        with contextlib.suppress(TypeError):  # TOML has no null
            table.write_text(tomli_w.dumps(changed))
    elif kind == 3:
        table.write_bytes(damaged(table.read_bytes(), chance))
    elif kind == 4:
        reweigh(model, file, chance)
    elif kind == 5:
        link(chance.choice((table, file, model / "README.md", model / ".lock")), place)
    elif kind == 6:
        path = chance.choice((table, file))
        path.unlink()
        os.mkfifo(path)
    else:
        (model / chance.choice(("weights.safetensors", "previous.toml", ".lock"))).write_text("mine")


def reweigh(model: Path, file: Path, chance: Random) -> None:
    """Other numbers or shapes among the weights, under the right checksum."""
    from safetensors.torch import load_file, save

    tensors = load_file(file)
    key = chance.choice(sorted(tensors))
    old = tensors.pop(key)
    value = chance.choice((0, 1)) if not old.is_floating_point() else chance.choice((1e30, -1.0, float("nan")))
    new = chance.choice((old.new_full(old.shape, value), old.flatten()[:1], old.double(), old.new_zeros(()), None))
    data = save(tensors if new is None else {**tensors, key: new.contiguous().clone()})
    checksum = hashlib.sha256(data).hexdigest()
    name = f"weights-{checksum[:12]}.safetensors"
    facts = tomllib.loads((model / "model.toml").read_text())
    file.unlink()
    (model / name).write_bytes(data)
    (model / "model.toml").write_text(tomli_w.dumps({**facts, "weights": name, "sha256": checksum}))


# -- running and judging ----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--inputs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=sorted(FAMILIES), help="one family only")
    parser.add_argument("--only", type=int, help="the number of one input; prints all that it printed")
    given = parser.parse_args()
    started, ended, failures = time.monotonic(), Counter[int](), 0
    with tempfile.TemporaryDirectory(prefix="clipcil-fuzz-") as name:
        work, stock = Path(name), Path(name) / "stock"
        os.environ["CLIPCIL_CACHE"] = str(work / "cache")
        fork.import_all()
        make_stock(stock)
        for number in range(given.inputs) if given.only is None else [given.only]:
            chance, place = Random(f"{given.seed}/{number}"), work / f"case-{number}"
            family = given.family or chance.choices(list(FAMILIES), [share for _, share in FAMILIES.values()])[0]
            place.mkdir()
            command = FAMILIES[family][0](place, chance, stock)
            if command[0] == "run" and not {"--out", "--resume"} & set(command):
                command += ["--out", str(place / "out")]
            before, model = fingerprint(place / "in"), fingerprint(place / "model")
            code = fork.end(fork.start(command, place, bound_memory))
            ended[code] += 1
            said, errors = ((place / file).read_text(errors="replace") for file in ("stdout", "stderr"))
            problem = judge(place, command, code, said, errors, stock)
            if fingerprint(place / "in") != before:
                problem = "changed the files it was given"
            if code == 2 and fingerprint(place / "model") != model:
                problem = "changed a model that it refused to change"
            failures += bool(problem)
            if problem or given.only is not None:
                print(f"input {number} ({family}): {problem}\nclipcil {command}\n{said}{errors[-1500:]}", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    codes = ", ".join(f"{count} exit {code}" for code, count in sorted(ended.items()))
    seconds = time.monotonic() - started
    print(f"{sum(ended.values())} inputs (seed {given.seed}), {seconds:.0f} s: {codes}; {failures} failures")
    return 1 if failures else 0


def bound_memory() -> None:
    """Let the kernel refuse more memory than a command may take."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))


def judge(place: Path, command: list[str], code: int, said: str, errors: str, stock: Path) -> str:
    """What is wrong with how the command ended; empty if nothing is."""
    from clipcil.classifier.folder import load_model
    from clipcil.errors import UserError

    if code not in (0, 2) and (code, command[0]) != (1, "predict"):
        return f"ended with {code}"
    if len(lines := [line for line in errors.splitlines() if line.strip()]) != (0 if code == 0 else 1):
        return f"exit code {code} with {len(lines)} lines on stderr"
    if odd := {letter for letter in said + errors if ord(letter) < 32 or 127 <= ord(letter) < 160} - {"\n"}:
        return f"printed control characters {odd}"
    if code == 0 and command[0] in ("learn", "forget", "rename"):
        try:
            load_model(place / "model")
        except UserError as error:
            return f"left a model that cannot be read: {error}"
    if code == 0 and "--resume" in command and (place / "run").is_dir():
        wrong = [name for name in SAME if (place / "run" / name).read_bytes() != (stock / "whole" / name).read_bytes()]
        if wrong:
            return f"resumed to other results: {', '.join(wrong)}"
    return ""


def fingerprint(root: Path) -> str:
    """Names, kinds, times and contents of everything below `root`, except an empty lock."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        if path.name == ".lock" and not status.st_size:
            continue
        regular = stat.S_ISREG(status.st_mode)
        digest.update(f"{os.fsencode(path)!r} {status.st_mode} {status.st_mtime_ns if regular else 0}".encode())
        digest.update(path.read_bytes() if regular else b"")
    return digest.hexdigest()


def make_stock(stock: Path) -> None:
    """What many inputs need, made once: pictures, models, a run never stopped and the same run stopped."""
    from clipcil.tensor_store import TensorStore

    for name in ("cat", "dog", "tree"):
        for place in (f"train/{name}/0", f"train/{name}/1", f"train/{name}/2", f"test/{name}/0"):
            path = stock / "pictures" / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded(picture(Random(place), size=(16, 16)), "PNG"))
    fork.write_colours(stock / "week", red=("red", "darkred", "maroon"), blue=("blue", "navy", "teal"))
    for name in METHODS:
        fork.run(["learn", str(stock / f"model-{name}"), str(stock / "week"), "--quiet", "--method", name], stock)
    made = run(stock / "pictures", ["--quiet", "--set", "adapter.epochs=2"], "rapf", "1")
    fork.run([*made, "--out", str(stock / "whole")], stock)
    fork.run([*made, "--out", str(stock / "other"), "--seed", "5"], stock)
    save, written = TensorStore.save, 0

    def stop_late(store: TensorStore, *args: Any) -> Path:
        nonlocal written
        path = save(store, *args)
        written += 1
        if written == 5:  # a stage and a checkpoint of two tasks, and the stage of the third
            os._exit(0)
        return path

    fork.end(
        fork.start([*made, "--out", str(stock / "stopped")], stock, lambda: setattr(TensorStore, "save", stop_late))
    )
    assert list((stock / "stopped").rglob("stages/*.safetensors")), "the stopped run has no stage under way"


if __name__ == "__main__":
    sys.exit(main())
