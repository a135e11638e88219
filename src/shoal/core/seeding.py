"""Seeds derived from names, so that randomness belongs to what is drawn and never to who draws it.

A key is a hash of its parts (the run's seed, a module's path, a step, a global sample). Two ranks that ask for the same
part get the same key under every plan; nothing depends on the order of draws, as it does with one generator that everyone
advances.
"""

import hashlib

KeyPart = str | int


def derive_key(*parts: KeyPart) -> int:
    """A 64-bit key for these parts; different parts, or the same ones in another order, give another key."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        encoded = f"{type(part).__name__}:{part}".encode("utf-8", "surrogateescape")
        # The length goes in first: without it ("ab", "c") and ("a", "bc") would share a key.
        digest.update(len(encoded).to_bytes(4, "little"))
        digest.update(encoded)
    return int.from_bytes(digest.digest(), "little")
