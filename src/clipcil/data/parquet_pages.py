"""The sizes that the pages of a parquet file claim, read before Arrow makes room for them.

The footer of a parquet file says how large its columns are, but Arrow believes the header in front of every page, which
can claim 2 GiB whatever the footer says. The headers are Thrift structures (compact protocol); the only fields looked
at here are the kind of the page (1) and its sizes without and with compression (2, 3).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

MAX_HEADER = 2**24
"""Bytes of a page header, the limit that Arrow has too."""
DICTIONARY = 2
"""The kind of a page that holds the values to which the others refer."""
_FIXED = {1: 0, 2: 0, 3: 1, 7: 8}
"""Bytes of a field by its Thrift type: true, false, byte, double."""


@dataclass(frozen=True)
class Page:
    """What the header of a page says."""

    kind: int
    unpacked: int
    """Bytes without compression: the buffer that Arrow will ask for."""
    packed: int
    """Bytes in the file, without the header."""
    header: int
    """Bytes of the header."""


class PageError(Exception):
    """The header of a page cannot be understood."""


class _CutError(Exception):
    """The bytes end before the header does."""


def pages(file: BinaryIO, metadata: Any) -> Iterator[Page]:
    """The pages of every column of an open parquet file.

    Args:
        file: The file.
        metadata: `pyarrow.parquet.FileMetaData` of it.

    Raises:
        PageError: A header cannot be understood, or claims a negative size.
    """
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            places = (column.data_page_offset, column.dictionary_page_offset or 0)
            offset = min((place for place in places if place > 0), default=0)  # a column without rows has no data page
            end = offset + column.total_compressed_size
            while offset < end:
                fields, length = _header(file, offset)
                page = Page(fields.get(1, 0), fields.get(2, -1), fields.get(3, -1), length)
                if page.unpacked < 0 or page.packed < 0:
                    raise PageError("a page header without sizes")
                yield page
                offset += page.header + page.packed


def _header(file: BinaryIO, offset: int) -> tuple[dict[int, int], int]:
    """Whole-number fields of the header at `offset`, and its length in bytes."""
    size = 2**12
    while size <= MAX_HEADER:
        data = os.pread(file.fileno(), size, offset)
        try:
            return _Compact(data).struct_at_start()
        except _CutError:
            if len(data) < size:
                break
            size *= 16
    raise PageError("a page header that does not end")


class _Compact:
    """Thrift's compact protocol, as far as a page header needs it."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def struct_at_start(self) -> tuple[dict[int, int], int]:
        return self.struct(), self.at

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Reads a structure; its 32-bit numbers by field, the last where a field comes twice, as Arrow does."""
        found: dict[int, int] = {}
        field = 0
        while head := self.byte():
            field = field + (head >> 4) if head >> 4 else self.signed()
            if head & 15 == 5:
                found[field] = self.signed()
            else:
                self.skip(head & 15, depth)
        return found

    def skip(self, kind: int, depth: int) -> None:
        if depth > 16:
            raise PageError("a page header nested too deep")
        if kind in _FIXED:
            self.take(_FIXED[kind])
        elif kind in (4, 5, 6):
            self.varint()
        elif kind == 8:
            self.take(self.varint())
        elif kind in (9, 10):
            head = self.byte()
            count = self.varint() if head >> 4 == 15 else head >> 4
            for _ in range(count):
                # A truth value is a byte of its own in a list. Every item takes a byte, so a false count ends soon.
                self.skip(3 if head & 15 in (1, 2) else head & 15, depth + 1)
        elif kind == 12:
            self.struct(depth + 1)
        else:
            raise PageError(f"a page header with a field of type {kind}")

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise _CutError
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise PageError("a page header with a number of more than ten bytes")

    def signed(self) -> int:
        value = self.varint()
        return (value >> 1) ^ -(value & 1)
