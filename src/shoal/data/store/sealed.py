"""JSON that proves its own bytes: its first field is the digest of the text with that field's digits set to zero.

Whatever bit of such a file is flipped, and wherever it is cut, that is seen before anything of it is parsed.
"""

import json
from typing import Any

import xxhash

from shoal.data.store.errors import BrokenFile

MAX_BYTES = 64 * 2**20
_PREFIX = b'{"digest": "'
_BLANK = b"0" * 32


def seal(values: dict[str, Any]) -> bytes:
    """The text of these values; the same values give the same bytes."""
    text = json.dumps({"digest": _BLANK.decode(), **values}, indent=1, allow_nan=False).replace("\n ", "", 1)
    blank = text.encode() + b"\n"
    assert blank.startswith(_PREFIX + _BLANK)
    return _PREFIX + xxhash.xxh3_128(blank).hexdigest().encode() + blank[len(_PREFIX) + len(_BLANK) :]


def unseal(data: bytes, *, file: str) -> tuple[dict[str, Any], str]:
    """The values, and their digest.

    Raises:
        BrokenFile: a byte is not as it was written, or it is no such file at all.
    """
    if len(data) > MAX_BYTES:
        raise BrokenFile(file, f"it has {len(data)} bytes, and at most {MAX_BYTES} are read")
    end = len(_PREFIX) + len(_BLANK)
    found = data[len(_PREFIX) : end]
    if not data.startswith(_PREFIX):
        raise BrokenFile(file, "it does not begin with a digest; it is torn or no file of a store")
    blank = _PREFIX + _BLANK + data[end:]
    if xxhash.xxh3_128(blank).hexdigest().encode() != found:
        raise BrokenFile(file, "its bytes are not those that were written; it is torn or altered")
    try:
        values = json.loads(blank)
    except (ValueError, RecursionError) as error:
        raise BrokenFile(file, f"it is not JSON: {error}") from error
    values.pop("digest")
    return values, found.decode()
