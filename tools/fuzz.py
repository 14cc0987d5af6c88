"""Feed a reader of strangers' bytes with inputs that atheris invents, guided by the code that they reach.

    pip install '.[fuzz]'
    python tools/fuzz.py pictures tokenizer --seconds 600

For each target it prints how many inputs were read, in how many seconds of CPU, and how many of them failed.

A reader must accept an input or refuse it with a `UserError`; the server must answer with a status below 500. Anything
else, 30 seconds or 3 GB for one input end the search, which leaves the input as `crash-…` in the folder that it names.
Copied to `tests/fuzz/TARGET/`, where the search starts, it is read by every run of the tests.
"""

import argparse
import asyncio
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "fuzz"
INSTRUMENTED = ("clipcil", "PIL", "python_multipart", "starlette.formparsers", "tomllib")
LIMITS = ("-timeout=30", "-rss_limit_mb=3072", "-max_len=65536", "-print_final_stats=1")
FINDINGS = ("crash-", "timeout-", "oom-", "leak-")
"""How the names of inputs begin that ended a search."""


def pictures(data: bytes, folder: Path) -> None:
    """Decode a picture, and draw it smaller."""
    from clipcil.data.pictures import decode, thumbnail

    thumbnail(decode(data, "a picture"), 32)


def model(data: bytes, folder: Path) -> None:
    """Read `model.toml`."""
    from clipcil.classifier.folder import read_model

    (folder / "model.toml").write_bytes(data)
    read_model(folder)


def tokenizer(data: bytes, folder: Path) -> None:
    """Read `tokenizer.json`, and encode a text with it."""
    from clipcil.clip.tokenizer import Tokenizer

    (folder / "tokenizer.json").write_bytes(data)
    Tokenizer.from_folder(folder, 77)(["a photo of a cat"])


def tensors(data: bytes, folder: Path) -> None:
    """Read a safetensors file under its right checksum, as the weights of a model and as those of a backbone."""
    from clipcil.clip.loading import read_safetensors
    from clipcil.errors import UserError
    from clipcil.tensor_store import read_entry

    path = folder / "weights.safetensors"
    path.write_bytes(data)
    try:
        read_entry(path, hashlib.sha256(data).hexdigest())
    except UserError:
        read_safetensors(path)  # allows more: other types of numbers, and values that are not finite


def multipart(data: bytes, folder: Path) -> None:
    """Post a form with the boundary `x` that adds pictures to a lesson."""
    import httpx

    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(server())
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7860") as client:
            headers = {"Content-Type": "multipart/form-data; boundary=x"}
            return await client.post("/api/waiting", content=data, headers=headers)

    answer = asyncio.run(post())
    assert answer.status_code < 500, answer.text
    assert answer.json().keys() == ({"error"} if answer.status_code >= 400 else {"name", "pictures"})


@cache
def server() -> Any:
    """The JSON API of a model that does not exist yet."""
    from clipcil.serve.answers import Limits
    from clipcil.serve.api import Service
    from clipcil.serve.model import ServedModel
    from clipcil.serve.server import build_app
    from clipcil.serve.staging import Staging

    folder = Path(tempfile.mkdtemp(prefix="clipcil-fuzz-"))
    limits = Limits(waiting_pictures=2)
    staging = Staging(folder, limits)
    served = ServedModel(folder / "model", "simplecil", None, "cpu", staging)
    return build_app(Service(served, staging, limits), 0, None)


TARGETS = {each.__name__: each for each in (pictures, model, tokenizer, tensors, multipart)}


def read(target: str, data: bytes) -> None:
    """Give an input to a target; a refusal is fine, any other exception passes on."""
    from clipcil.errors import UserError

    with tempfile.TemporaryDirectory(prefix="clipcil-fuzz-") as folder:
        try:
            TARGETS[target](data, Path(folder))
        except UserError as error:
            assert str(error), "a refusal must give the reason"


def search(target: str, seconds: int, place: Path) -> None:
    """Feed a target until this process has computed for so long, or an input ends it."""
    import atheris

    shutil.copytree(CORPUS / target, place, dirs_exist_ok=True)
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        for path in sorted((CORPUS / target).iterdir()):
            read(target, path.read_bytes())  # imports what the target needs, and must pass
    end = time.process_time() + seconds

    def read_until_end(data: bytes) -> None:
        if time.process_time() > end:
            os.kill(os.getpid(), signal.SIGUSR1)  # libFuzzer ends before the next input
        read(target, data)

    atheris.Setup([sys.argv[0], *LIMITS, f"-artifact_prefix={place}/", str(place)], read_until_end)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60, help="seconds of CPU for each target")
    parser.add_argument("--new", type=Path, metavar="DIR", help="folder for new inputs; default: a temporary one")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # in a process that counts for itself
    given = parser.parse_args()
    if given.alone:
        search(given.targets[0], given.seconds, given.new)
    folder, failed = given.new or Path(tempfile.mkdtemp(prefix="clipcil-fuzz-")), False
    print(f"new inputs in {folder}\ntarget     executions  CPU seconds  findings", flush=True)
    for target in given.targets:
        place, before = folder / target, resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [sys.executable, __file__, target, "--alone", "--seconds", str(given.seconds), "--new", str(place)]
        with tempfile.TemporaryDirectory(prefix="clipcil-fuzz-") as scratch:
            done = subprocess.run(words, env={**os.environ, "TMPDIR": scratch}, capture_output=True, check=False)
        after, said = resource.getrusage(resource.RUSAGE_CHILDREN), done.stderr.decode(errors="replace")
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        executions = int(re.findall(r"number_of_executed_units: (\d+)|$", said)[0] or 0)
        found = [str(path) for path in place.glob("*-*") if path.name.startswith(FINDINGS)]
        print(f"{target:10} {executions:10,} {used:12.0f} {len(found):9}", flush=True)
        if found or done.returncode:
            failed = True
            print(f"{said[-3000:]}\n{target} failed: {', '.join(found)}", file=sys.stderr)
    sys.exit(failed)


if __name__ == "__main__":
    main()
