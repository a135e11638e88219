"""Checkpoints at an address, from one process: commit, torn uploads, what expires, what is set aside."""

import shutil

import pytest

from shoal.checkpoint.files import GOOD, MANIFEST, NotWhole
from shoal.checkpoint.manifest import merge
from shoal.checkpoint.places.address import (
    ObjectStore,
    begin_at,
    check_address,
    clear_up,
    commit_at,
    expire_at,
    fall_back_at,
    fetch_newest,
    folder_of,
    glance_at,
    mark_good_at,
    next_id,
    parse_folder,
    upload,
)
from shoal.checkpoint.whole import verify
from shoal.core.errors import RequestError
from support.checkpoint.forged import CUTS, contents, expected, two_ranks


@pytest.fixture
def store(tmp_path):
    made = ObjectStore(f"file://{tmp_path}/bucket/run/")
    made.make_folder("")
    return made


def save(store, tmp_path, step, *, seed=None, commits=True):
    chosen = step if seed is None else seed
    draft = begin_at(store, tmp_path / "checkpoints", step)
    parts = [upload(store, draft, rank, blobs, [CUTS[rank]]) for rank, blobs in enumerate(two_ranks(chosen))]
    manifest = merge(parts, id=draft.id, step=step, plan="dp=2", values={"seed": chosen, "loss": 1.5})
    if commits:
        commit_at(store, draft, manifest)
    return tmp_path / "bucket" / "run" / folder_of(draft), (draft, manifest)


def steps(store):
    return [one.step for one in store.checkpoints() if not one.is_aside]


def test_what_was_uploaded_is_fetched_to_the_byte(store, tmp_path):
    save(store, tmp_path, 10)
    save(store, tmp_path, 20)
    path, refused = fetch_newest(store, tmp_path / "checkpoints")
    assert path.name == "step-00000020" and refused == [] and verify(path) == []
    assert contents(path) == expected(20)
    assert [path.name for path in path.parent.iterdir()] == ["step-00000020"]


def test_an_upload_without_its_manifest_is_no_checkpoint_and_goes_at_the_next_start(store, tmp_path):
    save(store, tmp_path, 10)
    torn, _ = save(store, tmp_path, 20, commits=False)
    assert steps(store) == [10] and store.leftovers() == [torn.name]
    clear_up(store, tmp_path / "checkpoints", is_first=False, is_leader=True)
    assert torn.exists()
    clear_up(store, tmp_path / "checkpoints", is_first=True, is_leader=True)
    assert not torn.exists() and steps(store) == [10]


@pytest.mark.parametrize("shard", ["rank-000.safetensors", "rank-001.safetensors"])
def test_a_shard_that_is_short_is_not_committed(store, tmp_path, shard):
    folder, (draft, manifest) = save(store, tmp_path, 10, commits=False)
    (folder / shard).write_bytes((folder / shard).read_bytes()[:-1])
    with pytest.raises(NotWhole, match=f"{shard} has .* bytes at file://.*, and .* were written"):
        commit_at(store, draft, manifest)
    assert steps(store) == []


def test_bytes_that_are_altered_there_are_never_loaded(store, tmp_path):
    save(store, tmp_path, 10)
    torn, _ = save(store, tmp_path, 20)
    data = bytearray((torn / "rank-001.safetensors").read_bytes())
    data[-1] ^= 1
    (torn / "rank-001.safetensors").write_bytes(data)
    path, [(name, reason)] = fetch_newest(store, tmp_path / "checkpoints")
    assert path.name == "step-00000010" and name == torn.name and "have the sum" in reason
    assert glance_at(store, torn.name).step == 20, "a glance reads no bytes"
    (torn / MANIFEST).write_bytes((torn / MANIFEST).read_bytes()[:-1])
    with pytest.raises(NotWhole):
        glance_at(store, torn.name)


def test_a_folder_under_another_name_is_refused(store, tmp_path):
    """Somebody copied a checkpoint to the name of a later step."""
    folder, _ = save(store, tmp_path, 10)
    shutil.copytree(folder, folder.with_name("step-00000030-" + "f" * 16))
    path, [(name, reason)] = fetch_newest(store, tmp_path / "checkpoints")
    assert path.name == "step-00000010" and "is of step 10" in reason and name.startswith("step-00000030")


def test_the_same_step_again_replaces_the_one_before(store, tmp_path):
    old, _ = save(store, tmp_path, 10, seed=1)
    new, _ = save(store, tmp_path, 10, seed=2)
    assert not old.exists() and new.exists() and new.name > old.name
    assert contents(fetch_newest(store, tmp_path / "checkpoints")[0]) == expected(10, seed=2)


def test_what_expires_is_deleted_and_good_ones_are_marked(store, tmp_path):
    for step in (10, 20, 30, 40):
        save(store, tmp_path, step)
    mark_good_at(store, 20)
    expire_at(store, newest=40, keep=1, keep_every=None, stays={20})
    assert steps(store) == [40, 20] and [GOOD in one.names for one in store.checkpoints()] == [False, True]
    done = fall_back_at(store, 20)
    assert (done.good, done.newest, done.first_aside, done.last_aside) == (20, 20, 40, 40) and steps(store) == [20]
    expire_at(store, newest=50, keep=1, keep_every=None, stays=())
    assert steps(store) == [20], "nothing goes where the newest is not there"


def test_ids_of_one_step_ascend_whatever_the_clock_says():
    first = next_id([], 1e9)
    assert next_id([first], 2e9) > first and next_id([first], 1.0) > first
    assert parse_folder(f"step-00000010-{first}") == (10, first)
    assert [parse_folder(name) for name in ("step-10", f"step-1-{first}", f"../step-00000010-{first}")] == [None] * 3


@pytest.mark.parametrize(
    ("address", "processes", "said"),
    [
        ("bogus://x/y", 1, "fsspec knows no 'bogus'"),
        ("memory://x", 2, "the memory of one process, and the run has 2"),
    ],
)
def test_an_address_that_cannot_work_is_refused_before_a_process_starts(address, processes, said):
    with pytest.raises(RequestError, match=said):
        check_address(address, processes)


def test_an_address_that_can_is_not():
    check_address("memory://x", 1)
    check_address("file:///tmp/x", 8)
