"""What code a host has: two hosts may have one version of Shoal and other files."""

import functools
import hashlib
from pathlib import Path


@functools.cache
def code_digest() -> str:
    """A digest of this package's source files."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
