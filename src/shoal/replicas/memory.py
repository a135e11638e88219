"""What a policy keeps on a rank, in copies of the weights that the rank updates. No torch."""

from shoal.core.syncrule import SyncKind

COPIES: dict[SyncKind, int] = {
    "allreduce": 0,
    "local": 1,
    "diloco": 2,
    "slowmo": 2,
    "stream": 3,
    "sparse": 2,
    "easgd": 1,
    "gossip": 0,
    "pushsum": 0,
}
"""The agreed weights (easgd: the center), the momentum, what is in flight or not sent yet; of numbers there are a few besides."""


def policy_copies(kind: SyncKind, *, is_compressed: bool) -> int:
    """Copies that a policy keeps; gossip that is compressed remembers what was said, and heard."""
    return 2 if kind == "gossip" and is_compressed else COPIES[kind]
