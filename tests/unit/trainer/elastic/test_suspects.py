"""Which host a rank could not reach, by the address in gloo's words."""

from types import SimpleNamespace

import pytest

from shoal.trainer.elastic import suspects
from shoal.trainer.elastic.suspects import Answering, addresses_of, find_suspect

GLOO = "[/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.77.0.2]:4711"


def test_the_address_in_the_error_is_a_hosts():
    slots = addresses_of(["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.3"], [0, 1, 2, 3])
    assert slots == {"10.77.0.1": 0, "10.77.0.2": 2, "10.77.0.3": 3}
    assert find_suspect(RuntimeError(GLOO), slots) == 2
    assert find_suspect(RuntimeError(GLOO.replace("[10", "[::ffff:10")), slots) == 2
    assert find_suspect(RuntimeError("a rank has left"), {}) is None


LATE = RuntimeError("Timed out waiting 5000ms for recv operation to complete")
SLOTS = {"10.77.0.1": 0, "10.77.0.2": 2, "10.77.0.3": 4}


@pytest.fixture
def network(monkeypatch):
    """Hosts whose addresses are in ``silent`` do not answer; the others refuse. ``asked`` is who was asked."""
    found = SimpleNamespace(silent=set(), asked=[])

    def connect(address, timeout):
        found.asked.append(address[0])
        raise TimeoutError if address[0] in found.silent else ConnectionRefusedError

    monkeypatch.setattr(suspects.socket, "create_connection", connect)
    return found


def answering_of(own="10.77.0.1"):
    found = Answering()
    found.learn(SLOTS, own=own)
    return found.addresses


def test_a_port_on_which_nobody_listens_is_refused_by_a_host_that_is_there():
    both = {"127.0.0.1": 0, "127.0.0.2": 1}
    answering = Answering()
    answering.learn(both, own="127.0.0.1")
    assert answering.addresses == {"127.0.0.2"}
    assert find_suspect(LATE, both, own="127.0.0.1", answering=answering.addresses) is None


def test_a_host_that_answered_and_does_not_answer_any_more_is_suspected(network):
    answering = answering_of()
    assert sorted(network.asked) == ["10.77.0.2", "10.77.0.3"]
    network.silent.add("10.77.0.3")
    assert find_suspect(LATE, SLOTS, own="10.77.0.1", answering=answering) == 4


def test_whoever_noticed_first_and_hung_up_is_not_blamed_for_the_host_that_cannot_be_reached(network):
    answering = answering_of()
    hung_up = RuntimeError(GLOO)  # by 10.77.0.2, which had waited for 10.77.0.3
    network.silent.add("10.77.0.3")
    assert find_suspect(hung_up, SLOTS, own="10.77.0.1", answering=answering) == 4
    network.silent.add("10.77.0.2")
    assert find_suspect(hung_up, SLOTS, own="10.77.0.1", answering=answering) == 2


def test_hosts_whose_firewall_never_answers_are_not_suspected_for_that(network):
    network.silent |= {"10.77.0.2", "10.77.0.3"}
    answering = answering_of()
    assert find_suspect(LATE, SLOTS, own="10.77.0.1", answering=answering) is None
    assert find_suspect(RuntimeError(GLOO), SLOTS, own="10.77.0.1", answering=answering) == 2


def test_a_host_is_asked_once_while_all_is_well(network):
    found = Answering()
    found.learn(["10.77.0.2"], own="")
    found.learn(["10.77.0.2", "10.77.0.3"], own="")
    assert network.asked == ["10.77.0.2", "10.77.0.3"]


def test_hosts_that_share_an_address_are_not_told_apart():
    assert addresses_of(["127.0.0.1", "127.0.0.1"], [0, 1]) == {} == addresses_of(["", ""], [0, 1])
