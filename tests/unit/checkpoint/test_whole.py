"""Which checkpoint is whole, and which one a user means."""

import shutil

import pytest

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.whole import checkpoints_in, glance, locate, newest_whole, verify
from shoal.core.errors import RequestError
from support.checkpoint.forged import make


def test_the_newest_by_number_is_chosen_and_the_refused_are_named(tmp_path):
    paths = {step: make(tmp_path, step) for step in (5, 90, 100)}
    assert newest_whole(tmp_path).path == paths[100]
    (paths[100] / "rank-000.safetensors").unlink()
    (paths[90] / "manifest.json").unlink()
    found = newest_whole(tmp_path)
    assert found.path == paths[5]
    assert found.refused == ((paths[100], "rank-000.safetensors is missing"), (paths[90], "manifest.json is missing"))


def test_nothing_is_found_where_nothing_is(tmp_path):
    (tmp_path / "file").write_text("")
    for root in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        found = newest_whole(root)
        assert found.path is None and found.refused == ()


def test_all_refused_is_not_the_same_as_none(tmp_path):
    shutil.rmtree(make(tmp_path, 5))
    (tmp_path / "step-00000005").mkdir()
    found = newest_whole(tmp_path)
    assert found.path is None and len(found.refused) == 1


def test_every_problem_is_named_not_only_the_first(tmp_path):
    path = make(tmp_path, 5)
    for name in ("rank-000.safetensors", "rank-001.safetensors"):
        (path / name).write_bytes(b"x")
    first, second = verify(path)
    assert first.startswith("rank-000.safetensors has 1 bytes, the manifest says") and second.startswith("rank-001")


def test_a_glance_sees_sizes_and_not_bytes(tmp_path):
    path = make(tmp_path, 5)
    shard = path / "rank-000.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert glance(path).step == 5 and verify(path)
    shard.write_bytes(data[:-1])
    with pytest.raises(NotWhole, match="the manifest says"):
        glance(path)


def test_extra_files_do_not_matter(tmp_path):
    path = make(tmp_path, 5)
    (path / "notes.txt").write_text("the good one")
    assert verify(path) == []


def test_a_copy_under_a_name_of_ones_own_is_still_a_checkpoint(tmp_path):
    copy = shutil.copytree(make(tmp_path, 5), tmp_path / "best")
    assert verify(copy) == [] and locate(copy) == copy


def test_a_run_means_its_newest_whole_checkpoint(tmp_path):
    root = tmp_path / "run" / "checkpoints"
    first, second = make(root, 5), make(root, 6)
    assert locate(tmp_path / "run") == second and locate(root) == second and locate(first) == first
    assert checkpoints_in(tmp_path / "run") == [second, first]
    (second / "manifest.json").unlink()
    assert locate(tmp_path / "run") == first
    with pytest.raises(NotWhole, match=r"manifest.json is missing"):
        locate(second)


def test_a_link_that_a_user_gives_is_followed(tmp_path):
    path = make(tmp_path / "run" / "checkpoints", 5)
    (tmp_path / "latest").symlink_to(path)
    assert locate(tmp_path / "latest") == path


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_what_is_no_checkpoint_is_a_wrong_request(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="give a run directory or a checkpoint"):
        locate(tmp_path / name)
    if name == "nowhere":
        with pytest.raises(RequestError, match="no such checkpoint"):
            verify(tmp_path / name)
