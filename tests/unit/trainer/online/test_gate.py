import math

import pytest

from shoal.trainer.online.gate import judge


@pytest.mark.parametrize(
    ("loss", "last", "bound", "is_good"),
    [
        (5.0, None, 1.1, True),
        (1.1, 1.0, 1.1, True),
        (1.11, 1.0, 1.1, False),
        (1.0, 1.0, 1.0, True),
        (1.0001, 1.0, 1.0, False),
        # A loss below 0 may be worse by the same share of its size.
        (-0.95, -1.0, 1.1, True),
        (-0.85, -1.0, 1.1, False),
        (math.nan, None, 1.1, False),
        (math.inf, 1.0, 1e9, False),
        (math.nan, 1.0, 1.1, False),
    ],
)
def test_a_refresh_is_held_to_the_last_published_loss(loss, last, bound, is_good):
    decision = judge(loss, last, bound)
    assert decision.is_good is is_good
    assert is_good or decision.reason
    if last is not None and math.isfinite(loss) and not is_good:
        assert f"{loss:.6g}" in decision.reason and f"{last:.6g}" in decision.reason
