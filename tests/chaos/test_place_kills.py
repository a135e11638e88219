"""Two ranks with a disk each, of which one is killed before any call of a save that changes its disk: the next start finds the
old checkpoint or the new one, whole, and the save after it works."""

import contextlib
import shutil

import pytest

from support.checkpoint.saving_ranks import Ranks

DONE = 90
"""More than a save has calls."""


def kinds(outcomes):
    return [outcome["kind"] for outcome in outcomes]


def first_save(folder, place):
    with Ranks(folder, place=place) as ranks:
        ranks.ask("fill", 1)
        ranks.ask("save", 10)
        assert kinds(ranks.ask("wait")) == ["checkpoint_saved"] * 2
        ranks.ask("close")
    (folder / "store").unlink()


def kill_in_a_save(folder, place, victim, count, step):
    """Save step 10, then this one, in which a rank dies; whether it did, and what the next start loads."""
    for name in ("h1", "h2"):
        (folder / name).mkdir(parents=True)
    first_save(folder, place)
    with Ranks(folder, place=place, deadline_s=20.0) as ranks:
        ranks.ask("fill", 2)
        ranks[victim].ask("die_at", count)
        for rank in ranks:
            # The one that dies may be gone before it is asked.
            with contextlib.suppress(BrokenPipeError):
                rank.tell("save", step)
                rank.tell("wait")
        answers = [(rank.hear(), rank.hear()) for rank in ranks]
        has_died = answers[victim][1] is None
        assert answers[1 - victim][1] is not None, "the other rank hangs, or died too"
    (folder / "store").unlink()
    with Ranks(folder, place=place) as ranks:
        loaded = ranks.ask("load")
        assert loaded[0] == loaded[1], f"{place}, rank {victim} killed at call {count}: {loaded}"
        ranks.ask("fill", 3)
        ranks.ask("save", 30)
        assert kinds(ranks.ask("wait")) == ["checkpoint_saved"] * 2
        assert ranks.ask("load") == [[30, [3.0], []]] * 2
        ranks.ask("close")
    left = [path.name for path in folder.rglob(".*")]
    assert left == [], f"{place}, rank {victim} killed at call {count}: {left}"
    return has_died, loaded[0]


def check_found(found, step, what):
    known, values, _ = found
    assert (known, values) in ((10, [1.0]), (step, [2.0])), f"{what}: {found}"
    return values == [2.0]


@pytest.mark.parametrize(("count", "is_new"), [(8, False), (12, True)], ids=["manifest", "name"])
def test_a_kill_between_the_names_of_two_hosts_leaves_one_whole_checkpoint(tmp_path, count, is_new):
    """Step 10 again, each host its part: rank 1 dies while it writes the manifest, or when rank 0 has taken the name and it has
    not, with the old one set aside."""
    has_died, found = kill_in_a_save(tmp_path, "hosts", 1, count, 10)
    assert has_died and check_found(found, 10, f"call {count}") == is_new


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", [10, 20], ids=["the same step again", "a new step"])
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["first", "hosts", "address"])
def test_a_kill_at_every_call_leaves_the_old_or_the_new(tmp_path, place, victim, step):
    outcomes = []
    for count in range(DONE):
        folder = tmp_path / str(count)
        where = f"file://{folder}/bucket" if place == "address" else place
        has_died, found = kill_in_a_save(folder, where, victim, count, step)
        outcomes.append(check_found(found, step, f"{place}, rank {victim}, call {count}"))
        shutil.rmtree(folder)
        if not has_died:
            break
    assert count >= 4 and outcomes[-1], f"{count} calls were struck at: {outcomes}"
    # A sweep that only ever saw one side of the commit would prove nothing about it; a rank that does not commit sees one.
    assert set(outcomes) == {False, True}
