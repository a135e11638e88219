"""Lines of a file, none of which may be longer than a bound: what CSV, JSON lines and text are read by."""

import zlib
from collections.abc import Iterator
from gzip import BadGzipFile

from shoal.core.errors import RequestError
from shoal.core.units import format_bytes
from shoal.data.formats.files import DataFile


def iter_lines(file: DataFile, longest: int) -> Iterator[str]:
    """The lines of a file with their ends, one after another.

    Raises:
        RequestError: a line is too long, is no UTF-8, or the file is no whole .gz file; names the file and the line.
    """
    number = 0
    with file.open_text() as opened:
        while True:
            number += 1
            try:
                line = opened.readline(longest + 1)
            except (BadGzipFile, EOFError, zlib.error) as error:
                raise RequestError(
                    f"{file.name}, line {number}: not a whole .gz file: {error}; fetch it again"
                ) from error
            if not line:
                return
            if len(line) > longest:
                raise RequestError(
                    f"{file.name}, line {number} has more than {format_bytes(longest)}; is it a file of lines, or data.format "
                    f"another?"
                )
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{file.name}, line {number}: byte {error.start} is no UTF-8; write the file as UTF-8, or is data.format "
                    f"another?"
                ) from error
