"""Duplicate windows against a set that remembers everything, and their bounds."""

import random

from shoal.comm.wire.windows import WINDOW, Windows


def test_each_number_is_new_once():
    windows = Windows()
    for sequence in (5, 3, 4, 9, 0, 8):
        assert not windows.is_seen("a", sequence)
        assert windows.note("a", sequence)
        assert windows.is_seen("a", sequence) and not windows.note("a", sequence)
    assert not windows.is_seen("b", 5) and windows.note("b", 5)


def test_what_is_too_old_to_tell_counts_as_seen():
    windows = Windows()
    windows.note("a", WINDOW + 10)
    assert not windows.is_seen("a", 11) and windows.is_seen("a", 10)
    windows.note("a", 10**12)
    assert windows.is_seen("a", 10**12 - WINDOW) and not windows.is_seen("a", 10**12 - WINDOW + 1)


def test_it_agrees_with_a_set_on_random_traffic():
    source = random.Random(1)
    windows, seen, highest = Windows(), set(), 0
    for _ in range(20_000):
        sequence = max(0, highest + source.randint(-WINDOW - 20, 30))
        expected = sequence not in seen and highest - sequence < WINDOW
        assert windows.note("a", sequence) == expected
        if expected:
            seen.add(sequence)
            highest = max(highest, sequence)


def test_the_most_silent_sender_is_forgotten_first():
    windows = Windows(max_senders=3)
    for sender in ("a", "b", "c", "a", "d"):
        windows.note(sender, len(windows) + 1 if sender != "a" else windows.is_seen("a", 1) + 1)
    assert len(windows) == 3 and windows.is_seen("a", 1)
    assert not windows.is_seen("b", 2)
    assert windows.forget("a") and not windows.forget("a") and not windows.is_seen("a", 1)


def test_many_messages_take_no_more_room_than_few():
    windows = Windows()
    for sequence in range(3 * WINDOW):
        windows.note("a", sequence)
    _, bits = windows._seen["a"]
    assert bits.bit_length() <= WINDOW
