"""Two ranks with a disk each: what is torn, mixed up or altered on its way is never taken, and what expires goes on both."""

import shutil

from support.checkpoint.saving_ranks import Ranks

STEPS = [f"step-000000{step}" for step in (10, 20, 30, 40)]
SHARD = "rank-001.safetensors"


def saved(folder, steps, place="hosts", **settings):
    """A run that saves these steps, of which each weight is a tenth."""
    for name in ("h1", "h2"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    with Ranks(folder, place=place, **settings) as ranks:
        for step in steps:
            ranks.ask("fill", step / 10)
            ranks.ask("save", step)
            assert [outcome["kind"] for outcome in ranks.ask("wait")] == ["checkpoint_saved"] * 2
        ranks.ask("close")
    (folder / "store").unlink()


def load(folder, place="hosts"):
    """What a start finds, which must be the same on both."""
    with Ranks(folder, place=place) as ranks:
        first, second = ranks.ask("load")
        ranks.ask("close")
    (folder / "store").unlink()
    assert first == second and not list(folder.rglob(".brought-*"))
    return first


def names(folder):
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_torn_part_of_one_host_is_named_and_the_step_before_is_taken(tmp_path):
    saved(tmp_path, [10, 20])
    shard = tmp_path / "h2" / "checkpoints" / STEPS[1] / SHARD
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    step, values, refused = load(tmp_path)
    assert (step, values) == (10, [1.0])
    [[name, reason]] = refused
    assert name == STEPS[1] and f"no host has {SHARD}" in reason and "have the sum" in reason


def test_parts_of_two_saves_are_never_put_together(tmp_path):
    """The same step of another run on one host; and only its file, under the manifest of this one."""
    saved(tmp_path / "run", [10, 20])
    saved(tmp_path / "other", [20])
    own, other = (tmp_path / name / "h2" / "checkpoints" / STEPS[1] for name in ("run", "other"))
    keep = tmp_path / "keep"
    shutil.copytree(own, keep)
    shutil.rmtree(own)
    shutil.copytree(other, own)
    assert load(tmp_path / "run")[:2] == [10, [1.0]]
    shutil.copy(keep / "manifest.json", own)
    # The bytes are those of the other run, and equal: a sum cannot tell, and need not. Others it can.
    assert load(tmp_path / "run")[:2] == [20, [2.0]]
    shutil.copy(tmp_path / "run" / "h2" / "checkpoints" / STEPS[0] / SHARD, own)
    assert load(tmp_path / "run")[:2] == [10, [1.0]]


def test_what_is_altered_on_its_way_to_the_first_host_fails_that_save_and_not_the_next(tmp_path):
    for name in ("h1", "h2"):
        (tmp_path / name).mkdir()
    with Ranks(tmp_path, place="first") as ranks:
        ranks.ask("fill", 1)
        ranks[1].ask("lie")
        ranks.ask("save", 10)
        outcomes = ranks.ask("wait")
        assert all(f"{SHARD} from rank 1: bytes 0 to" in outcome["reason"] for outcome in outcomes), outcomes
        assert names(tmp_path / "h1") == names(tmp_path / "h2") == []
        ranks.ask("save", 20)
        assert [outcome["kind"] for outcome in ranks.ask("wait")] == ["checkpoint_saved"] * 2
        assert names(tmp_path / "h1") == [STEPS[1]] and names(tmp_path / "h2") == []
        # The second host has nothing, and is sent all of it.
        assert ranks.ask("load") == [[20, [1.0], []]] * 2
        ranks.ask("close")


def test_what_expires_goes_on_every_host(tmp_path):
    saved(tmp_path, [10, 20, 30, 40], keep=2)
    # The oldest stays because none is known to be good.
    assert names(tmp_path / "h1") == names(tmp_path / "h2") == [STEPS[0], *STEPS[2:]]
