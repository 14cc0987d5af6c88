"""Predicting many pictures on Ray: the same answers as in one process, finished parts are not done again."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import clipcil
from clipcil.classifier import bulk
from clipcil.cluster import connect
from support.errors import one_line
from support.lessons import pictures, write_tree

NAMES = ["airplane", "ant", "banana", "ladybug"]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    yield module
    module.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    classifier = clipcil.Classifier("simplecil")
    classifier.learn(pictures(NAMES[:3]), hold_out=False)
    classifier.save(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_tree(tmp_path_factory.mktemp("source"), pictures(NAMES))
    (root / NAMES[0] / "broken.png").write_bytes(b"no picture")
    return root


def rows(out: Path) -> dict[str, dict[str, Any]]:
    found = [row for file in sorted(out.glob("part-*.parquet")) for row in pq.read_table(file).to_pylist()]
    assert len({row["path"] for row in found}) == len(found)  # nothing twice
    return {row["path"]: row for row in found}


def test_the_same_answers_and_only_what_is_missing(
    ray: Any, model: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "PICTURES_PER_PART", 7)
    out, seen = tmp_path / "out", []
    counts = bulk.predict_on_ray(model, source, out, actors=2, on_progress=lambda stage, *at: seen.append(at))
    files = sorted(path for path in source.rglob("*.png"))
    assert counts == {"pictures": len(files), "errors": 1, "parts": -(-len(files) // 7)}
    assert seen[0] == (0, counts["parts"]) and seen[-1] == (counts["parts"], counts["parts"])
    found = rows(out)
    assert set(found) == {str(path.resolve()) for path in files}
    classifier = clipcil.load(model)
    for path, expected in classifier.predict_stream(files):
        row = found[str(path.resolve())]
        assert (row["class"], row["unknown"]) == (expected.name or "", expected.unknown)
        assert row["classes"] == expected.names and bool(row["error"]) == (expected.error is not None)
        assert row["probabilities"] == pytest.approx(expected.probabilities, abs=1e-5)

    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    (out / "part-000001.parquet").unlink()  # as if stopped before this part was done
    bulk.predict_on_ray(model, source, out, actors=1)
    again = {path.name: path.stat().st_mtime_ns for path in out.glob("part-*.parquet")}
    assert {name for name in kept if again[name] != kept[name]} == {"part-000001.parquet"}
    assert rows(out) == found
    with one_line("top"):
        bulk.predict_on_ray(model, source, out, top=2)


def test_pictures_inside_parquet_files(ray: Any, model: Path, source: Path, tmp_path: Path) -> None:
    files = sorted(source.rglob("*.png"))[:9]
    table = pa.table({"img": [{"bytes": path.read_bytes(), "path": path.name} for path in files], "label": [0] * 9})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "a.parquet", row_group_size=4)
    counts = bulk.predict_on_ray(model, tmp_path / "data", tmp_path / "out", actors=1)
    assert counts["pictures"] == 9 and counts["parts"] == 3


def test_a_row_without_a_picture_is_a_row_with_an_error(tmp_path: Path) -> None:
    part = bulk.Part(0, str(tmp_path / "a.parquet"), 0)
    strange = pa.Array.from_buffers(pa.string(), 2, pa.array([b"\xff", b"ab"]).buffers())  # a text that is none
    for column in ([b"one", None], [{"bytes": b"one", "path": None}, None], [{"bytes": b"one"}, {"bytes": None}]):
        for others in ({}, {"label": strange}):
            pq.write_table(pa.table({"picture": column, **others}), part.file)
            assert list(bulk.read_part(part)) == [(f"{part.file}#0.0", b"one"), (f"{part.file}#0.1", b"")]
    pq.write_table(pa.table({"number": [1, 2], "text": ["a", "b"]}), part.file)
    with one_line("column of pictures"):
        list(bulk.read_part(part))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nothing", "nothing"),
        (lambda root: (root / "empty").mkdir() or root / "empty", "empty"),
        (lambda root: (root / "x.parquet").write_bytes(b"no") and root / "x.parquet", "x.parquet"),
        (lambda root: (root / "a.jpg").write_bytes(b"\xff\xd8") and root / "a.jpg", "a.jpg"),
    ],
)
def test_a_source_without_pictures(make: Any, message: str, model: Path, tmp_path: Path) -> None:
    with one_line(message):
        bulk.predict_on_ray(model, make(tmp_path), tmp_path / "out")


def test_parquet_files_of_something_else_are_not_touched(model: Path, source: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.parquet").write_bytes(b"precious")
    with one_line(str(tmp_path)):
        bulk.predict_on_ray(model, source, tmp_path)
    assert (tmp_path / "mine.parquet").read_bytes() == b"precious"


def test_pictures_that_came_since_are_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given again after a month, with more pictures in the folder, the job must not say that it is done."""

    def answered(parts: Sequence[bulk.Part], settings: Any, *how: object) -> Iterator[None]:
        """What actors do, without Ray or a model."""
        for part in parts:
            found = [(name, clipcil.Prediction(["x"], [1.0])) for name, _ in bulk.read_part(part)]
            yield bulk.write_answers(Path(settings[1]) / part.name, iter(found))

    monkeypatch.setattr(bulk, "_run", answered)
    for name in ("model/model.toml", "week/a.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    job = tmp_path / "model", tmp_path / "week", tmp_path / "out"
    for _ in range(2):
        assert bulk.predict_on_ray(*job) == {"pictures": 1, "errors": 0, "parts": 1}
    (tmp_path / "week" / "b.png").write_bytes(b"")
    with one_line("pictures"):
        bulk.predict_on_ray(*job)


def test_without_ray_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with one_line("pip install"):
        connect()
