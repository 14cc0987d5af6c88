"""Picture files that are valid, but made to take hours or all memory: refused by their structure, before decoding."""

import io
import re
import struct

from clipcil.errors import UserError
from clipcil.limits import MOST_NUMBERS, MOST_PLAIN, MOST_READS, MOST_SCANS, MOST_SEGMENTS

_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
"""A JPEG marker, except the restart markers inside a scan."""
_ALONE, _END, _SCAN = (b"\xff\x01", b"\xff\xd8"), b"\xff\xd9", b"\xff\xda"
_BYTES_OR_TEXT = (1, 2, 7)
"""Types of TIFF tags that do not become a Python object for each number."""


class BombError(UserError):
    """Why a picture would take too long to decode."""


class MeteredFile(io.BytesIO):
    """The bytes of a picture file for a decoder, which may not read as often as a loop over millions of parts does."""

    _left = MOST_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """The next bytes; a `BombError` after `MOST_READS` calls."""
        self._left -= 1
        if self._left < 0:
            raise BombError(f"it has more than {MOST_READS:,} parts")
        return super().read(size)


def refuse_bombs(data: bytes) -> None:
    """Raise a `BombError` where the contents of a picture file would take far more time or memory than its pixels."""
    if data[:2] == b"\xff\xd8":
        _check_jpeg(data)
    elif data[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        _check_tiff(data)
    elif data[:2] in (b"P1", b"P2", b"P3") and (len(data) > MOST_PLAIN or data.count(b"#") > MOST_SEGMENTS):
        raise BombError("its numbers are digits, which is slow to read; save it in another format")


def _check_jpeg(data: bytes) -> None:
    """Count scans and segments up to the end of the picture; what follows it (a film, a second picture) is not read."""
    at = scans = 0
    for _ in range(MOST_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or found[0] == _END:
            return
        scans += found[0] == _SCAN
        if scans > MOST_SCANS:
            raise BombError(f"it has more than {MOST_SCANS} scans")
        at = found.end()
        if found[0] not in _ALONE:
            at += int.from_bytes(data[at : at + 2])
    raise BombError(f"it has more than {MOST_SEGMENTS} segments")


def _check_tiff(data: bytes) -> None:
    """Bound the numbers in each tag of the first picture."""
    order, is_big = "<" if data[:1] == b"I" else ">", b"+" in data[:4]
    place, count, tag = (f"{order}{code}" for code in (("Q", "Q", "HHQQ") if is_big else ("I", "H", "HHII")))
    try:
        [start] = struct.unpack_from(place, data, 8 if is_big else 4)
        [tags] = struct.unpack_from(count, data, start)
        start += struct.calcsize(count)
        for each in range(min(tags, MOST_NUMBERS)):
            _, kind, numbers, _ = struct.unpack_from(tag, data, start + each * struct.calcsize(tag))
            if numbers > MOST_NUMBERS and kind not in _BYTES_OR_TEXT:
                raise BombError(f"a tag has {numbers:,} numbers")
    except struct.error:
        return  # Pillow reports it
