"""Mutations of who gets in: the rows of *Trust*."""

from promises import Mutation

ELSEWHERE = "nothing of a run on one machine can be reached from another one"
OTHER_USERS = "nothing of it can be reached by another user of the machine"
KEYS = "a role with an address needs keys, on loopback too"
HOSTS = "with `--hosts` the command and its agents listen on nothing"
STRANGERS = "idle or flooding connections of strangers"

TRUST = [
    Mutation(
        promise=HOSTS,
        what="a host has no lease",
        file="src/shoal/launch/hosts/coordinator.py",
        old="and not connection.lost and silent > self.lease_seconds:",
        new="and not connection.lost and silent > 1e9:",
        test="tests/multiproc/test_hosts.py::test_a_silent_host_is_named_within_its_lease",
        seconds=20,
    ),
    Mutation(
        promise=ELSEWHERE,
        what="ranks meet in torch's store, which listens on every address",
        file="src/shoal/comm/world.py",
        old="        store = FileStore(place.store, place.world_size)",
        new='        store = dist.TCPStore("127.0.0.1", 29517, place.world_size, place.rank == 0)',
        test="tests/chaos/test_port_scan.py::test_nothing_is_open_by_default[False-dp=2]",
        seconds=10,
    ),
    Mutation(
        promise=OTHER_USERS,
        what="gloo's ports stay open",
        file="src/shoal/comm/packetfilter.py",
        old="            drop_everybody(descriptor)",
        new="            pass",
        test="tests/multiproc/test_other_users.py::test_no_other_user_reaches_anything_of_a_run[dp=2]",
        seconds=10,
    ),
    Mutation(
        promise=KEYS,
        what="every key is let in",
        file="src/shoal/comm/wire/keys.py",
        old="            return self._keys.is_allowed(public)",
        new="            return True",
        test="tests/unit/comm/wire/test_keys.py::test_the_list_is_the_membership_and_is_read_anew",
        seconds=5,
    ),
    Mutation(
        promise=KEYS,
        what="loopback needs no key",
        file="src/shoal/serverrun/cluster.py",
        old='    if parsed.kind == "tcp" and keys is None:',
        new="    if False:",
        test="tests/unit/serverrun/test_cluster.py::test_only_what_other_users_cannot_open_needs_no_key",
        seconds=5,
    ),
    Mutation(
        promise=STRANGERS,
        what="nobody who has not spoken is too many",
        file="src/shoal/comm/wire/connections.py",
        old="        if len(own) > limits.waiting_per_address:",
        new="        if False:",
        test="tests/unit/comm/wire/test_connections.py::test_the_oldest_of_an_address_that_has_too_many_goes",
        seconds=5,
    ),
    Mutation(
        promise=STRANGERS,
        what="those who are too many are counted and not shut down",
        file="src/shoal/comm/wire/connections.py",
        old="            _shut_down(one, whose)",
        new="            pass",
        test="tests/chaos/test_idle_strangers.py::test_strangers_without_a_key_keep_nobody_out",
        seconds=15,
    ),
]
