"""What is loaded, and who gives what, from what the folders have."""

import pytest

from shoal.checkpoint.places.bringing import Share, candidates_of, decode_share, owners_of
from shoal.core.errors import RunError

FILES = ("rank-000.safetensors", "rank-001.safetensors")
ID = "0123456789abcdef"


def share(*whole):
    return Share(id=ID, files=FILES, whole=whole)


def test_the_newest_step_comes_first_and_of_two_manifests_the_one_that_more_folders_have():
    offers = {0: {10: "a", 20: "x"}, 2: {10: "a", 20: "y"}, 4: {20: "y", 5: "c"}}
    assert candidates_of(offers) == [(20, "y"), (20, "x"), (10, "a"), (5, "c")]


def test_every_file_has_the_lowest_owner_that_has_it_whole_and_what_nobody_has_is_missing():
    assert owners_of({0: share(FILES[0]), 2: share(*FILES), 4: None}) == ({FILES[0]: 0, FILES[1]: 2}, [])
    assert owners_of({0: share(FILES[0]), 2: None}) == ({FILES[0]: 0}, [FILES[1]])
    assert owners_of({0: None}) == ({}, [])


def test_a_share_crosses_and_names_that_lead_elsewhere_are_refused():
    assert decode_share(share(FILES[0]).encode()) == share(FILES[0]) and decode_share(b"") is None
    for wrong in (
        Share(id=ID, files=("../x",), whole=()),
        Share(id="x", files=FILES, whole=()),
        Share(id=ID, files=(), whole=FILES),
    ):
        with pytest.raises(RunError, match="files that no checkpoint has"):
            decode_share(wrong.encode())
