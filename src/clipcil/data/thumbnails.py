"""Small copies of pictures, for pages."""

from __future__ import annotations

import io

from PIL import Image


def thumbnail(image: Image.Image, side: int) -> bytes:
    """A small copy of an RGB picture as a JPEG file, its longest side at most `side` pixels."""
    small = image.copy()
    small.thumbnail((side, side))
    out = io.BytesIO()
    small.save(out, "JPEG", quality=85)
    return out.getvalue()
