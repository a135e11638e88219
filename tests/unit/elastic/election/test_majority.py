"""One voter at a time: what it says to a poll and a renewal, and how long it keeps its word."""

import pytest

from shoal.core.errors import RequestError
from shoal.elastic.election import majority
from shoal.elastic.election.majority import Ballot, Poll, Polled, Renew, Renewed, Resigned, State, Terms

TERMS = Terms(voters=("a", "b", "c"), lease_seconds=10.0, drift=0.1)


def voter(name: str = "a", ballot: Ballot | None = None, now: float = 0.0) -> State:
    return majority.begin(name, address=f"at-{name}", terms=TERMS, ballot=ballot or Ballot(), now=now)


def poll(state: State, candidate: str, term: int, now: float, *, is_trial: bool = False) -> tuple[State, bool]:
    state, [(to, answer)] = majority.receive(state, Poll(term, candidate, "", is_trial, 77.0), now)
    assert to == candidate and (answer.asked, answer.sent, answer.is_trial) == (term, 77.0, is_trial)
    return state, answer.is_granted


def renew(state: State, leader: str, term: int, now: float) -> tuple[State, bool]:
    state, [(to, answer)] = majority.receive(state, Renew(term, leader, "", 77.0), now)
    assert to == leader and answer.sent == 77.0
    return state, answer.is_granted


def lead(name: str = "a", now: float = 100.0) -> State:
    """A leader of term 1 whose lease began at ``now``."""
    state = majority.stand(voter(name))
    state, messages = majority.tick(state, now)
    assert [(to, message.is_trial, message.term) for to, message in messages] == [("b", True, 1), ("c", True, 1)]
    state, messages = majority.receive(state, Polled("b", True, 1, 0, True, now), now)
    assert [(to, message.is_trial, message.term) for to, message in messages] == [("b", False, 1), ("c", False, 1)]
    assert state.ballot == Ballot(term=1, vote="a") and not state.is_valid(now)
    state, messages = majority.receive(state, Polled("b", True, 1, 1, False, now), now + 3)
    assert messages == [] and state.epoch == 1
    return state


def test_one_vote_in_a_term_whatever_time_goes_by() -> None:
    state, is_granted = poll(voter(), "b", 1, 0.0)
    assert is_granted and state.ballot == Ballot(term=1, vote="b")
    assert poll(state, "b", 1, 1.0)[1], "the answer was lost"
    assert not poll(state, "c", 1, 1000.0)[1]
    assert not poll(state, "b", 0, 1000.0)[1]


def test_a_promise_holds_on_the_voters_clock_and_a_little_longer() -> None:
    state, _ = poll(voter(), "b", 1, 0.0)
    assert not poll(state, "c", 2, 10.99)[1] and poll(state, "c", 2, 11.0)[1]
    assert poll(state, "b", 2, 1.0)[1], "the holder may advance"
    state, is_granted = renew(state, "b", 1, 9.0)
    assert is_granted and not poll(state, "c", 2, 19.9)[1] and poll(state, "c", 2, 20.0)[1]


def test_a_trial_changes_nothing() -> None:
    state = voter()
    assert poll(state, "b", 5, 0.0, is_trial=True) == (state, True)
    state, _ = poll(state, "b", 5, 0.0)
    assert poll(state, "c", 6, 1.0, is_trial=True) == (state, False)
    assert poll(state, "c", 5, 50.0, is_trial=True) == (state, False)


def test_a_refused_poll_does_not_raise_the_term() -> None:
    state, _ = poll(voter(), "b", 1, 0.0)
    assert poll(state, "c", 9, 1.0) == (state, False)


def test_one_that_starts_again_keeps_still_but_takes_a_leader() -> None:
    state = voter(ballot=Ballot(term=3, vote="b"), now=50.0)
    assert not poll(state, "c", 4, 60.9)[1] and poll(state, "c", 4, 61.1)[1]
    assert not renew(state, "c", 2, 51.0)[1]
    state, is_granted = renew(state, "c", 4, 51.0)
    assert is_granted and state.ballot == Ballot(term=4, vote="c")
    assert poll(voter(), "b", 1, 0.0)[1], "one that never promised anything need not wait"


def test_the_lease_counts_from_when_the_question_was_sent() -> None:
    state = lead(now=100.0)
    assert state.is_valid(109.9) and not state.is_valid(110.0)
    state, messages = majority.extend(state, 105.0)
    assert [(to, type(message), message.sent) for to, message in messages] == [("b", Renew, 105.0), ("c", Renew, 105.0)]
    assert not state.is_valid(110.0), "not before somebody has answered"
    state, _ = majority.receive(state, Renewed("c", True, 1, 1, 105.0), 108.0)
    assert state.is_valid(114.9) and not state.is_valid(115.0)
    late, _ = majority.receive(state, Renewed("b", True, 1, 1, 101.0), 108.0)
    assert late.lease_until == 115.0, "an answer that was overtaken takes nothing back"


def test_a_lease_that_ran_out_is_over() -> None:
    state, messages = majority.tick(lead(now=100.0), 110.0)
    assert state.role == "voter" and messages == []
    assert majority.receive(state, Renewed("b", True, 1, 1, 105.0), 110.0)[0].role == "voter"
    for change in (majority.extend, majority.advance):
        state, messages = change(lead(now=100.0), 110.0)
        assert (state.role, messages) == ("voter", [])


def test_advance() -> None:
    state, messages = majority.advance(lead(now=100.0), 101.0)
    assert [(to, message.term, message.is_trial) for to, message in messages] == [("b", 2, False), ("c", 2, False)]
    assert state.ballot == Ballot(term=2, vote="a") and state.epoch == 1 and state.is_valid(101.0)
    again, messages = majority.extend(state, 102.0)
    assert [message.term for _, message in messages] == [2, 2]
    state, _ = majority.receive(again, Polled("c", False, 2, 7, False, 102.0), 103.0)
    assert state.is_valid(103.0), "one refusal is not a majority"
    state, _ = majority.receive(state, Polled("b", True, 2, 2, False, 102.0), 103.0)
    assert (state.epoch, state.is_advancing, state.lease_until) == (2, False, 112.0)


def test_a_candidate_that_is_behind_catches_up() -> None:
    state, _ = majority.tick(majority.stand(voter()), 100.0)
    state, _ = majority.receive(state, Polled("b", False, 1, 8, True, 100.0), 100.0)
    assert state.ballot == Ballot(term=8) and state.role == "voter"
    assert majority.tick(state, 100.0)[1] == [], "after a random time"
    _, messages = majority.tick(state, 106.0)
    assert [message.term for _, message in messages] == [9, 9]


def test_resigning_frees_the_others_at_once() -> None:
    state, messages = majority.resign(lead(now=100.0), 101.0)
    assert not state.is_valid(101.0) and [message for _, message in messages] == [Resigned(1, "a")] * 2
    assert majority.tick(state, 200.0)[1] == []
    other, _ = poll(voter("b"), "a", 1, 101.0)
    other, _ = majority.receive(other, Resigned(1, "a"), 102.0)
    assert poll(other, "c", 2, 102.0)[1]
    other, _ = poll(voter("b"), "a", 3, 101.0)
    assert majority.receive(other, Resigned(1, "a"), 102.0)[0] == other, "a late word of an earlier term"


def test_turns_are_random_and_repeatable() -> None:
    turns = {name: voter(name).act_at for name in TERMS.voters}
    assert len(set(turns.values())) == 3 and turns == {name: voter(name).act_at for name in TERMS.voters}


def test_too_few_voters() -> None:
    with pytest.raises(RequestError, match="at least 3 voters with different names, and there are 2: a, b"):
        Terms(voters=("a", "b")).check()
    with pytest.raises(RequestError, match="different names"):
        Terms(voters=("a", "b", "b")).check()
