"""The warning before a disk is too small. On a real small disk: tests/chaos/test_disk_full.py."""

import shutil

from shoal.checkpoint.space import warn_if_short


def test_enough_room_is_no_warning(tmp_path):
    assert warn_if_short(tmp_path / "run" / "checkpoints", 1) is None


def test_too_little_room_names_both_numbers_and_the_fix(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    warning = warn_if_short(tmp_path / "run" / "checkpoints", 10 * free)
    assert "need" in warning and "the disk has" in warning and "checkpoint.keep" in warning
    assert not (tmp_path / "run").exists()
