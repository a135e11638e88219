"""Logical replicas: those that a plan has, dealt out to those that are present. Pure numbers, no torch.

A run whose plan says ``dp=R`` may have n < R replicas present, because some died. A step then has ceil(R / n) rounds; in round k
the replica at place p computes the share of logical replica k * n + p, so that rounds, and places inside a round, go through the
logical replicas in their order: a sum over rounds and places is the sum over logical replicas from the left.

    R = 4, n = 3      place 0   place 1   place 2
    round 0           0         1         2
    round 1           3         -         -
"""


def num_rounds(num_logical: int, num_present: int) -> int:
    """Rounds of a step."""
    return -(-num_logical // num_present)


def rounds_of(place: int, *, num_logical: int, num_present: int) -> tuple[int | None, ...]:
    """The logical replica that the replica at a place computes in each round of a step; None where there is none left."""
    assert 0 <= place < num_present <= num_logical, "there is a logical replica for everyone who is present"
    found = (turn * num_present + place for turn in range(num_rounds(num_logical, num_present)))
    return tuple(number if number < num_logical else None for number in found)
