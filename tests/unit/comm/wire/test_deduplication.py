"""Deduplication against a set that remembers everything, and their bounds."""

import random

from shoal.comm.wire.listener import WINDOW, Deduplication


def test_each_number_is_new_once():
    seen = Deduplication()
    for sequence in (5, 3, 4, 9, 0, 8):
        assert not seen.is_seen("a", sequence)
        assert seen.note("a", sequence)
        assert seen.is_seen("a", sequence) and not seen.note("a", sequence)
    assert not seen.is_seen("b", 5) and seen.note("b", 5)


def test_what_is_too_old_to_tell_counts_as_seen():
    seen = Deduplication()
    seen.note("a", WINDOW + 10)
    assert not seen.is_seen("a", 11) and seen.is_seen("a", 10)
    seen.note("a", 10**12)
    assert seen.is_seen("a", 10**12 - WINDOW) and not seen.is_seen("a", 10**12 - WINDOW + 1)


def test_it_agrees_with_a_set_on_random_traffic():
    source = random.Random(1)
    window, seen, highest = Deduplication(), set(), 0
    for _ in range(20_000):
        sequence = max(0, highest + source.randint(-WINDOW - 20, 30))
        expected = sequence not in seen and highest - sequence < WINDOW
        assert window.note("a", sequence) == expected
        if expected:
            seen.add(sequence)
            highest = max(highest, sequence)


def test_the_most_silent_sender_is_forgotten_first():
    seen = Deduplication(max_senders=3)
    for sender in ("a", "b", "c", "a", "d"):
        seen.note(sender, len(seen) + 1 if sender != "a" else seen.is_seen("a", 1) + 1)
    assert len(seen) == 3 and seen.is_seen("a", 1)
    assert not seen.is_seen("b", 2)
    assert seen.forget("a") and not seen.forget("a") and not seen.is_seen("a", 1)


def test_many_messages_take_no_more_room_than_few():
    seen = Deduplication()
    for sequence in range(3 * WINDOW):
        seen.note("a", sequence)
    _, bits = seen._seen["a"]
    assert bits.bit_length() <= WINDOW
