"""Feed a reader of strangers' bytes with inputs that atheris invents, guided by the code that they reach.

    pip install '.[fuzz]'
    python tools/fuzz.py pictures --seconds 600

A reader must accept an input or refuse it with a `UserError`; the server must answer with a status below 500. Anything
else, 30 seconds or 3 GB for one input end the search, which leaves the input as `crash-…` in the folder that it names.
Copied to `tests/fuzz/TARGET/`, where the search starts, it is read by every run of the tests.
"""

import argparse
import asyncio
import atexit
import hashlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "fuzz"
INSTRUMENTED = ("clipcil", "PIL", "python_multipart", "starlette.formparsers", "tomllib")
LIMITS = ("-timeout=30", "-rss_limit_mb=3072", "-max_len=65536")


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
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--new", type=Path, metavar="DIR", help="folder for new inputs; default: a temporary one")
    given = parser.parse_args()
    import atheris

    place = given.new or Path(tempfile.mkdtemp(prefix="clipcil-fuzz-"))
    shutil.copytree(CORPUS / given.target, place, dirs_exist_ok=True)
    with atheris.instrument_imports(include=list(INSTRUMENTED)):
        for path in sorted((CORPUS / given.target).iterdir()):
            read(given.target, path.read_bytes())  # imports what the target needs, and must pass
    print(f"{given.target}: inputs in {place}", flush=True)
    words = [*LIMITS, f"-max_total_time={given.seconds}", f"-artifact_prefix={place}/", str(place)]
    atheris.Setup([sys.argv[0], *words], lambda data: read(given.target, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
