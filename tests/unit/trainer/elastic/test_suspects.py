"""Which host a rank could not reach, by the address in gloo's words."""

from shoal.trainer.elastic import suspects
from shoal.trainer.elastic.suspects import addresses_of, find_suspect

GLOO = "[/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.77.0.2]:4711"


def test_the_address_in_the_error_is_a_hosts():
    slots = addresses_of(["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.3"], [0, 1, 2, 3])
    assert slots == {"10.77.0.1": 0, "10.77.0.2": 2, "10.77.0.3": 3}
    assert find_suspect(RuntimeError(GLOO), slots) == 2
    assert find_suspect(RuntimeError(GLOO.replace("[10", "[::ffff:10")), slots) == 2
    assert find_suspect(RuntimeError("a rank has left"), {}) is None


def test_a_host_that_refuses_a_connection_is_there_and_one_that_does_not_answer_is_not(monkeypatch):
    late = RuntimeError("Timed out waiting 5000ms for recv operation to complete")
    assert find_suspect(late, {"127.0.0.1": 0, "127.0.0.2": 1}, own="127.0.0.1") is None
    asked = []

    def connect(address, timeout):
        asked.append(address[0])
        raise TimeoutError if address[0] == "10.77.0.3" else ConnectionRefusedError

    monkeypatch.setattr(suspects.socket, "create_connection", connect)
    assert find_suspect(late, {"10.77.0.1": 0, "10.77.0.2": 2, "10.77.0.3": 4}, own="10.77.0.1") == 4
    assert sorted(asked) == ["10.77.0.2", "10.77.0.3"]


def test_hosts_that_share_an_address_are_not_told_apart():
    assert addresses_of(["127.0.0.1", "127.0.0.1"], [0, 1]) == {} == addresses_of(["", ""], [0, 1])
