import os
import random

import pytest

from shoal.checkpoint.files import NotWhole
from shoal.checkpoint.published.version import DESCRIPTION, NEWEST, RECIPE, WEIGHTS
from shoal.checkpoint.published.versions import (
    clear_drafts,
    open_version,
    published_numbers,
    read_newest,
    read_pointer,
)
from support.checkpoint.versions import publish_one


def test_what_was_published_is_found_by_the_pointer(tmp_path):
    assert read_pointer(tmp_path) is None and read_newest(tmp_path) is None
    for step in (10, 20, 30, 40):
        made = publish_one(tmp_path, step, keep=2)
        number, sha256 = read_pointer(tmp_path)
        opened = open_version(tmp_path, number, expect=sha256)
        assert opened.version == made == read_newest(tmp_path)
        assert opened.recipe == f"step = {step}\n".encode()
    assert published_numbers(tmp_path) == [4, 3]
    assert sorted(os.listdir(tmp_path)) == [NEWEST, "version-00000003", "version-00000004"]


def test_a_number_is_never_given_twice(tmp_path):
    publish_one(tmp_path, 1)
    publish_one(tmp_path, 2)
    # A run that dies between the name and the pointer leaves a version that nobody points to.
    (tmp_path / "version-00000007").mkdir()
    (tmp_path / ".tmp-version-00000008-0011223344556677").mkdir()
    clear_drafts(tmp_path)
    assert publish_one(tmp_path, 3).number == 8
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", [DESCRIPTION, RECIPE, WEIGHTS, "columns.json"])
def test_a_flipped_bit_and_a_cut_are_refused_with_the_file(tmp_path, name):
    publish_one(tmp_path, 1, beside={"columns.json": b"{}" * 40})
    number, sha256 = read_pointer(tmp_path)
    assert open_version(tmp_path, number, expect=sha256).beside == {"columns.json": b"{}" * 40}
    path = tmp_path / "version-00000001" / name
    whole = path.read_bytes()
    draw = random.Random(1)
    for _ in range(20):
        place = draw.randrange(len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        with pytest.raises(NotWhole, match=name):
            open_version(tmp_path, number, expect=sha256)
    path.write_bytes(whole[:-1])
    with pytest.raises(NotWhole, match=name):
        open_version(tmp_path, number, expect=sha256)
    path.unlink()
    os.symlink("/etc/hostname", path)
    with pytest.raises(NotWhole, match="link"):
        open_version(tmp_path, number, expect=sha256)


@pytest.mark.parametrize(
    "text",
    [b"", b"{}", b'{"version": -1, "sha256": "00"}', b'{"version": true, "sha256": ""}', b"[" * 4000, b"x" * 5000],
)
def test_a_pointer_that_is_none_is_refused(tmp_path, text):
    (tmp_path / NEWEST).write_bytes(text)
    with pytest.raises(NotWhole, match=NEWEST):
        read_pointer(tmp_path)
    assert read_newest(tmp_path) is None
