"""Which host a rank could not reach, by the address in gloo's words."""

from shoal.trainer.elastic.suspects import addresses_of, find_suspect

GLOO = "[/x/gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.77.0.2]:4711"


def test_the_address_in_the_error_is_a_hosts():
    slots = addresses_of(["10.77.0.1", "10.77.0.1", "10.77.0.2", "10.77.0.3"], [0, 1, 2, 3])
    assert slots == {"10.77.0.1": 0, "10.77.0.2": 2, "10.77.0.3": 3}
    assert find_suspect(RuntimeError(GLOO), slots) == 2
    assert find_suspect(RuntimeError(GLOO.replace("[10", "[::ffff:10")), slots) == 2
    assert find_suspect(RuntimeError("[10.77.0.9]:1 is nobody"), slots) is None
    assert find_suspect(RuntimeError("a rank has left"), slots) is None


def test_hosts_that_share_an_address_are_not_told_apart():
    assert addresses_of(["127.0.0.1", "127.0.0.1"], [0, 1]) == {} == addresses_of(["", ""], [0, 1])
