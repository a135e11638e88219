"""Who shares a folder, from what each rank sees."""

import pytest

from shoal.checkpoint.places.folders import Folders, describe_ranks, lead
from shoal.core.errors import RunError


def test_the_lowest_rank_that_sees_a_folder_leads_it():
    assert lead([[0, 1, 2], [0, 1, 2], [0, 1, 2]]) == (0, 0, 0)
    assert lead([[0], [1, 3], [2], [1, 3]]) == (0, 1, 2, 1)


def test_two_share_a_folder_only_when_each_sees_the_other():
    assert lead([[0, 1], [1]]) == (0, 1)


def test_a_file_system_that_shows_files_to_some_only_is_refused():
    with pytest.raises(RunError, match=r"rank 0 shares a folder with ranks 0-1 and rank 1 with ranks 0-2"):
        lead([[0, 1], [0, 1, 2], [1, 2]])


def test_ranks_and_hosts_are_named():
    assert describe_ranks([3]) == "rank 3" and describe_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    folders = Folders(rank=2, leaders=(0, 0, 2, 2), hosts=("a", "a", "b", "b"))
    assert folders.describe() == "ranks 0-1 on a; ranks 2-3 on b"
    assert folders.is_leader and not folders.is_shared and folders.all_leaders == [0, 2]
    assert Folders(rank=1, leaders=(0, 0), hosts=("a", "b")).is_shared
