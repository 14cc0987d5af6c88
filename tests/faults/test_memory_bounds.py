"""What a stranger's file may take in memory: pictures, archives, parquet files, columns."""

from __future__ import annotations

import contextlib
import os
import resource
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_models import plain

from clipcil.cli import main
from clipcil.data import archives, parquet, pictures
from clipcil.data.parquet import identity_of_tables, read_parquet
from clipcil.data.parquet_pages import DICTIONARY, pages
from clipcil.data.pictures import decode
from clipcil.errors import UserError


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


def write_pages(path: Path, **options: Any) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pictures = [{"bytes": bytes([row % 7]) * (row + 1), "path": None if row % 3 else f"{row}"} for row in range(3000)]
    pq.write_table(pa.table({"image": pictures, "label": range(3000), "x": [[1.5, None]] * 3000}), path, **options)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_are_those_that_the_footer_counts(compression: str, version: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    options = {"compression": compression, "data_page_version": version, "row_group_size": 1100, "data_page_size": 9000}
    write_pages(path, **options, write_page_checksum=True)
    with path.open("rb") as file:
        metadata = pq.ParquetFile(file).metadata
        found = list(pages(file, metadata))
    groups = [metadata.row_group(place) for place in range(metadata.num_row_groups)]
    columns = [group.column(place) for group in groups for place in range(metadata.num_columns)]
    assert sum(page.header + page.unpacked for page in found) == sum(each.total_uncompressed_size for each in columns)
    assert sum(page.header + page.packed for page in found) == sum(each.total_compressed_size for each in columns)
    assert len(found) > 20 and sum(page.kind == DICTIONARY for page in found) >= 3


def test_a_page_cannot_claim_more_than_the_file_may_hold(tmp_path: Path) -> None:
    """The footer says 135 MB, the header of the page 2 GiB; and one large value that all rows refer to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path, size = tmp_path / "page.parquet", 135_000_000
    table = pa.table({"image": pa.array([bytes(size)]), "label": [0]})
    pq.write_table(table, path, compression="zstd", use_dictionary=False)
    assert len(read_parquet([path]).pictures.pictures[0]) == size  # type: ignore[arg-type]
    data = path.read_bytes()
    with path.open("rb") as file:
        page = next(pages(file, pq.ParquetFile(file).metadata))
    claimed = varint(2 * page.unpacked)  # zigzag
    assert len(claimed) == 5 and data.index(claimed) < page.header
    path.write_bytes(data.replace(claimed, varint(2 * (2**31 - 1)), 1))
    with memory_of_at_most(2**30), pytest.raises(UserError, match="unpacks to more than 256 MiB"):
        read_parquet([path])
    for spoilt in (b"\x19" * 5000, b"\xff" * 50):  # lists in lists, a number that does not end
        path.write_bytes(data[:4] + spoilt + data[4 + len(spoilt) :])
        with pytest.raises(UserError, match="is not a parquet file that can be read"):
            read_parquet([path])
    one = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array([bytes(100_000_000)]))
    pq.write_table(pa.table({"image": one, "label": [0] * 64}), path, compression="zstd", store_schema=False)
    with memory_of_at_most(2**30), pytest.raises(UserError, match="unpacks to more than 256 MiB"):
        read_parquet([path])


def varint(value: int) -> bytes:
    return bytes([value & 127 | 128]) + varint(value >> 7) if value > 127 else bytes([value])


def test_the_number_of_columns_follows_the_classes(
    saved: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain("red")[0].save(tmp_path / "a.png")
    main(["predict", str(saved), str(tmp_path / "a.png"), "--csv", "--top", "1000000"])
    assert capsys.readouterr().out.splitlines()[0].count(",") == 3 + 2 * 2
