"""What a cached block is a copy of."""

from dataclasses import dataclass
from functools import cached_property

import xxhash


@dataclass(frozen=True, kw_only=True)
class BlockKey:
    """A range of one version of a file. Blocks with equal keys have equal bytes, wherever they come from."""

    address: str
    """Of the storage."""
    path: str
    """Inside the storage."""
    start: int = 0
    end: int | None = None
    """None is the end of the file."""
    version: str = ""
    """What the storage says of the file's version; a file that is written anew has other keys."""
    digest: str | None = None
    """xxh3-128 of the bytes as 32 hexadecimal digits, where it is known; other bytes are refused."""

    @cached_property
    def hash(self) -> bytes:
        """16 bytes that stand for the key."""
        parts = (self.address, self.path, str(self.start), str(self.end), self.version, self.digest or "")
        return xxhash.xxh3_128_digest("\0".join(parts).encode())

    def __str__(self) -> str:
        """The file, with the range where it is one."""
        where = (
            "" if self.start == 0 and self.end is None else f" [{self.start}:{'' if self.end is None else self.end}]"
        )
        return f"{self.address.rstrip('/')}/{self.path}{where}"


def digest_of(content: bytes | memoryview) -> str:
    """The xxh3-128 of a block's bytes, as ``BlockKey.digest`` has it."""
    return xxhash.xxh3_128_hexdigest(content)
