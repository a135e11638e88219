"""Whether a refresh is good enough to be published: a pure rule over two losses."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What became of a refresh."""

    is_good: bool
    limit: float | None
    """What the loss may be at most; None where it only has to be finite."""
    reason: str = ""


def judge(loss: float, last: float | None, bound: float) -> Decision:
    """Hold a refresh to the version that was published before it.

    Args:
        loss: of the refresh, on the held-back window.
        last: of the last published version, on the same window; None where there is none.
        bound: how many times that the loss may be. A loss that is not above 0 may be worse by the same share of its size.
    """
    limit = None if last is None else last + abs(last) * (bound - 1)
    if not math.isfinite(loss):
        return Decision(is_good=False, limit=limit, reason=f"the loss on the held-back window is {loss}")
    if limit is not None and loss > limit:
        reason = f"the loss on the held-back window is {loss:.6g}, the last published version has {last:.6g}"
        return Decision(
            is_good=False, limit=limit, reason=f"{reason}, and {limit:.6g} is allowed (publish.bound {bound:g})"
        )
    return Decision(is_good=True, limit=limit)
