"""A host stops before the coordinator gives its place away."""

import random

from shoal.elastic.lease import Lease


def test_a_lease_counts_from_the_sending_of_what_was_answered() -> None:
    lease = Lease(seconds=5.0)
    assert not lease.is_valid(0.0, epoch=1), "nobody has answered yet"
    lease = lease.answered(sent=10.0, epoch=1)
    assert lease.is_valid(14.4, epoch=1) and not lease.is_valid(14.6, epoch=1)
    assert lease.answered(sent=9.0, epoch=1) == lease, "an answer that comes late shortens nothing"


def test_a_host_that_was_left_out_and_is_answered_again_has_no_lease_for_the_old_view() -> None:
    lease = Lease(seconds=5.0).answered(sent=0.0, epoch=3).answered(sent=20.0, epoch=4)
    assert not lease.is_valid(21.0, epoch=3) and lease.is_valid(21.0, epoch=4)


def test_a_host_stops_before_it_is_left_out_whatever_the_network_does() -> None:
    draw = random.Random(3)
    for _ in range(1000):
        drift = draw.uniform(0.95, 1.05)
        sent = draw.uniform(0, 1)
        heard = sent + draw.expovariate(2.0)
        lease = Lease(seconds=5.0).answered(sent=sent * drift, epoch=1)
        left_out = heard + 5.0
        assert not lease.is_valid((left_out - 0.001) * drift, epoch=1)
