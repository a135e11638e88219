"""Which connections of a listener are one too many."""

from shoal.comm.wire.connections import BANNED_SECONDS, ConnectionTable, Limits, choose_limits

LIMITS = Limits(waiting=6, waiting_per_address=4, total=10)


def make_table() -> ConnectionTable:
    return ConnectionTable(LIMITS, trusted_after=20.0)


def come(table: ConnectionTable, descriptors, address: str = "10.0.0.1", now: float = 0.0) -> list[int]:
    """Who had to go."""
    return [gone for one in descriptors for gone, _ in table.add(one, (address, 1000 + one), now)]


def test_the_oldest_of_an_address_that_has_too_many_goes():
    table = make_table()
    assert come(table, range(5)) == [0]
    assert come(table, [5]) == [1]
    assert table.num_waiting == 4


def test_who_has_spoken_is_not_counted_and_never_goes():
    table = make_table()
    come(table, range(4))
    for one in range(4):
        table.authenticate(one)
    assert come(table, range(4, 9)) == [4]


def test_an_address_with_few_does_not_go_for_one_with_many():
    table = make_table()
    come(table, range(4), "10.0.0.1")
    come(table, range(4, 6), "10.0.0.2")
    assert come(table, [6], "10.0.0.3") == [0]


def test_all_together_leave_a_reserve():
    table = make_table()
    for one in range(10):
        assert come(table, [one]) == []
        table.authenticate(one)
    assert come(table, [10]) == [10]
    table.remove(3)
    table.remove(10)
    assert come(table, [11]) == []


def test_one_that_is_gone_again_waits_for_nothing():
    table = make_table()
    for _ in range(20):
        assert table.add(7, None, 0.0) == []
        table.remove(7)
    assert (table.num_waiting, table.banned(0.0)) == (0, ())


def test_a_descriptor_that_is_used_again_is_somebody_else():
    table = make_table()
    come(table, range(3))
    table.remove(0)
    assert come(table, [0, 3]) == []
    assert come(table, [4]) == [1]


def test_one_that_is_silent_for_longer_than_a_stranger_can_be_has_a_key():
    table = make_table()
    come(table, range(4))
    assert come(table, range(4, 8), now=21.0) == []
    assert table.num_waiting == 4


def test_an_address_that_floods_is_not_listened_to_for_a_moment():
    table = make_table()
    assert table.banned(0.0) == ()
    gone = come(table, range(10), "10.0.0.1", now=1.0)
    assert table.banned(1.0) == ("10.0.0.1",)
    assert gone == list(range(9)), "at last all that are there at once"
    assert table.banned(1.0 + BANNED_SECONDS) == ()


def test_when_no_descriptor_is_left_everybody_who_waits_goes():
    table = make_table()
    come(table, range(4))
    table.authenticate(2)
    assert [gone for gone, _ in table.close_all(0.0)] == [0, 1, 3]
    assert table.num_waiting == 0
    assert table.banned(0.1) == ("10.0.0.1",)


def test_limits_leave_room_for_files_however_few_descriptors_there_are():
    for num in (64, 128, 256, 1024, 20_000, 1_048_576):
        limits = choose_limits(num, 40)
        assert 2 <= limits.waiting_per_address <= limits.waiting <= 256
        assert limits.waiting <= limits.total <= num // 2
