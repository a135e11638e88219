"""How a save takes its name. What a kill leaves between the steps is in tests/chaos."""

import os

import pytest

from shoal.checkpoint.commit import abandon, begin, is_leftover, sweep, write_checkpoint
from shoal.checkpoint.files import Beside, beside_name, draw_id, step_name
from shoal.checkpoint.whole import newest_whole, verify
from support.checkpoint.forged import contents, expected, make, two_ranks


def names(root):
    return sorted(os.listdir(root))


def test_a_checkpoint_holds_the_manifest_and_the_shards_and_nothing_else(tmp_path):
    path = make(tmp_path / "new" / "checkpoints", 100)
    assert path.name == "step-00000100" and names(path.parent) == ["step-00000100"]
    assert names(path) == ["manifest.json", "rank-000.safetensors", "rank-001.safetensors"]
    assert contents(path) == expected(100) and verify(path) == []


@pytest.mark.parametrize("torn", [True, False])
def test_a_folder_that_has_the_name_is_replaced_and_never_merged_into(tmp_path, torn):
    old = make(tmp_path, 10, seed=1)
    (old / "rank-007.safetensors").write_text("left by another number of ranks")
    if torn:
        (old / "manifest.json").unlink()
    make(tmp_path, 10, seed=2)
    assert contents(tmp_path / "step-00000010") == expected(10, seed=2)
    assert names(tmp_path) == ["step-00000010"] and "rank-007.safetensors" not in names(tmp_path / "step-00000010")


def test_a_link_that_has_the_name_is_replaced_and_its_target_untouched(tmp_path):
    root, elsewhere = tmp_path / "checkpoints", make(tmp_path / "other", 10, seed=1)
    root.mkdir()
    (root / "step-00000010").symlink_to(elsewhere)
    make(root, 10, seed=2)
    assert contents(root / "step-00000010") == expected(10, seed=2) and names(root) == ["step-00000010"]
    assert contents(elsewhere) == expected(10, seed=1)


def test_ids_are_never_used_again(tmp_path):
    drafts = [begin(tmp_path, 5) for _ in range(20)]
    assert len({draft.id for draft in drafts}) == 20
    for draft in drafts:
        abandon(draft)
    assert names(tmp_path) == []


def test_values_that_are_not_json_leave_nothing(tmp_path):
    make(tmp_path, 10)
    with pytest.raises(ValueError, match="object is not a value"):
        write_checkpoint(tmp_path, step=20, ranks=two_ranks(1), values={"x": object()})
    assert names(tmp_path) == ["step-00000010"]


def test_the_sweep_removes_what_is_ours_and_nothing_else(tmp_path):
    make(tmp_path, 10)
    draft = begin(tmp_path, 20)
    (draft.folder / "rank-000.safetensors").write_text("half")
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (tmp_path / ".expired-step-00000005-0123456789abcdef").symlink_to(outside)
    foreign = [".git", ".tmp-mine", "notes.txt", ".tmp-step-00000020-nothex0123456789"]
    for name in foreign:
        (tmp_path / name).mkdir()
    assert len(sweep(tmp_path)) == 2
    assert names(tmp_path) == sorted([*foreign, "step-00000010"])
    assert (outside / "precious").exists()
    assert sweep(tmp_path) == [] and sweep(tmp_path / "nowhere") == []


def test_what_a_dead_save_had_set_aside_is_found_and_put_back(tmp_path):
    make(tmp_path, 10)
    make(tmp_path, 20)
    draft = begin(tmp_path, 20)
    os.rename(draft.final, draft.replaced)
    assert contents(newest_whole(tmp_path).path) == expected(20)
    assert sweep(tmp_path)
    assert newest_whole(tmp_path).path == tmp_path / "step-00000020" and names(tmp_path) == [
        "step-00000010",
        "step-00000020",
    ]


def test_what_was_set_aside_goes_when_the_name_is_taken(tmp_path):
    draft = begin(tmp_path, 20)
    make(tmp_path, 20, seed=1).rename(draft.replaced)
    make(tmp_path, 20, seed=2)
    assert contents(newest_whole(tmp_path).path) == expected(20, seed=2)
    sweep(tmp_path)
    assert names(tmp_path) == ["step-00000020"] and contents(newest_whole(tmp_path).path) == expected(20, seed=2)


def test_what_was_set_aside_on_purpose_is_nobodys_leftover(tmp_path):
    """`shoal doctor` called it left by a save that never ended, and would have removed it."""
    names = {kind: beside_name(kind, 4, draw_id()) for kind in Beside}
    for name in names.values():
        (tmp_path / name).mkdir()
    (tmp_path / step_name(4)).mkdir()
    assert {kind for kind, name in names.items() if is_leftover(name)} == set(Beside) - {Beside.ASIDE}
    assert not is_leftover(step_name(4)) and not is_leftover("notes.txt")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([names[Beside.ASIDE], step_name(4)])
