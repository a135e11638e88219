"""Which parts of a state are asked of whom, and how their bytes travel."""

import itertools
import random

import pytest

from shoal.checkpoint.boxes import Box, intersect
from shoal.checkpoint.holdings import Cut, Holding
from shoal.core.errors import RunError
from shoal.core.placement import place_whole
from shoal.trainer.elastic.handover import cut_messages, plan_pieces


def _rows(*bounds: int) -> list[dict[str, Holding]]:
    """Shards of rows of a matrix of four columns, cut here."""
    last = bounds[-1]
    cuts = itertools.pairwise(bounds)
    return [{"w": Holding(dtype="F32", shape=(last, 4), boxes=(Box((low, 0), (high - low, 4)),))} for low, high in cuts]


def _need(low: int, high: int, of: int) -> Cut:
    return Cut(name="w", shape=(of, 4), box=Box((low, 0), (high - low, 4)))


@pytest.mark.parametrize("seed", range(20))
def test_pieces_make_up_what_is_needed_once(seed: int) -> None:
    dice = random.Random(seed)
    rows = dice.randint(1, 30)
    shards = _rows(0, *sorted(dice.sample(range(1, rows), min(rows - 1, dice.randint(0, 5)))), rows)
    low = dice.randrange(rows)
    need = _need(low, dice.randint(low + 1, rows), rows)
    order = dice.sample(range(len(shards)), len(shards))
    found = plan_pieces(need, shards, order)
    for row in range(*[need.box.start[0], need.box.stop[0]]):
        one = Box((row, 0), (1, 4))
        assert [piece.shard for piece in found if intersect(piece.cut.box, one)] == [
            number for number, shard in enumerate(shards) if intersect(shard["w"].boxes[0], one)
        ]
    assert sum(piece.cut.box.num_elements for piece in found) == need.box.num_elements


def test_what_is_here_is_not_asked_for() -> None:
    whole = {"w": Holding(dtype="F32", shape=(6, 4), boxes=(Box((0, 0), (6, 4)),))}
    assert [piece.shard for piece in plan_pieces(_need(1, 5, 6), [whole, whole, whole], [2, 0, 1])] == [2]
    scalar = {"step": Holding(dtype="F32", shape=(), boxes=(Box((), ()),))}
    need = Cut(name="step", shape=place_whole(()).whole_shape, box=Box((), ()))
    assert [piece.shard for piece in plan_pieces(need, [scalar, scalar], [1, 0])] == [1]


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(RunError, match=r"nobody holds \[4:6, 0:4\] of 'w'"):
        plan_pieces(_need(2, 6, 6), _rows(0, 2, 4), [0, 1])


@pytest.mark.parametrize("sizes", [[1], [10], [11], [3, 3, 3, 3], [4, 25, 1, 9, 10, 2], [0, 5]])
def test_messages_have_all_bytes_in_order_and_none_is_longer_than_its_limit(sizes: list[int]) -> None:
    messages = list(cut_messages(0, 1, dict(enumerate(sizes)), limit=10))
    parts = [part for message in messages for part in message.parts]
    assert [(part.piece, byte) for part in parts for byte in range(part.start, part.stop)] == [
        (piece, byte) for piece, size in enumerate(sizes) for byte in range(size)
    ]
    assert all(0 < message.num_bytes - 8 <= 10 for message in messages)
    assert len(messages) < -(-sum(sizes) // 10) * 2, "small ones travel together"
