"""The step ``image``: files of images in a column of bytes become pixels, decoded by Pillow.

A file of a kilobyte can say that it has a billion pixels. Its header is read first, and what it says is held to a bound before
any pixel is decoded; only formats that are images and nothing else are tried.
"""

import io
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import RequestError
from shoal.data.table import BYTES, Column, Table
from shoal.data.transform.config import ImageConfig
from shoal.data.transform.matrix import numbers

MAX_PIXELS = 1 << 26
"""Of one image as its file has it."""
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def apply(table: Table, config: ImageConfig) -> Table:
    """The columns as (rows, channels, height, width) of float32 between 0 and 1.

    Raises:
        RequestError: Pillow is missing, a column holds no bytes, or a row no image; names the column and the row.
    """
    return table.replace({name: numbers(name, _decode_all(table[name], config)) for name in config.columns})


def _decode_all(column: Column, config: ImageConfig) -> NDArray[np.float32]:
    name = column.field.name
    if column.field.kind != BYTES:
        raise RequestError(
            f"data.prepare, step 'image': column {name!r} is {column.field.kind}, and the step needs the bytes of image files"
        )
    height, width = config.size
    found = np.empty((len(column), config.channels, height, width), np.float32)
    for row in range(len(column)):
        content = column.value(row)
        if content is None:
            raise RequestError(
                f"data.prepare, step 'image': column {name!r} has no image in row {row + 1}; filter such rows"
            )
        found[row] = _decode(content, config, f"data.prepare, step 'image': column {name!r}, row {row + 1}")
    return found


def _decode(content: bytes, config: ImageConfig, where: str) -> NDArray[Any]:
    """(channels, height, width) between 0 and 1."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise RequestError("the step image needs the package pillow: pip install 'shoal[data]'") from error
    height, width = config.size
    try:
        # Pillow warns of large images; here they are refused.
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            warnings.simplefilter("ignore")
            if image.width * image.height > MAX_PIXELS:
                raise RequestError(
                    f"{where}: it says that it has {image.width} x {image.height} pixels, and {MAX_PIXELS} are the most; "
                    "make it smaller, or filter such rows"
                )
            kind = "L" if config.channels == 1 else "RGB"
            pixels = np.asarray(
                image.convert(kind).resize((width, height), Image.Resampling.BILINEAR), dtype=np.float32
            )
    except Image.DecompressionBombError as error:
        raise RequestError(f"{where}: {error}; make it smaller, or filter such rows") from error
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, EOFError) as error:
        raise RequestError(
            f"{where}: it is no whole image of {', '.join(_FORMATS)} ({type(error).__name__}); mend it, or filter such rows"
        ) from error
    return pixels.reshape(height, width, config.channels).transpose(2, 0, 1) / np.float32(255)
