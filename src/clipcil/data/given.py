"""Pictures as callers of the library give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from clipcil.data.pictures import Picture
from clipcil.errors import UserError


def as_picture(thing: Any) -> Picture:
    """A path, bytes of a file, a PIL picture, or an array (height, width[, 1, 3 or 4]) of bytes or of floats in 0…1."""
    if isinstance(thing, str | Path):
        return Path(thing)
    if isinstance(thing, bytes | Image.Image):
        return thing
    if isinstance(thing, Tensor):
        thing = thing.detach().cpu().numpy()
    if isinstance(thing, np.ndarray):
        return _from_array(thing)
    raise UserError(f"a {type(thing).__name__} is not a picture; give a path, bytes, a PIL image or an array")


def _from_array(array: np.ndarray) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (3, 4)) or not array.size:
        raise UserError(f"an array of shape {tuple(array.shape)} is not a picture; give (height, width[, 3 or 4])")
    if array.dtype == np.uint8:
        return Image.fromarray(array)
    if not np.issubdtype(array.dtype, np.floating):
        raise UserError(f"an array of {array.dtype} is not a picture; give bytes (uint8), or floats between 0 and 1")
    if not bool(((array >= 0) & (array <= 1)).all()):
        raise UserError("an array of floats must lie between 0 and 1 to be a picture; divide by 255, or give uint8")
    return Image.fromarray((array * 255).round().astype(np.uint8))
