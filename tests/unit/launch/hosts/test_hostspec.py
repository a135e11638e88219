"""The hosts that a user names."""

from pathlib import Path

import pytest

from shoal.core.errors import RequestError
from shoal.launch.hosts.hostspec import HostSlots, choose_host, parse_hosts, place_ranks, read_hostfile


def test_hosts_with_and_without_numbers() -> None:
    assert parse_hosts("a:2, me@10.0.0.7:1") == (HostSlots(name="a", slots=2), HostSlots(name="me@10.0.0.7", slots=1))
    assert place_ranks(parse_hosts("a,b"), 4) == parse_hosts("a:2,b:2")


def test_a_host_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the cluster\na slots=2\nb:2  # the new one\n\n")
    assert read_hostfile(path) == parse_hosts("a:2,b:2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:2,a:1", "names a 2 times"),
        ("me@a,a", "names a 2 times"),
        ("a:0", "'0' is no number of ranks on a"),
        ("a:x", "'x' is no number"),
        ("a,,b", "'' is no host"),
        ("a:2,b", "b has no number of ranks"),
        ("-oProxyCommand=x", "is no host"),
        ("a;rm -rf x", "is no host"),
    ],
)
def test_what_is_no_list_of_hosts_is_refused(text: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        parse_hosts(text)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "count", "words"),
    [("a:1,b:1", 4, "room for 2"), ("a,b", 3, "evenly over the 2 hosts"), ("a,b,c", 2, "leave 1 of them out")],
)
def test_more_or_fewer_ranks_than_there_is_room_for(text: str, count: int, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        place_ranks(parse_hosts(text), count)
    assert words in str(refused.value)


def test_a_lost_host_and_those_that_are_new_in_the_file_are_tried_in_turn() -> None:
    lost = HostSlots(name="b", slots=2)

    def tried(text: str, *present: str) -> list[str]:
        found = [choose_host(lost, parse_hosts(text), {"b", *present}, tried=number) for number in range(4)]
        assert all(host is None or host.slots == 2 for host in found)
        return [host.name if host is not None else "" for host in found]

    assert tried("a,b", "a") == ["b"] * 4, "nobody is new"
    assert tried("a:2,b:2,c:2,d:4", "a") == ["b", "c", "d", "b"]
    assert tried("a,c", "a") == ["c"] * 4, "the lost one was taken out of the file"
    assert tried("a:2,c:1", "a") == [""] * 4, "it has no room for the ranks"
    assert tried("a,c,d", "a", "c") == ["d"] * 4, "one that is on its way to another place"
    assert tried("a", "a") == [""] * 4
