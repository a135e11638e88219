"""How processes lie on nodes, and the words for hosts; both numbers are in every refusal."""

import pytest

from shoal.core.errors import RequestError
from shoal.launch.clusters.job import Slots, arrange, check_slots, name_job, read_slots


@pytest.mark.parametrize(
    ("nodes", "per_node", "found"),
    [(None, None, (1, 8)), (2, None, (2, 4)), (None, 2, (4, 2)), (4, 2, (4, 2))],
)
def test_what_is_left_out_follows_from_the_plan(nodes, per_node, found):
    assert arrange(8, nodes=nodes, per_node=per_node) == found


@pytest.mark.parametrize(("nodes", "per_node"), [(3, None), (None, 3), (3, 2), (16, None)])
def test_nodes_that_do_not_come_to_the_plan_are_refused_with_both_numbers(nodes, per_node):
    with pytest.raises(RequestError, match=r"node\(s\) of .* are \d+, and the plan has 8; change --nodes"):
        arrange(8, nodes=nodes, per_node=per_node)


def test_hosts_are_read():
    assert read_slots("a:2, b:1", per_node=4) == [Slots(host="a", count=2), Slots(host="b", count=1)]
    assert read_slots("a,b", per_node=4) == [Slots(host="a", count=4), Slots(host="b", count=4)]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ("a:2,,b:2", "'' is not HOST or HOST:PROCESSES"),
        ("a:x", "'a:x' is not HOST"),
        ("a:0", "'a:0' is not HOST"),
        ("a:1,a:1", "names a twice"),
    ],
)
def test_hosts_that_are_none(hosts, message):
    with pytest.raises(RequestError, match=message):
        read_slots(hosts, per_node=None)


def test_hosts_that_do_not_take_the_run():
    with pytest.raises(RequestError, match=r"--hosts a:2,b:1 are 3 process\(es\), and the plan has 4"):
        check_slots(read_slots("a:2,b:1", per_node=None), 4)


@pytest.mark.parametrize(
    ("text", "name"),
    [("tiny", "tiny"), ("My_Recipe.v2", "my-recipe-v2"), ("7b", "run-7b"), ("-", "run"), ("a" * 80, "a" * 52)],
)
def test_a_name_that_every_cluster_takes(text, name):
    assert name_job(text) == name
