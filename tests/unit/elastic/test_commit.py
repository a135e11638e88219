"""The step that survivors go on from, and who gives what."""

import itertools
import random

import pytest

from shoal.elastic.commit import Holding, Shard, choose_step, may_write


def shard(step: int, index: int = 0, num_shards: int = 1) -> Shard:
    return Shard(step=step, index=index, num_shards=num_shards)


def holding(member: str, own: tuple[Shard, ...] = (), copies: tuple[Shard, ...] = (), history: int = 0) -> Holding:
    return Holding(member=member, own=own, copies=copies, history=history)


def test_who_is_behind_takes_it_from_who_is_ahead() -> None:
    found = choose_step([holding("a", (shard(7),)), holding("b", (shard(8),)), holding("new")])
    assert found is not None and found.step == 8 and found.holders == (("b",),)


def test_newcomers_are_shared_out_over_those_who_have_it() -> None:
    found = choose_step([holding(name, (shard(8),)) for name in "abc"] + [holding("x"), holding("y"), holding("z")])
    assert found is not None and sorted(found.source(0, reader) for reader in (3, 4, 5)) == ["a", "b", "c"]


def test_a_step_that_some_shard_of_is_gone_is_done_again() -> None:
    """a applied step 8 to its shard, b died before it did; what b had after step 7 is at a, and a has its own of then as well."""
    a = holding("a", (shard(8, 0, 2),), (shard(7, 0, 2), shard(7, 1, 2)))
    found = choose_step([a, holding("new")])
    assert found is not None and (found.step, found.num_shards, found.holders) == (7, 2, (("a",), ("a",)))


def test_the_owner_gives_before_a_copy_does() -> None:
    a = holding("a", (shard(7, 0, 2),), (shard(7, 1, 2),))
    b = holding("b", (shard(7, 1, 2),), (shard(7, 0, 2),))
    found = choose_step([a, b])
    assert found is not None and found.holders == (("a",), ("b",))
    found = choose_step([a])
    assert found is not None and found.holders == (("a",), ("a",))


def test_shards_of_two_cuts_are_not_mixed() -> None:
    reports = [holding("a", (shard(7, 0, 2),)), holding("b", (shard(7, 1, 3),)), holding("c", (shard(7, 2, 3),))]
    assert choose_step(reports) is None


def test_without_copies_a_death_leaves_the_checkpoint() -> None:
    assert choose_step([holding("a", (shard(7, 0, 2),))]) is None
    assert choose_step([holding("new")]) is None and choose_step([]) is None


def test_memory_that_is_older_than_the_checkpoint_is_not_used() -> None:
    reports = [holding("a", (shard(7),))]
    assert choose_step(reports, checkpoint=8) is None
    found = choose_step(reports, checkpoint=7)
    assert found is not None and found.step == 7


def test_what_was_held_before_everything_went_back_does_not_count() -> None:
    found = choose_step([holding("late", (shard(57),)), holding("a", (shard(50),), history=1)])
    assert found is not None and (found.step, found.holders, found.history) == (50, (("a",),), 1)


def test_everybody_comes_to_the_same_answer() -> None:
    draw = random.Random(5)
    for _ in range(300):
        num = draw.choice((1, 2, 3))
        reports = [
            holding(
                name,
                tuple(shard(draw.choice((6, 7)), draw.randrange(num), num) for _ in range(draw.choice((0, 1)))),
                tuple(shard(draw.choice((5, 6, 7)), draw.randrange(num), num) for _ in range(draw.choice((0, 2)))),
            )
            for name in "abcd"
        ]
        found = choose_step(reports)
        shuffled = draw.sample(reports, len(reports))
        assert choose_step(shuffled) == found
        whole = [
            step
            for step in (5, 6, 7)
            if {one.index for report in reports for one in (*report.own, *report.copies) if one.step == step}
            == set(range(num))
        ]
        assert (None if found is None else found.step) == (max(whole) if whole else None)


# ---- snapshots


class Ranks:
    """Ranks that snapshot into two buffers at home and two at the next rank, one write at a time, in any order."""

    def __init__(self, num: int, *, rule: bool = True) -> None:
        self.num, self.rule = num, rule
        self.at = [0] * num
        self.writes = [0] * num
        """Of the present version: 0, at home, or at home and at the peer."""
        self.home: list[list[int | None]] = [[None, 0] for _ in range(num)]
        self.peer: list[list[int | None]] = [[None, 0] for _ in range(num)]
        """What rank r wrote into the memory of rank r + 1."""

    def finished(self) -> int:
        """What the reduction of a step tells everybody: the newest version of which all writes are done."""
        return min(at if writes == 2 or at == 0 else at - 1 for at, writes in zip(self.at, self.writes, strict=True))

    def moves(self) -> list[int]:
        found = []
        for rank in range(self.num):
            version = self.at[rank]
            if (
                (self.writes[rank] < 2 and version > 0)
                or not self.rule
                or may_write(version + 1, finished=self.finished())
            ):
                found.append(rank)
        return found

    def move(self, rank: int) -> None:
        version = self.at[rank]
        if version > 0 and self.writes[rank] < 2:
            buffers = self.home if self.writes[rank] == 0 else self.peer
            buffers[rank][(version + 1) % 2] = version
            self.writes[rank] += 1
        else:
            self.at[rank] += 1
            self.writes[rank] = 0

    def reports(self, dead: int) -> list[Holding]:
        """What is left; a write that was under way is torn, and nobody counts on it."""
        found = []
        for rank in range(self.num):
            if rank == dead:
                continue
            before = (rank - 1) % self.num
            versions = [(rank, one) for one in self.home[rank]] + [(before, one) for one in self.peer[before]]
            torn = (self.at[rank] + 1) % 2 if self.writes[rank] < 2 and self.at[rank] > 0 else None
            copies = tuple(
                shard(one, of, self.num)
                for place, (of, one) in enumerate(versions)
                if one is not None and not (place < 2 and place == torn and self.writes[rank] == 0)
            )
            found.append(holding(f"r{rank}", (shard(self.at[rank], rank, self.num),), copies))
        return found


def _histories(num: int, *, rule: bool, seeds: int) -> int:
    """How many deaths left nothing whole, over random orders of writes."""
    lost = 0
    for seed in range(seeds):
        draw, ranks = random.Random(seed), Ranks(num, rule=rule)
        for _ in range(draw.randrange(5, 60)):
            ranks.move(draw.choice(ranks.moves()))
        for dead in range(num):
            found = choose_step(ranks.reports(dead))
            if found is None:
                lost += 1
            else:
                assert found.step >= max(ranks.at) - 1 or not rule
    return lost


@pytest.mark.parametrize("num", [2, 3, 4])
def test_one_death_at_any_moment_loses_at_most_the_step_under_way(num: int) -> None:
    assert _histories(num, rule=True, seeds=300) == 0


def test_without_the_rule_of_the_two_buffers_some_death_loses_everything() -> None:
    assert _histories(3, rule=False, seeds=300) > 0


def test_two_versions_behind_is_overwritten_only_when_all_have_the_one_between() -> None:
    allowed = [(v, f) for v, f in itertools.product(range(1, 5), range(5)) if may_write(v, finished=f)]
    assert allowed == [(v, f) for v in range(1, 5) for f in range(v - 1, 5)]
