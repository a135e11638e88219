"""Which logical replicas a present one computes, and the view as text."""

import pytest

from shoal.elastic.groupview import GroupView, Replica, copy_holder, deal, read_view


@pytest.mark.parametrize("num_logical", range(1, 13))
def test_rounds_are_the_logical_replicas_from_left_to_right(num_logical: int) -> None:
    for num_present in range(1, num_logical + 1):
        shares = deal(num_logical, num_present)
        rounds = [[share[number] for share in shares if number < len(share)] for number in range(max(map(len, shares)))]
        assert [one for each in rounds for one in each] == list(range(num_logical))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_three_replicas_do_the_work_of_four() -> None:
    assert deal(4, 3) == ((0, 3), (1,), (2,))
    view = GroupView(epoch=7, replicas=tuple(Replica(name=name, members=(name,)) for name in "abc"), num_logical=4)
    assert [view.logical_of(place) for place in range(3)] == [(0, 3), (1,), (2,)] and view.num_rounds == 2


def test_a_view_comes_back_from_its_text() -> None:
    replicas = (Replica(name="r0", members=("a", "b"), host="h0"), Replica(name="r1", members=("c", "d"), host="h1"))
    view = GroupView(epoch=3, replicas=replicas, num_logical=4)
    assert read_view(view.to_json()) == view and view.members == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"epoch":1,"num_logical":1,"replicas":[]}',
        '{"epoch":1,"num_logical":1,"replicas":[{"name":"a","members":["x"],"host":""},{"name":"b","members":["y"],"host":""}]}',
        '{"epoch":1,"num_logical":2,"replicas":[{"name":"a","members":["x"],"host":""},{"name":"b","members":["x"],"host":""}]}',
        '{"epoch":1,"num_logical":2,"replicas":[{"name":"a","members":[3],"host":""}]}',
        '{"epoch":null,"num_logical":2,"replicas":[{"name":"a","members":["x"],"host":""}]}',
    ],
)
def test_what_is_no_view_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_view(text)


@pytest.mark.parametrize(
    ("hosts", "holders"),
    [("a", [None]), ("aa", [1, 0]), ("aabb", [2, 2, 0, 0]), ("aab", [2, 2, 0]), ("abab", [1, 2, 3, 0])],
)
def test_copies_are_on_another_host_where_there_is_one(hosts: str, holders: list[int | None]) -> None:
    replicas = tuple(Replica(name=str(place), members=(str(place),), host=host) for place, host in enumerate(hosts))
    view = GroupView(epoch=1, replicas=replicas, num_logical=4)
    assert [copy_holder(view, place) for place in range(len(hosts))] == holders
