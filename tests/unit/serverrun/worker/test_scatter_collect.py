"""What ranks of a group tell each other of what they hold, and a group that would leave a part of a gradient behind."""

import pytest
import torch

from shoal.core.errors import RunError
from shoal.core.placement import Patch, Placement, place_whole
from shoal.serverrun.worker.group import Holding, _check

FUSED = (6, 4)


def part(rank):
    """One of two ranks' rows of a fused matrix that is cut three times over, and of a padded one."""
    patches = tuple(
        Patch(local_start=(row, 0), whole_start=(2 * row + rank, 0), shape=(1, FUSED[1])) for row in range(3)
    )
    return Placement(whole_shape=FUSED, local_shape=(3, FUSED[1]), patches=patches)


def holding(rank, *, spoken=("fused",)):
    return Holding(
        placements={"bias": place_whole((5,)), "fused": part(rank), "scale": place_whole(())}, spoken=frozenset(spoken)
    )


MODEL = {"bias": (5,), "fused": FUSED, "scale": ()}
FIRST = holding(0, spoken=("bias", "fused", "scale"))


def test_what_a_rank_holds_goes_over_as_bytes_and_comes_back():
    encoded = FIRST.encode()
    assert encoded.dtype == torch.uint8
    assert Holding.decode(encoded) == FIRST


def test_a_gradient_is_brought_once_and_whole():
    _check([FIRST, holding(1)], MODEL)
    with pytest.raises(RunError, match=r"bring 12 of the 24 elements of 'fused'"):
        _check([FIRST, holding(1, spoken=())], MODEL)
    with pytest.raises(RunError, match=r"bring 10 of the 5 elements of 'bias'"):
        _check([FIRST, holding(1, spoken=("fused", "bias"))], MODEL)
