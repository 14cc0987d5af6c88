"""Files, folders and servers of strangers: one line, bounded memory, no hang, no network, no key on the terminal."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from finished_runs import write_run
from PIL import Image
from safetensors.torch import save
from short_runs import tree
from small_models import plain, refused, week
from test_disk import files_of_at_most

import clipcil
from clipcil.classifier.model_folder import load_model, read_model, write_model
from clipcil.classifier.output import open_printer
from clipcil.classifier.predicting import Prediction
from clipcil.cli import main
from clipcil.clip import hub
from clipcil.data import archives, parquet, pictures
from clipcil.data.names import same_name
from clipcil.data.parquet import identity_of_tables, read_parquet
from clipcil.data.pictures import decode
from clipcil.data.store import PixelStore
from clipcil.data.tree import list_files
from clipcil.descriptions.client import Endpoint, ask_for_descriptions, parse_answer
from clipcil.descriptions.file import read_table
from clipcil.errors import UserError, printable
from clipcil.experiment.checkpoint import load_tensors
from clipcil.experiment.display import PlainDisplay
from clipcil.files import cache_folder, sha256
from clipcil.network import allow_downloads, on_behalf_of_a_folder
from clipcil.reading import open_regular, parse_json, parse_toml, read_bytes, read_json, read_tensors
from clipcil.report.runs import find_runs, read_run
from clipcil.terminal import stops_once

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        (DEEP, "deeper than 32"),
        ("[" * 40 + "]" * 40, "deeper than 32"),
        ('{"a": NaN}', "no finite number"),
        ('{"a": 1e999}', "no finite number"),
        ('{"a": -Infinity}', "no finite number"),
        ('"\\ud800"', "not whole Unicode"),
        (f'{{"a": {"9" * 30}}}', "more than 64 bits"),
        (f'{{"a": {"9" * 5000}}}', "cannot be read as JSON"),
    ],
)
def test_json_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_json(text, "x.json")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "cannot be read as TOML"),
        (f"a = {DEEP}", "deeper than 32"),
        ("a = nan", "no finite number"),
        ("a = +inf", "no finite number"),
        ("a = 2020-01-01", "holds a date"),
        (".".join("a" * 50) + " = 1", "deeper than 32"),
    ],
)
def test_toml_that_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_toml(text, "x.toml")


def test_only_regular_files_of_a_bounded_size_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    os.mkfifo(tmp_path / "pipe")
    for path, said in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "not a regular file"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "link", "is a symbolic link"),
        (tmp_path / "none", "is missing"),
    ):
        with pytest.raises(UserError, match=said):
            open_regular(path)
    assert read_json(tmp_path / "link", links=True) == {}
    with pytest.raises(UserError, match="larger than"):
        read_bytes(tmp_path / "file", 1)
    with pytest.raises(UserError, match="regular file"):
        read_table(Path("/dev/zero"))


def weights(**tensors: torch.Tensor) -> bytes:
    return save(tensors)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "no whole safetensors"),
        (weights(a=torch.tensor([1.0, float("nan")])), "holds a NaN"),
        (weights(a=torch.tensor(float("inf"), dtype=torch.float16)), "holds a NaN"),
        (weights(a=torch.zeros(2).to(torch.float8_e4m3fn)), "not used here"),
        (weights(a=torch.zeros(9))[:-1], "no whole safetensors"),
    ],
)
def test_tensors_that_are_refused(data: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(UserError, match=said):
        read_tensors(tmp_path / "w")
    (tmp_path / "w.json").write_text(json.dumps({"sha256": sha256(tmp_path / "w")}))
    (tmp_path / "w").rename(tmp_path / "w.safetensors")
    with pytest.raises(UserError, match=said):
        load_tensors(tmp_path / "w.safetensors")


VALUES: list[Any] = ["x", "", -1, 0, 10**12, 2**63, 1.5, True, [], {}, [[]], [1], {"a": 1}, "\x1b[2J", "a" * 20_000]


def mutations(value: Any) -> Iterator[Callable[[], Any]]:
    """Every entry of a table replaced by every kind of value, or taken out."""

    def spots(item: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        keys = list(item) if isinstance(item, dict) else range(min(2, len(item))) if isinstance(item, list) else []
        for key in keys:
            yield (*path, key)
            yield from spots(item[key], (*path, key))

    for path in spots(value, ()):
        for new in [*VALUES, None]:
            copy = json.loads(json.dumps(value))
            place = copy
            for key in path[:-1]:
                place = place[key]
            if new is None:
                del place[path[-1]]
            else:
                place[path[-1]] = new
            yield lambda copy=copy: copy


def test_a_mutated_model_is_used_or_refused_in_one_line(saved: Path) -> None:
    facts, _ = load_model(saved)
    table = clipcil.reading.read_toml(saved / "model.toml")
    refusals = 0
    for number, make in enumerate(mutations(table)):
        (saved / "model.toml").write_text(tomli_w.dumps(make()))
        try:
            read_model(saved)
            if number % 40 == 0:  # loading takes longer than reading
                clipcil.load(saved)
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 300 and facts.sizes == [2]
    for name in ("nan", "inf", "[[[[]]]]", "10e5000"):
        (saved / "model.toml").write_text(tomli_w.dumps(table).replace("temperature = ", f"temperature = {name} #"))
        with pytest.raises(UserError, match="is damaged"):
            clipcil.load(saved)


def test_weights_that_do_not_fit_are_refused_in_one_line(saved: Path) -> None:
    facts, tensors = load_model(saved)
    for key, value in tensors.items():
        for other in (value[:1], torch.zeros(7), torch.zeros(()), value.new_zeros(0), value.to(torch.int8)):
            if other.shape != value.shape or other.dtype != value.dtype:
                write_model(saved, facts, {**tensors, key: other})
                with contextlib.suppress(UserError):  # used, where the method does not need it, or refused
                    clipcil.load(saved).predict(plain("red"))


def test_mutated_results_are_used_or_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", "dmc-ot", tasks=2)
    values = json.loads((run / "results.json").read_text())
    del values["config"]["method"]
    values["config"]["method"] = {"beta": 0.1}
    refusals, taken = 0, 0
    for make in mutations(values):
        (run / "results.json").write_text(json.dumps(make()))
        try:
            found = read_run(run)
            _ = (found.method, found.data, found.seed, found.seconds, found.key, found.stream)
            taken += 1
        except UserError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 500 and taken > 50
    (run / "results.json").write_text(DEEP)
    assert "deeper than" in refused(capsys, "report", str(run))


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """A folder 1,200 folders down. Python's own functions cannot delete it: they recurse."""
    folder = tmp_path
    for _ in range(1200):
        folder = folder / "d"
        folder.mkdir()
    yield folder
    subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)


def test_runs_and_pictures_are_looked_for_at_any_depth(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no finished run"):
        find_runs([tmp_path])
    Image.new("RGB", (4, 4)).save(deep / "a.png")
    assert list_files(tmp_path) == [deep / "a.png"]


def test_folders_that_link_to_each_other_end_and_count_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        plain("red")[0].save(tmp_path / name / f"{name}.png")
        for other in ("a", "b", "c"):
            (tmp_path / name / f"to {other}").symlink_to(tmp_path / other)
    assert [path.name for path in list_files(tmp_path)] == ["a.png", "b.png", "c.png"]
    assert len(list_files(tmp_path / "a")) == 3


@contextlib.contextmanager
def memory_of_at_most(more: int) -> Iterator[None]:
    """The process may take `more` bytes beside what it has; the kernel refuses the rest."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (has + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_large_pictures_take_turns_and_little_memory(tmp_path: Path) -> None:
    """At 4,000 × 4,000 what 9,990 × 9,990 does: before, 4 of them took 4 × 16 million × 24 bytes = 1.5 GB."""
    Image.fromarray(np.full((4000, 4000), 40_000, dtype=np.uint16)).save(tmp_path / "grey.png")
    seen = []
    with memory_of_at_most(700 * 2**20):
        threads = [
            threading.Thread(target=lambda: seen.append(decode(tmp_path / "grey.png", "x").getpixel((9, 9))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [(156, 156, 156)] * 4


def test_strips_change_no_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(0)
    clear = Image.fromarray(chance.integers(0, 256, (50, 30, 4), dtype=np.uint8))
    greys = [Image.fromarray(chance.integers(0, 65536, (50, 30)).astype(kind)) for kind in ("<u2", "<i4", "<f4")]
    whole = [np.asarray(decode(image, "x")) for image in (clear, *greys)]
    monkeypatch.setattr(pictures, "STRIP", 70)
    for image, expected in zip((clear, *greys), whole, strict=True):
        assert np.array_equal(np.asarray(decode(image, "x")), expected)
    white = Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    assert np.array_equal(whole[0], np.asarray(white))


def test_archives_stay_small_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLIPCIL_CACHE", str(tmp_path / "cache"))
    with tarfile.open(tmp_path / "folders.tgz", "w:gz", compresslevel=1) as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        for _ in range(100):
            tar.addfile(folder)
    monkeypatch.setattr(archives, "MAX_FILES", 99)
    with pytest.raises(UserError, match="more than 99 files"):
        archives.unpack(tmp_path / "folders.tgz")
    with tarfile.open(tmp_path / "header.tgz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("x" * (archives.MAX_HEADER + 10)))
    with pytest.raises(UserError, match="a header of"):
        archives.unpack(tmp_path / "header.tgz")
    with tarfile.open(tmp_path / "deep.tgz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a/" * 1500 + "x"))
    with pytest.raises(UserError, match="more than 100 folders"):
        archives.unpack(tmp_path / "deep.tgz")
    with tarfile.open(tmp_path / "times.tgz", "w:gz", format=tarfile.PAX_FORMAT) as tar:
        late = tarfile.TarInfo("x")
        late.pax_headers = {"mtime": "1e300"}
        tar.addfile(late)
    assert (archives.unpack(tmp_path / "times.tgz") / "x").is_file()


def test_parquet_files_that_grow_are_refused_and_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    picture = os.urandom(50_000)
    pq.write_table(pa.table({"image": [picture] * 6000, "label": [0] * 6000}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 200_000
    with memory_of_at_most(2**30), pytest.raises(UserError, match="unpacks to more than 256 MiB"):
        read_parquet([tmp_path / "bomb.parquet"])
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    data = os.urandom(200_000)
    for path, first in zip(files, (b"a", b"b"), strict=True):
        path.write_bytes(first + data)
    assert identity_of_tables(files[:1]) != identity_of_tables(files[1:])
    assert parquet.ROWS < 1000


def test_the_number_of_columns_follows_the_classes(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain("red")[0].save(tmp_path / "a.png")
    main(["predict", str(saved), str(tmp_path / "a.png"), "--csv", "--top", "30000000"])
    assert capsys.readouterr().out.splitlines()[0].count(",") == 3 + 2 * 2


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Connections that were tried; none goes through."""
    tried: list[str] = []

    def connect(self: socket.socket, address: Any) -> None:
        tried.append(str(address))
        raise OSError("no network in tests")

    def look_up(*args: Any, **kwargs: Any) -> Any:
        tried.append(str(args))
        raise OSError("no network in tests")

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return tried


def test_nothing_is_fetched_on_behalf_of_a_folder(
    asked: list[str],
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (saved / "model.toml").read_text()
    (saved / "model.toml").write_text(text.replace('backbone = "mini"', 'backbone = "stranger/private"'))
    plain("red")[0].save(tmp_path / "a.png")
    for words in (["predict", str(saved), str(tmp_path / "a.png")], ["forget", str(saved), "red"]):
        assert "--allow-download" in refused(capsys, *words)
    run = write_run(tmp_path / "run", "simplecil", tasks=2)
    values = json.loads((run / "results.json").read_text())
    values["config"]["run"] |= {"data": "hub", "data_options": {"repo": "stranger/private"}}
    (run / "results.json").write_text(json.dumps(values))
    main(["report", str(run)])
    assert "not on this machine" in (run / "report.html").read_text()
    assert not asked

    def fetch(repository: str, file: str, revision: str | None) -> str:
        asked.append(repository)
        raise OSError("no network in tests")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    assert "from the hub" in refused(capsys, "predict", str(saved), str(tmp_path / "a.png"), "--allow-download")
    assert asked == ["stranger/private"]


def test_a_revision_is_pinned_and_recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    calls: list[tuple[Any, ...]] = []

    def fetch(repository: str, file: str, revision: str | None, how: str = "fetched") -> str:
        calls.append((repository, revision, how))
        return str(tmp_path / "snapshots" / "0a1b2c" / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", functools.partial(fetch, how="looked for"))
    assert hub.is_id("owner/name@v1.0") and not hub.is_id("owner/name@") and not hub.is_id("a/b/c")
    folder = hub.download("owner/name@v1.0")
    assert hub.pinned("owner/name", folder) == "owner/name@0a1b2c"
    assert hub.pinned("owner/name@v1.0", folder) == "owner/name@v1.0"
    with on_behalf_of_a_folder():
        hub.download("owner/name")
    with allow_downloads(), on_behalf_of_a_folder():
        hub.download("owner/name")
    assert list(dict.fromkeys(calls)) == [
        ("owner/name", "v1.0", "fetched"),
        ("owner/name", None, "looked for"),
        ("owner/name", None, "fetched"),
    ]


KEY = "sk-secret-0123456789"


class Server:
    """Answers every connection with the same bytes, or drop by drop."""

    def __init__(self, answer: bytes, drip: bool = False) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.answer, self.drip = answer, drip
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self.talk, args=(connection,), daemon=True).start()

    def talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(65536)
            connection.sendall(self.answer)
            while self.drip:
                connection.sendall(b" ")
                time.sleep(0.05)


def test_the_key_is_never_shown(tmp_path: Path) -> None:
    server = Server(f"HTTP/1.1 401 wrong key {KEY}\r\nContent-Length: 0\r\n\r\n".encode())
    with pytest.raises(UserError) as caught:
        ask_for_descriptions(["a", "b"], Endpoint(f"{server.url}?api-key=hidden", "m", KEY), tmp_path / "x.json")
    assert KEY not in str(caught.value) and "hidden" not in str(caught.value) and "401" in str(caught.value)
    for url in (f"http://me:{KEY}@localhost/v1", f"htp://me:{KEY}@x", f"http://x?{KEY}y\x07"):
        with pytest.raises(UserError) as caught:
            Endpoint(url, "m", "other")
        assert KEY not in str(caught.value)


@pytest.mark.parametrize("url", ["http://[::1", "http://x:99999999", "http://", "x", "http://a b", "http://\udcff"])
def test_a_bad_endpoint_is_one_line(url: str) -> None:
    with pytest.raises(UserError, match="is not an address"):
        Endpoint(url, "m")


def test_a_server_that_drips_is_given_up_on(tmp_path: Path) -> None:
    for head in (b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 400 no\r\n\r\n"):
        server = Server(head, drip=True)
        started = time.monotonic()
        with pytest.raises(UserError, match=r"takes too long|answered 400"):
            ask_for_descriptions(["a", "b"], Endpoint(server.url, "m", timeout=0.5, attempts=1), tmp_path / "x.json")
        assert time.monotonic() - started < 60


def test_half_characters_in_an_answer_are_no_answer() -> None:
    inner = '{"first": ["a \\ud800"], "second": ["b"]}'
    text = json.dumps({"choices": [{"message": {"content": inner}}]})
    with pytest.raises(Exception, match="not the JSON"):
        parse_answer(text)


# -- wrong without a word ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other"), [("green apple", "Green_Apple"), ("caf\u00e9", "cafe\u0301"), ("STRASSE", "straße")]
)
def test_names_that_mean_one_class(one: str, other: str) -> None:
    assert same_name(one) == same_name(other)


def test_a_renamed_class_is_found_again_by_its_folder(made: clipcil.Classifier, tmp_path: Path) -> None:
    made.save(tmp_path / "m")
    model = clipcil.load(tmp_path / "m")
    model.rename("red", "dark_red")
    lesson = model.learn({"dark red": plain("red", "maroon")})
    assert not lesson.new and model.classes == ["dark red", "blue"]


def test_a_model_is_read_while_another_replaces_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from clipcil.classifier import model_folder

    model = clipcil.load(saved)
    model.forget("blue")
    read, swapped = model_folder.read_model, []

    def slowly(folder: Path, *args: str) -> Any:
        facts = read(folder, *args)
        if not swapped:
            swapped.append(True)
            monkeypatch.setattr(model_folder, "read_model", read)
            model.save(saved)
        return facts

    monkeypatch.setattr(model_folder, "read_model", slowly)
    facts, tensors = load_model(saved)
    assert [known.name for known in facts.known] == ["red"] and tensors


# -- tracebacks -------------------------------------------------------------------------------------------------------


def test_no_home_is_needed_where_a_cache_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    monkeypatch.delenv("CLIPCIL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/clipcil")
    monkeypatch.delenv("XDG_CACHE_HOME")
    with pytest.raises(UserError, match="set CLIPCIL_CACHE"):
        cache_folder()


def test_names_reach_the_terminal_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("m[red]x\x1b[2J\x9b\u202e\n") == "m[red]x\\x1b[2J\\x9b\\u202e\\n"
    assert printable("größe 👩\u200d👩 鳥") == "größe 👩\u200d👩 鳥"
    PlainDisplay().start("m[red]x\x1b[2J", 1)
    for kind in ((False, False), (True, False), (False, True)):
        open_printer(*kind, 1).line(Path("a\x1b[2J\x9b.png"), Prediction(["x\x1b"], [1.0]))
    out = capsys.readouterr().out
    assert "m[red]x" in out and "\x1b" not in out and "\x9b" not in out


PROGRAM = """
import sys
from clipcil.cli import main
main(sys.argv[1:])
"""


def test_any_name_can_be_printed(saved: Path, tmp_path: Path) -> None:
    """File names that are not UTF-8, and a terminal that knows Latin-1 alone."""
    names = [b"\xff.png", "Ā.png".encode()]
    for name in names:
        plain("red")[0].save(tmp_path / "a.png")
        (tmp_path / "a.png").rename(tmp_path / os.fsdecode(name))
    files = [os.fsencode(tmp_path) + b"/" + name for name in names]
    for encoding in ("utf-8:strict", "latin-1:strict"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "predict", str(saved), *files],
            env={**os.environ, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert b"\\udcff.png: " in done.stdout
        assert ("Ā" if encoding.startswith("utf") else "\\u0100").encode() + b".png: " in done.stdout


def test_a_long_prompt_is_blamed_on_its_length(mini: clipcil.CLIP) -> None:
    from clipcil.prompts.text import PromptTexts

    with pytest.raises(UserError, match="lower prompt_length"):
        PromptTexts(mini, [""], 100)


def test_another_number_of_threads_is_said(tmp_path: Path, mini: clipcil.CLIP) -> None:
    from clipcil.experiment.folder import write_start

    assert write_start(tmp_path, {"run": {}}, mini) == []
    assert write_start(tmp_path, {"run": {}}, mini) == []
    table = json.loads((tmp_path / "environment.json").read_text())
    assert table["backbone"] == "mini" and table["fingerprint"] == mini.fingerprint
    (tmp_path / "environment.json").write_text(json.dumps({**table, "threads": 77}))
    (line,) = write_start(tmp_path, {"run": {}}, mini)
    assert "begun with 77 threads" in line and "OMP_NUM_THREADS=77" in line


# -- stopping ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """Signals as a terminal has them: a background job is started with some of them ignored."""
    old = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_a_second_signal_is_passed_over() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGHUP"), stops_once(for_good=False):
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM])
def test_a_stopped_lesson_leaves_no_picture_behind(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    fill = PixelStore._fill

    def stop(self: PixelStore, *args: Any) -> Any:
        made = fill(self, *args)
        assert list((tmp_path / "t").rglob("*.f16"))
        signal.raise_signal(number)
        return made

    monkeypatch.setattr(PixelStore, "_fill", stop)
    with pytest.raises(SystemExit) as ended:
        main(["learn", str(tmp_path / "m"), str(week(tmp_path / "week")), "--quiet"])
    assert ended.value.code == 130
    assert not list((tmp_path / "t").iterdir()) and not (tmp_path / "m").exists()


def test_no_room_for_a_model_or_for_temporary_pictures_is_one_line(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(saved)
    source = str(week(tmp_path / "week"))
    with files_of_at_most(100):
        assert "set TMPDIR" in refused(capsys, "learn", str(saved), source, "--quiet")
    model = clipcil.load(saved)
    model.rename("red", "crimson")
    with files_of_at_most(100), pytest.raises(UserError, match=r"cannot write .*File too large"):
        model.save(saved)
    assert tree(saved) == before
