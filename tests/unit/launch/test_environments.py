"""What a launcher's variables say of a process, as a table."""

import pytest

from shoal.core.errors import RequestError
from shoal.core.place import Place
from shoal.launch.environments import process_environment, rank_environment, read_place


def test_a_process_that_nobody_launched_is_alone() -> None:
    assert read_place({"WORLD_SIZE": "4", "PATH": "/bin"}) == Place() == Place(rank=0, world_size=1, is_launched=False)


def test_torchruns_variables() -> None:
    given = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "2"}
    place = read_place(given)
    assert (place.rank, place.world_size, place.local_rank, place.generation) == (3, 4, 1, 2)
    assert place.is_launched and place.launcher == "torchrun"
    # One rank of one has a group all the same.
    assert read_place({"RANK": "0", "WORLD_SIZE": "1"}).is_launched


def test_threads_of_no_process_spin_while_they_wait(monkeypatch) -> None:
    """Of a pool neither: steps that are rehearsed there are taken for those of the run."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert process_environment(threads=2)["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert process_environment(threads=2)["OMP_WAIT_POLICY"] == "ACTIVE", "the user's own word counts"


def test_what_the_supervisor_writes_is_read() -> None:
    given = {**rank_environment(rank=2, num_ranks=3), "SHOAL_STORE": "/proc/self/fd/7"}
    place = read_place(given)
    assert (place.rank, place.world_size, place.local_rank, place.local_size) == (2, 3, 2, 3)
    assert place.store == "/proc/self/fd/7" and place.launcher == "supervisor"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "0"}, "not a whole WORLD_SIZE"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "not a whole WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 of WORLD_SIZE=2"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK=-1 of WORLD_SIZE=2"),
    ],
)
def test_what_makes_no_sense_is_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_place(given)
