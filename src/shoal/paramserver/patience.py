"""How long one attempt at a request may take before it counts as lost and is sent again.

A death is seen much sooner, by the connection and by the view; a message that was lost is seen by this alone. So it may be
generous, and it must be: an attempt that is given up begins again at its first byte, and one that is always given up too early
never ends. It grows with what crosses.
"""

ATTEMPT_SECONDS = 2.0
"""Of a request without a payload."""
SLOWEST_BYTES_PER_SECOND = 2_000_000
"""What one of many who share a slow link gets of it (100 Mbit between six); who gets less cannot take part."""


def seconds_for(num_bytes: int, *, base: float = ATTEMPT_SECONDS) -> float:
    """The deadline of one attempt.

    Args:
        num_bytes: that cross the same link meanwhile, there, onwards or back.
        base: without any.
    """
    return base + num_bytes / SLOWEST_BYTES_PER_SECOND
