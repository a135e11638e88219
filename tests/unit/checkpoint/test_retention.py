"""What expires and what never does."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.checkpoint.commit import sweep
from shoal.checkpoint.retention import (
    Fallback,
    Proven,
    expire,
    expired,
    fall_back,
    list_aside,
    mark_good,
    newest_good,
    refuse_only_aside,
    set_aside,
)
from shoal.checkpoint.whole import newest_whole
from shoal.core.errors import RequestError
from support.checkpoint.forged import contents, expected, make


def steps_in(root):
    return sorted(int(path.name.removeprefix("step-")) for path in root.iterdir() if path.name.startswith("step-"))


@pytest.mark.parametrize(
    ("keep", "keep_every", "gone"),
    [(1, None, [10, 20, 30]), (2, None, [10, 20]), (4, None, []), (9, None, []), (1, 20, [10, 30]), (2, 10, [])],
)
def test_what_expires(keep, keep_every, gone):
    assert expired([10, 20, 30, 40], newest=40, keep=keep, keep_every=keep_every) == gone


def test_steps_of_a_later_lineage_are_left_alone_and_do_not_count():
    assert expired([10, 20, 30, 90], newest=30, keep=2, keep_every=None) == [10]


@given(st.sets(st.integers(0, 500), min_size=1), st.integers(1, 5), st.none() | st.integers(1, 50), st.data())
def test_the_newest_always_stays_and_no_more_than_needed_goes(steps, keep, keep_every, data):
    newest = data.draw(st.sampled_from(sorted(steps)))
    gone = set(expired(steps, newest=newest, keep=keep, keep_every=keep_every))
    assert gone < steps and newest not in gone
    older = sorted(step for step in steps if step <= newest)
    assert not gone & set(older[-keep:]) and gone <= set(older)
    stays = {step for step in older if step not in gone}
    assert stays == set(older[-keep:]) | {step for step in older if keep_every is not None and step % keep_every == 0}


def test_the_newest_good_one_stays_beside_those_that_are_kept():
    assert expired([10, 20, 30, 40], newest=40, keep=1, keep_every=None, stays=[20]) == [10, 30]
    assert expired([10, 20, 30, 40], newest=40, keep=1, keep_every=None, stays=[40]) == [10, 20, 30]
    assert expired([10, 20, 30, 40], newest=40, keep=3, keep_every=None, stays=[30]) == [10]


def test_a_checkpoint_is_good_once_a_step_was_taken_from_it():
    proven = Proven()
    assert not proven.take(4) and proven.good is None
    proven.commit(5)
    assert (proven.good, proven.anchor) == (None, 5)
    assert proven.take(6) and (proven.good, proven.anchor) == (5, 5)
    # A save that was under way when the next step was taken is good as soon as it is there.
    assert not proven.take(7) and not proven.take(8)
    proven.commit(7)
    proven.commit(8)
    assert (proven.good, proven.anchor) == (7, 7)
    assert proven.take(9)
    # A run that goes on from 8 knows what the disk says: which of them are marked.
    again = Proven()
    again.begin(8, good=7)
    assert again.good == 7 and again.take(9) and again.good == 8
    again.begin(8, good=8)
    assert again.good == 8
    again.begin(8, good=None)
    again.commit(9)
    assert (again.good, again.anchor) == (None, 8)


def test_what_is_set_aside_is_no_checkpoint_any_more_and_stays_for_a_look(tmp_path):
    for step in (10, 20, 30):
        make(tmp_path, step)
    assert set_aside(tmp_path, [20, 30, 40]) == [20, 30]
    assert newest_whole(tmp_path).path == tmp_path / "step-00000010"
    assert sweep(tmp_path) == []
    aside = [path for _, path in list_aside(tmp_path)]
    assert sorted(contents(path) == expected(step) for path, step in zip(aside, (20, 30), strict=True)) == [True] * 2
    # Of one step the last time is kept, and of other steps all.
    make(tmp_path, 20)
    assert set_aside(tmp_path, [10, 20]) == [10, 20]
    assert [path.name[:20] for _, path in list_aside(tmp_path)] == [
        f".aside-step-000000{step}" for step in (10, 20, 30)
    ]
    assert not aside[0].exists() and aside[1].exists()


def test_a_mark_tells_the_next_process_which_one_is_good(tmp_path):
    for step in (10, 20, 30):
        make(tmp_path, step)
    mark_good(tmp_path, 40)
    assert newest_good(tmp_path) is None and fall_back(tmp_path, None) == Fallback(good=None, newest=30)
    assert fall_back(tmp_path, 40) == Fallback(good=None, newest=30) and steps_in(tmp_path) == [10, 20, 30]
    mark_good(tmp_path, 10)
    mark_good(tmp_path, 20)
    assert (newest_good(tmp_path), newest_good(tmp_path, until=19)) == (20, 10)
    assert contents(tmp_path / "step-00000020") == expected(20)
    (tmp_path / "step-00000020" / "rank-001.safetensors").unlink()
    assert newest_good(tmp_path) == 10
    assert fall_back(tmp_path, 10) == Fallback(good=10, newest=20, first_aside=30, last_aside=30)
    assert steps_in(tmp_path) == [10, 20], "a torn one is left alone"


def test_only_what_was_set_aside_is_named_and_not_passed_over(tmp_path):
    refuse_only_aside(tmp_path / "none")
    make(tmp_path, 10)
    refuse_only_aside(tmp_path)
    set_aside(tmp_path, [10])
    with pytest.raises(RequestError, match=r"\.aside-step-00000010-.*rename it, such as to step-00000010"):
        refuse_only_aside(tmp_path)


def test_expired_ones_are_deleted_and_the_rest_is_untouched(tmp_path):
    for step in (10, 20, 30, 40):
        make(tmp_path, step)
    assert expire(tmp_path, newest=40, keep=2, keep_every=None) == [10, 20]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]
    assert contents(newest_whole(tmp_path).path) == expected(40)


def test_a_torn_one_neither_counts_nor_goes(tmp_path):
    for step in (10, 20, 30):
        make(tmp_path, step)
    (tmp_path / "step-00000020" / "rank-001.safetensors").unlink()
    # Two of the newest stay: 30, and 10 because 20 is not one.
    assert expire(tmp_path, newest=30, keep=2, keep_every=None) == []
    assert expire(tmp_path, newest=30, keep=1, keep_every=None) == [10]
    assert steps_in(tmp_path) == [20, 30]


def test_nothing_goes_when_the_newest_is_not_whole(tmp_path):
    for step in (10, 20):
        make(tmp_path, step)
    shutil.rmtree(tmp_path / "step-00000020")
    assert expire(tmp_path, newest=20, keep=1, keep_every=None) == []
    make(tmp_path, 20)
    (tmp_path / "step-00000020" / "manifest.json").write_bytes(b"{}")
    assert expire(tmp_path, newest=20, keep=1, keep_every=None) == []
    assert contents(newest_whole(tmp_path).path) == expected(10)


def test_links_and_foreign_names_are_left_alone(tmp_path):
    root = tmp_path / "checkpoints"
    elsewhere = make(tmp_path / "other", 10)
    make(root, 20)
    (root / "step-00000010").symlink_to(elsewhere)
    (root / "notes").mkdir()
    assert expire(root, newest=20, keep=1, keep_every=None) == []
    assert (elsewhere / "manifest.json").exists() and (root / "notes").exists()
