"""Whose clock is wrong: events of several hosts are read side by side, and times of failures are compared. Pure."""

import statistics
from collections.abc import Mapping

CLOCK_SECONDS = 1.0
"""Clocks that are further apart make events of several hosts hard to read together."""


def wrong_clocks(offsets: Mapping[str, float]) -> list[str]:
    """The hosts whose clocks are wrong, with the fix.

    Args:
        offsets: by host, how far its clock is ahead of this machine's, which has a vote too: of two hosts alone nobody could say
            which one is wrong.
    """
    middle = statistics.median([0.0, *offsets.values()])
    return [
        f"the clock of host {host} is {abs(offset - middle):.1f} s {'ahead' if offset > middle else 'behind'}; let chrony or "
        "ntpd set it"
        for host, offset in offsets.items()
        if abs(offset - middle) > CLOCK_SECONDS
    ] + (
        [f"this machine's clock is {abs(middle):.1f} s off; let chrony or ntpd set it"]
        if abs(middle) > CLOCK_SECONDS
        else []
    )
