"""The plan's key ``sync``: every form prints as it was read, and what is wrong is one message with the number and the fix."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.plan import Plan
from shoal.core.syncrule import SyncRule

FORMS = (
    "allreduce",
    "local:3",
    "local:30s",
    "local:4@10",
    "diloco:20",
    "stream:48,4,2",
    "slowmo:48",
    "sparse:50,0.03",
    "easgd:10",
    "gossip:ring",
    "gossip:exponential,5",
    "gossip:graph.json",
    "pushsum:random",
)


@pytest.mark.parametrize("text", FORMS)
def test_a_rule_prints_as_it_was_read(text):
    assert str(SyncRule.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dilco:20", "did you mean 'diloco'"),
        ("local:0", "H is 0, below 1"),
        ("local:x", "H is a whole number, not 'x'"),
        ("local:0s", "a time above zero"),
        ("diloco:2,3", "2 values after the colon"),
        ("stream:10,4,1", "write stream:8,4,1"),
        ("stream:8,4,2", "lower the delay to 1"),
        ("stream:8", "stream:48,4,2"),
        ("sparse:8", "sparse:50,0.03"),
        ("sparse:8,0", "K is 0, and a share is above 0 and at most 1"),
        ("sparse:8,x", "K is a share such as 0.03, not 'x'"),
        ("gossip:rnig", "did you mean 'ring'"),
        ("gossip", "0 values after the colon"),
    ],
)
def test_a_wrong_rule_is_one_message_with_the_fix(text, words):
    with pytest.raises(RequestError, match=f"sync={text}") as refusal:
        SyncRule.parse(text)
    assert words in str(refusal.value)


def test_rounds_are_counted_from_the_end_of_the_first_phase():
    rule = SyncRule.parse("local:3@5")
    assert [step for step in range(14) if rule.is_round(step)] == [7, 10, 13]
    assert not any(SyncRule.parse("local:1s").is_round(step) for step in range(9))


def test_a_round_of_a_stream_is_the_application_of_a_fragment():
    rule = SyncRule.parse("stream:8,2,3")
    sent = [(step, one) for step in range(24) for one in rule.fragments_sent(step)]
    assert sent == [(7, 0), (11, 1), (15, 0), (19, 1), (23, 0)]
    applied = [(step + 3, one) for step, one in sent]
    assert [(step, one) for step in range(26) for one in rule.fragments_applied(step)] == applied[:-1]
    assert [step for step in range(26) if rule.is_round(step)] == [step for step, _ in applied[:-1]]


def test_a_rule_without_islands_makes_every_replica_one():
    plan = Plan.parse("dp=4 sync=local:3")
    assert plan.world_size == 4 and str(plan.with_islands) == "islands=4 dp=1 sync=local:3"
    assert Plan.parse("dp=4").with_islands == Plan.parse("dp=4")
    inside = Plan.parse("islands=2 dp=2 tp=2 sync=diloco:20")
    assert inside.world_size == 8 and inside.num_shares == 4 and inside.with_islands == inside


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("islands=2 dp=2", "write dp=4 in place of islands=2 dp=2"),
        ("dp=1 sync=local:3", "there is one; set islands or dp to 2 or more"),
        ("dp=4 zero=1 sync=local:3", "write islands=2 dp=2 to"),
        ("dp=9 zero=1 sync=local:3", "write islands=3 dp=3 to"),
        ("dp=2 zero=1 sync=local:3", "an island of its own; leave zero out"),
        ("ps=1 workers=2 sync=local:3", "ps=1 servers have them"),
        ("islands=2 pp=2 schedule=pipedream sync=local:3", "use schedule=1f1b"),
        ("dp=3 sync=gossip:exponential", "there are 3; use sync=pushsum:exponential"),
        ("dp=2 sync=nothing", "unknown policy 'nothing'"),
        ("islands=0 dp=2 sync=local:3", "islands=0 is below 1"),
    ],
)
def test_islands_that_cannot_be_are_refused(text, words):
    with pytest.raises(RequestError) as refusal:
        Plan.parse(text).check()
    assert words in str(refusal.value)
